// Line charts of several runs over one horizontal axis, by uPlot; a point is read by hovering, a range by dragging.

import { color, el, number } from "./dom.js";
import { runColor } from "./app.js";

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

export function chart(title, note, lines, { xLabel = "step", markers = [] } = {}) {
  const box = el("div", { class: "chart" }, el("h3", {}, title, " ", el("span", {}, note ?? "")));
  const data = aligned(lines);
  const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const options = {
    width: 400,
    height: 190,
    cursor: { drag: { x: true, y: false }, focus: { prox: 24 } },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => number(tick, 2)) }],
    series: [
      { label: xLabel, value: (_, value) => number(value, 1) },
      ...lines.map((line) => ({
        label: line.label,
        stroke: line.color ?? runColor(line.run),
        width: 1.5,
        dash: line.dash,
        spanGaps: true,
        points: { show: line.points ?? line.x.length < 3, size: 5 },
        value: (_, value) => number(value),
      })),
    ],
    hooks: { draw: [(plot) => drawMarkers(plot, markers)] },
  };
  const plot = new uPlot(options, data, box);
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 18), height: 190 })).observe(box);
  return { box, set: (next) => plot.setData(aligned(next)) };
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
