// Which process was busy when: one row a process, zoomed with the wheel, moved by dragging, down to one decode window.

import { get } from "./api.js";
import { color, el, seconds, shown, tip, TIME_STEPS } from "./dom.js";
import { chosenRun, runColor } from "./app.js";

const ROW = 34;
const LEFT = 130;
const TOP = 26;

function ticks(from, to, width) {
  const rough = (to - from) / Math.max(2, Math.min(10, width / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = (rough < 1 ? [1, 2, 5, 10].map((k) => k * power) : TIME_STEPS).find((k) => k >= rough) ?? power;
  const found = [];
  for (let at = Math.ceil(from / size) * size; at <= to; at += size) found.push(at);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(size))) };
}

class Timeline {
  constructor(run, total) {
    this.run = run;
    this.total = Math.max(total, 1e-3);
    this.from = 0;
    this.to = this.total;
    this.answer = { rows: [], markers: [] };
    this.canvas = el("canvas", { class: "timeline", tabIndex: 0, role: "img", "aria-label": "timeline of the run's processes" });
    this.canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => tip({}, null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get width() { return this.canvas.clientWidth - LEFT; }
  x(at) { return LEFT + ((at - this.from) / (this.to - this.from)) * this.width; }
  at(x) { return this.from + ((x - LEFT) / this.width) * (this.to - this.from); }

  show(from, to) {
    const span = Math.min(this.total, Math.max(1e-4, to - from));
    this.from = Math.max(0, Math.min(from, this.total - span));
    this.to = this.from + span;
    this.draw();
    clearTimeout(this.reading);
    this.reading = setTimeout(() => this.read(), 120);
  }

  async read() {
    this.answer = await get("timeline", { run: this.run, from: this.from, to: this.to, pixels: Math.round(this.width) || 800 });
    this.total = Math.max(this.total, this.answer.total_s);
    this.draw();
  }

  zoom(event) {
    event.preventDefault();
    const middle = this.at(event.offsetX);
    const factor = Math.exp(event.deltaY / 400);
    this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  }

  drag(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const [start, from, to] = [event.clientX, this.from, this.to];
    const move = (later) => {
      const shift = ((later.clientX - start) / this.width) * (to - from);
      this.show(from - shift, to - shift);
    };
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", () => this.canvas.removeEventListener("pointermove", move), { once: true });
  }

  key(event) {
    const span = this.to - this.from;
    const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.3, 0.3] };
    if (moves[event.key]) this.show(this.from + moves[event.key][0] * span, this.to + moves[event.key][1] * span);
  }

  draw() {
    const { rows, markers } = this.answer;
    const height = TOP + ROW * Math.max(1, rows.length) + 6;
    const scale = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.canvas.clientWidth * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui";
    pen.textBaseline = "middle";
    const { found, digits } = ticks(this.from, this.to, this.width);
    for (const at of found) {
      pen.fillStyle = color("--line");
      pen.fillRect(this.x(at), TOP - 4, 1, height);
      pen.fillStyle = color("--faint");
      const text = digits ? `${at.toFixed(digits)} s` : seconds(at);
      if (this.x(at) + 3 + pen.measureText(text).width < this.canvas.clientWidth) pen.fillText(text, this.x(at) + 3, 10);
    }
    rows.forEach((row, index) => this.drawRow(pen, row, index));
    pen.fillStyle = color("--bad");
    for (const marker of markers) pen.fillRect(this.x(marker.wall_s), TOP - 6, 1.5, height);
    pen.clearRect(0, TOP, LEFT - 6, height);
    rows.forEach((row, index) => {
      pen.fillStyle = color("--ink");
      pen.fillText(row.name.slice(0, 18), 0, TOP + ROW * (index + 0.5));
    });
  }

  drawRow(pen, row, index) {
    const top = TOP + ROW * index + 4;
    pen.fillStyle = runColor(row.lane);
    for (const [start, end, share, text] of row.spans) {
      const [left, right] = [Math.max(LEFT, this.x(start)), Math.min(this.canvas.clientWidth, this.x(end))];
      if (right <= LEFT || left >= this.canvas.clientWidth) continue;
      pen.globalAlpha = 0.15 + 0.85 * Math.min(1, share);
      const width = Math.max(0.7, right - left);
      pen.fillRect(left, top, width > 4 ? width - 1 : width, ROW - 8);
      if (width > 40 && pen.measureText(text).width < width - 10) {
        pen.globalAlpha = 1;
        pen.fillStyle = share > 0.45 ? color("--ground") : color("--ink");
        pen.fillText(text, left + 5, top + (ROW - 8) / 2);
        pen.fillStyle = runColor(row.lane);
      }
    }
    pen.globalAlpha = 1;
  }

  point(event) {
    const at = this.at(event.offsetX);
    const row = this.answer.rows[Math.floor((event.offsetY - TOP) / ROW)];
    const span = row?.spans.find(([start, end]) => start <= at && at <= end);
    const near = this.answer.markers.find((marker) => Math.abs(this.x(marker.wall_s) - event.offsetX) < 4);
    if (near) tip(event, [["event", near.kind], ["", shown(near.text)], ["after", seconds(near.wall_s)]]);
    else if (span) tip(event, [[row.name, span[3]], ["from", `${span[0].toFixed(3)} s`], ["for", `${(span[1] - span[0]).toFixed(3)} s`], ["busy", `${Math.round(100 * span[2])}%`]]);
    else tip(event, null);
  }
}

export async function timelinePage(place) {
  const run = chosenRun();
  const first = await get("timeline", { run, pixels: 1200 });
  const timeline = new Timeline(run, first.total_s);
  timeline.answer = first;
  place.replaceChildren(
    el("div", { class: "bar" },
      el("button", { onclick: () => timeline.show(0, timeline.total) }, "whole run"),
      el("span", { class: "faint" }, "wheel or + − to zoom, drag or ← → to move; the stronger the colour, the busier; a red line is an event")),
    el("div", { class: "panel" }, timeline.canvas),
    el("p", { class: "faint" }, "Engines report once every metrics.stats_every_s: a bar is one such window of decoding, with the share of it that they computed. ",
      "Rows of weights are transfers up to the swap. Everything else is exact to the event."),
  );
  timeline.draw();
  return async () => {
    const whole = timeline.to >= timeline.total;
    await timeline.read();
    if (whole) timeline.show(timeline.from, timeline.total);
  };
}
