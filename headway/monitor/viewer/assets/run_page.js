// Curves of all chosen runs against step or wall time, with what happened to their workers.

import { get } from "./api.js";
import { chart } from "./charts.js";
import { el, number, seconds, shown } from "./dom.js";
import { state } from "./app.js";

const AXES = { step: "step", wall_s: "wall time, s" };
let axis = "step";

function lines(all, metric) {
  return all
    .filter(({ series }) => series.columns[metric.name]?.some((value) => value !== null))
    .map(({ run, series }) => ({ run, label: state.runs[run].name, x: series.columns[axis], y: series.columns[metric.name] }));
}

function accuracies(all) {
  return all
    .filter(({ series }) => series.evaluations.length)
    .map(({ run, series }) => ({
      run,
      label: state.runs[run].name,
      x: series.evaluations.map((one) => (axis === "step" ? one.version : one.wall_s)),
      y: series.evaluations.map((one) => one.accuracy),
      points: true,
    }));
}

function cards(run) {
  const facts = Object.entries(state.runs[run].facts);
  return el("div", { class: "cards" }, facts.map(([name, value]) =>
    el("div", { class: "card" }, el("span", { class: "faint" }, name), el("b", {}, typeof value === "number" ? number(value) : shown(value)))));
}

function happenings(all) {
  const rows = all.flatMap(({ run, series }) => series.markers.map((one) => ({ run, ...one }))).sort((a, b) => b.wall_s - a.wall_s);
  if (!rows.length) return el("p", { class: "faint" }, "No worker was lost, resized or restarted.");
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["run", "after", "at step", "event", ""].map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.slice(0, 200).map((row) => el("tr", {},
      el("td", {}, state.runs[row.run].name), el("td", {}, seconds(row.wall_s)), el("td", { class: "number" }, number(row.step)),
      el("td", {}, row.kind), el("td", {}, shown(row.text)))))));
}

export async function runPage(place, _query, signal) {
  const runs = state.runs.map((_, index) => index).filter((index) => !state.hidden.has(index));
  const read = async () => Promise.all(runs.map(async (run) => ({ run, series: await get("series", { run }, signal) })));
  let all = await read();
  const draw = () => {
    const markers = all.flatMap(({ series }) => series.markers.map((one) => ({ x: axis === "step" ? one.step : one.wall_s })));
    const metrics = [...new Map(all.flatMap(({ series }) => series.metrics).map((metric) => [metric.name, metric])).values()];
    const charts = [];
    if (accuracies(all).length) {
      charts.push(chart("Held-out accuracy", "share of problems solved", accuracies(all), { xLabel: AXES[axis], markers }));
    }
    for (const metric of metrics) {
      const found = lines(all, metric);
      if (found.length) charts.push(chart(metric.title, metric.description, found, { xLabel: AXES[axis], markers }));
    }
    const choose = Object.entries(AXES).map(([name, title]) => el("button", {
      class: axis === name ? "on" : "",
      onclick: () => { axis = name; draw(); },
    }, `against ${title}`));
    const heads = runs.map((run) => [runs.length > 1 ? el("h2", {}, state.runs[run].name) : null, cards(run)]);
    const warnings = all.flatMap(({ series }) => series.warnings.map((text) => el("div", { class: "problem" }, shown(text))));
    place.replaceChildren(
      ...warnings, ...heads.flat().filter(Boolean), el("div", { class: "bar" }, choose),
      el("div", { class: "charts" }, charts.map((one) => one.box)), el("h2", {}, "Events"), happenings(all),
    );
  };
  draw();
  return async () => { all = await read(); draw(); };
}
