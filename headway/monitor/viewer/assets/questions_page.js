// Questions that are asked of every run, answered by one click.

import { get } from "./api.js";
import { el, number, shown } from "./dom.js";
import { chosenRun, link, runPicker } from "./app.js";

function cell(value) {
  return typeof value === "number" ? el("td", { class: "number" }, number(value)) : el("td", { class: "text" }, shown(value ?? "–"));
}

export async function questionsPage(place, query, signal) {
  const run = chosenRun();
  const { questions } = await get("questions", { run }, signal);
  const asked = query.get("ask") ?? questions[0].name;
  const buttons = questions.map((one) => el("button", {
    class: one.name === asked ? "on" : "",
    onclick: () => { location.hash = link("questions", { run, ask: one.name }); },
  }, one.title));
  const box = el("div", {}, el("p", { class: "faint" }, "reading the record …"));
  place.replaceChildren(el("div", { class: "bar" }, runPicker((other) => { location.hash = link("questions", { run: other, ask: asked }); }), buttons), box);
  const answer = await get("questions", { run, ask: asked }, signal);
  const rows = answer.rows.map((row) => el("tr", {
    class: row.group === undefined ? "" : "link",
    onclick: () => { if (row.group !== undefined) location.hash = link("group", { run, group: row.group, trajectory: row.trajectory ?? 0 }); },
  }, row.cells.map(cell)));
  box.replaceChildren(
    el("p", { class: "faint" }, answer.note),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, answer.headings.map((name) => el("th", {}, name)))), el("tbody", {}, rows))),
  );
}
