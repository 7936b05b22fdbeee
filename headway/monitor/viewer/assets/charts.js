// Line charts of several runs over one horizontal axis, by uPlot. Hovering reads all charts at once; dragging zooms, and
// a double click shows everything again. A chart is updated in place, so that following a live run keeps the zoom.

import { color, el, number, seconds, tip, TIME_STEPS } from "./dom.js";
import { runColor } from "./app.js";

const HEIGHT = 176;

// Runs have steps of their own: one sorted axis of all, and for each run its values there or nothing.
export function aligned(lines) {
  const axis = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(axis.map((x, index) => [x, index]));
  const columns = lines.map((line) => {
    const column = new Array(axis.length).fill(null);
    line.x.forEach((x, index) => { column[place.get(x)] = line.y[index]; });
    return column;
  });
  return [axis, ...columns];
}

function tickTexts(ticks, unit) {
  const suffix = unit === "%" ? "%" : "";
  const scale = unit === "%" ? 100 : 1;
  const gap = (ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(ticks[0]) || 1) * scale;
  const digits = [0, 1, 2, 3, 4, 5].find((places) => Math.abs(gap * 10 ** places - Math.round(gap * 10 ** places)) < 1e-6 * gap * 10 ** places) ?? 6;
  const largest = scale * Math.max(...ticks.map(Math.abs));
  return ticks.map((tick) => {
    const value = tick * scale;
    if (largest >= 1e5 || largest < 1e-3) return value === 0 ? `0${suffix}` : value.toExponential(1) + suffix;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + suffix;
  });
}

function reading(value, unit) {
  if (value === null || value === undefined) return "–";
  return unit === "%" ? `${(100 * value).toFixed(1)}%` : number(value);
}

function series(lines, unit) {
  return lines.map((line) => ({
    label: line.label,
    stroke: line.color ?? runColor(line.run),
    width: 1.6,
    dash: line.dash,
    spanGaps: true,
    points: { show: line.points ?? line.x.length < 3, size: 6, fill: line.color ?? runColor(line.run) },
    value: (_, value) => reading(value, unit),
  }));
}

// Runs rarely have a point at the same second: each is read at its own nearest one, where that is close.
function nearest(plot, place, index) {
  const [axis, values] = [plot.data[0], plot.data[place]];
  const reach = 0.03 * (plot.scales.x.max - plot.scales.x.min);
  for (let away = 0; away < axis.length; away += 1) {
    for (const at of [index - away, index + away]) {
      if (values[at] !== null && values[at] !== undefined) return Math.abs(axis[at] - axis[index]) <= reach ? at : index;
    }
  }
  return index;
}

export class Chart {
  constructor(title, note, lines, { isTime, markers, unit = "" }) {
    this.markers = markers;
    this.names = lines.map((line) => line.label).join("\n");
    this.box = el("figure", { class: "chart" }, el("figcaption", { title: note }, el("b", {}, title), unit && unit !== "%" ? el("i", {}, unit) : "", note));
    const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    this.plot = new uPlot({
      width: 400,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, sync: { key: "runs" }, dataIdx: nearest },
      scales: { x: { time: false }, y: { range: (_, low, high) => bounds(low, high, unit) } },
      axes: [{ ...axis, size: 26, gap: 4, ...(isTime ? { incrs: TIME_STEPS, space: 70, values: (_, ticks) => ticks.map(seconds) } : {}) }, { ...axis, size: 52, gap: 6, values: (_, ticks) => tickTexts(ticks, unit) }],
      series: [{ label: isTime ? "after" : "step", value: (_, value) => (isTime ? seconds(value) : number(value)) }, ...series(lines, unit)],
      legend: { markers: { width: 0, fill: (_, place) => series(lines, unit)[place - 1]?.stroke } },
      hooks: { draw: [(plot) => drawMarkers(plot, this.markers)] },
    }, aligned(lines), this.box);
    this.plot.over.addEventListener("mousemove", (event) => {
      const x = event.clientX - this.plot.over.getBoundingClientRect().left;
      tip(event, this.markers.find((marker) => Math.abs(this.plot.valToPos(marker.x, "x") - x) < 4)?.about ?? null);
    });
    this.plot.over.addEventListener("mouseleave", (event) => tip(event, null));
    this.resizing = new ResizeObserver(() => this.plot.setSize({ width: Math.max(200, this.box.clientWidth - 20), height: HEIGHT }));
    this.resizing.observe(this.box);
  }

  fits(lines) {
    return lines.map((line) => line.label).join("\n") === this.names;
  }

  update(lines, markers) {
    this.markers = markers;
    const { min, max } = this.plot.scales.x;
    const axis = this.plot.data[0];
    const isZoomed = axis.length > 1 && (min > axis[0] || max < axis[axis.length - 1]);
    this.plot.setData(aligned(lines), !isZoomed);
    if (isZoomed) this.plot.redraw();
  }

  close() {
    this.resizing.disconnect();
    this.plot.destroy();
  }
}

// A constant line lies in the middle, one of zeros at the bottom; shares keep their natural ends where they come near them.
function bounds(low, high, unit) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  const bottom = low >= 0 && low - room < 0.25 * (high - low) ? 0 : low - room;
  return [low === 0 ? 0 : bottom, unit === "%" ? Math.min(1.02, high + room) : high + room];
}

function drawMarkers(plot, markers) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color("--warn");
  ctx.setLineDash([3, 3]);
  for (const marker of markers) {
    const x = plot.valToPos(marker.x, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
