// Curves of all chosen runs against step or wall time, with what happened to their workers.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { el, number, seconds, shown } from "./dom.js";
import { link, state, swatch } from "./app.js";

const AXES = { step: "step", wall_s: "wall time" };
let axis = "step";

const ACCURACY = { name: "accuracy", section: "Learning", title: "Held-out accuracy", unit: "%", description: "share of held-out problems solved" };

function lines(all, metric) {
  if (metric === ACCURACY) return accuracies(all);
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
  const facts = Object.entries(state.runs[run].facts).filter(([name]) => name !== "status"); // which the header has
  return el("div", { class: "cards" }, facts.map(([name, value]) =>
    el("div", { class: "card" }, el("span", { class: "faint" }, name), el("b", {}, typeof value === "number" ? number(value) : shown(value)))));
}

function inside(run) {
  const ask = (question, title) => el("a", { href: link("questions", { run, ask: question }) }, title);
  return [ask("wrong_to_right", "prompts that went from wrong to right"), ask("swaps", "weight swaps in mid-completion"), ask("then_and_now", "what it wrote first, and what now")];
}

// Several runs are a table, one row each; one run is a row of cards.
function overview(runs) {
  if (runs.length === 1) return [cards(runs[0]), el("p", { class: "faint inside" }, "look inside:", inside(runs[0]))];
  const plain = (name) => name.split(",")[0];
  const columns = [...new Set(runs.flatMap((run) => Object.keys(state.runs[run].facts).map(plain)))];
  const rows = runs.map((run) => {
    const facts = new Map(Object.entries(state.runs[run].facts).map(([name, value]) => [plain(name), typeof value === "number" ? number(value) : shown(value)]));
    return el("tr", {}, el("td", {}, swatch(run), el("a", { href: link("groups", { run }) }, state.runs[run].name)), columns.map((name) => el("td", {}, facts.get(name) ?? "–")));
  });
  return [el("div", { class: "scroll" }, el("table", { class: "overview" }, el("thead", {}, el("tr", {}, ["run", ...columns].map((name) => el("th", {}, name)))), el("tbody", {}, rows)))];
}

function happenings(all) {
  const rows = all.flatMap(({ run, series }) => series.markers.map((one) => ({ run, ...one }))).sort((a, b) => b.wall_s - a.wall_s);
  if (!rows.length) return el("p", { class: "faint" }, "No worker was lost, resized or restarted, and no step was skipped.");
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["run", "after", "at step", "event", ""].map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.slice(0, 200).map((row) => el("tr", {},
      el("td", {}, state.runs[row.run].name), el("td", {}, seconds(row.wall_s)), el("td", { class: "number" }, number(row.step)),
      el("td", {}, row.kind), el("td", { class: "wide" }, shown(row.text)))))));
}

function heads(all, runs) {
  const warnings = all.flatMap(({ run, series }) => series.warnings.map((text) => el("div", { class: "problem" },
    runs.length > 1 ? el("b", {}, `${state.runs[run].name}: `) : "", shown(text))));
  return [...warnings, ...(runs.length ? overview(runs) : [el("p", { class: "faint" }, "No run is chosen; the boxes in the header choose.")])];
}

export async function runPage(place, _query, signal) {
  const runs = state.runs.map((_, index) => index).filter((index) => !state.hidden.has(index));
  const read = async () => Promise.all(runs.map(async (run) => ({ run, series: await get("series", { run }, signal) })));
  const [head, bar, body, events] = [el("div"), el("div", { class: "bar" }), el("div"), el("div")];
  const charts = new Map();
  let all = await read();

  const markersOf = () => all.flatMap(({ run, series }) => series.markers.map((one) => ({
    x: one[axis],
    about: [[runs.length > 1 ? state.runs[run].name : "event", one.kind], ["", shown(one.text)], ["after", `${seconds(one.wall_s)}, step ${one.step}`]],
  })));
  const fill = () => {
    head.replaceChildren(...heads(all, runs));
    events.replaceChildren(el("h2", {}, "Events"), happenings(all));
    const metrics = [ACCURACY, ...(all[0]?.series.metrics ?? [])].map((metric) => [metric, lines(all, metric)]).filter(([, found]) => found.length);
    const wanted = metrics.map(([metric]) => metric.name);
    if ([...charts.keys()].join() === wanted.join() && metrics.every(([metric, found]) => charts.get(metric.name).fits(found))) {
      for (const [metric, found] of metrics) charts.get(metric.name).update(found, markersOf());
      return;
    }
    for (const chart of charts.values()) chart.close();
    charts.clear();
    const sections = new Map();
    for (const [metric, found] of metrics) {
      const chart = new Chart(metric.title, metric.description, found, { isTime: axis === "wall_s", markers: markersOf(), unit: metric.unit });
      charts.set(metric.name, chart);
      sections.set(metric.section, [...(sections.get(metric.section) ?? []), chart.box]);
    }
    const parts = [...sections].flatMap(([title, boxes]) => [el("h2", {}, title), el("div", { class: "charts" }, boxes)]);
    body.replaceChildren(...(parts.length || !runs.length ? parts : [el("p", { class: "faint" }, "No training step has finished yet.")]));
  };
  const choose = (name) => { axis = name; for (const chart of charts.values()) chart.close(); charts.clear(); drawBar(); fill(); };
  const drawBar = () => bar.replaceChildren(
    el("div", { class: "switch", role: "group", "aria-label": "horizontal axis" }, Object.entries(AXES).map(([name, title]) =>
      el("button", { class: axis === name ? "on" : "", onclick: () => choose(name) }, title))),
    el("span", { class: "faint" }, "drag in a chart to zoom, double click to see all; dashed lines are events"),
    state.runs.length > 1 ? el("a", { href: link("config") }, "config diff") : null ?? "");
  drawBar();
  place.replaceChildren(head, bar, body, events);
  fill();
  return async () => { all = await read(); fill(); };
}
