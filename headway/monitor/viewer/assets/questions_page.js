// Questions that are asked of every run, answered by one click.

import { get } from "./api.js";
import { el, number, shown } from "./dom.js";
import { chosenRun, link } from "./app.js";

function cell(value) {
  return typeof value === "number" ? el("td", { class: "number" }, number(value)) : el("td", { class: `text clipped ${(value ?? "").length < 24 ? "short" : ""}` }, shown(value ?? "–"));
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
  place.replaceChildren(el("div", { class: "bar" }, buttons), box);
  const answer = await get("questions", { run, ask: asked }, signal);
  const open = ({ group, trajectory = 0, token, evaluation }) => {
    if (group !== undefined) location.hash = link("group", { run, group, trajectory, token, evaluation });
  };
  const rows = answer.rows.map((row) => el("tr", {
    class: row.group === undefined ? "" : "link",
    tabIndex: 0,
    onclick: () => open(row),
    onkeydown: (event) => { if (event.key === "Enter") open(row); },
  }, row.cells.map(cell)));
  const numeric = answer.headings.map((_, index) => answer.rows.length && typeof answer.rows[0].cells[index] === "number");
  const heads = answer.headings.map((name, index) => el("th", { class: numeric[index] ? "number" : "" }, name));
  box.replaceChildren(
    el("p", { class: "faint" }, shown(answer.note)),
    rows.length ? el("div", { class: "scroll" }, el("table", { class: "answers" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))) : "");
}
