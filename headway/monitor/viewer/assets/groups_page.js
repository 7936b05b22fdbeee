// All trajectories of a run, one row each: sorted, filtered and searched by the server, a page at a time.

import { get } from "./api.js";
import { el, number, shown } from "./dom.js";
import { chosenRun, link, problem, route, runPicker } from "./app.js";

const PAGE_ROWS = 50;
const COLUMNS = [
  ["group", "group", true], ["trajectory", "#", true], ["prompt", "row", true], ["step", "step", true], ["reward", "reward", true],
  ["length", "tokens", true], ["staleness", "staleness", true], ["stop", "stop", false], ["state", "state", false],
];
const FILTERS = [
  ["step", "step"], ["reward_min", "reward ≥"], ["reward_max", "reward ≤"], ["length_min", "tokens ≥"], ["length_max", "tokens ≤"],
  ["staleness_min", "staleness ≥"], ["prompt", "row"],
];
const CHOICES = { stop: ["stop", "length", "context", "aborted"], state: ["trained", "waiting", "taken", "dropped", "failed"] };

function go(changes) {
  const { query } = route();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  location.hash = link("groups", Object.fromEntries(query));
}

function filters(query) {
  const change = (name) => (event) => go({ [name]: event.target.value, offset: null });
  return el("div", { class: "bar" },
    runPicker((run) => go({ run, offset: null })),
    FILTERS.map(([name, title]) => el("label", {}, `${title} `,
      el("input", { type: "number", step: "any", name, value: query.get(name) ?? "", onchange: change(name) }))),
    Object.entries(CHOICES).map(([name, values]) => el("select", { name, "aria-label": name, onchange: change(name) },
      el("option", { value: "" }, `any ${name}`),
      values.map((value) => el("option", { value, selected: query.get(name) === value }, value)))),
    el("input", { type: "search", name: "search", placeholder: "text in completion or failure", value: query.get("search") ?? "", onchange: change("search") }),
    el("button", { onclick: () => { location.hash = link("groups", { run: query.get("run") }); } }, "clear"));
}

function table(answer, query) {
  const sort = query.get("sort") ?? "group";
  const down = query.get("down") !== "0";
  const head = COLUMNS.map(([name, title, numeric]) => el("th", {
    class: `sortable ${numeric ? "number" : ""} ${sort === name ? "sorted" : ""}`,
    onclick: () => go({ sort: name, down: sort === name && down ? "0" : "1", offset: null }),
  }, title, sort === name ? (down ? " ↓" : " ↑") : ""));
  const rows = answer.rows.map((row) => el("tr", {
    class: "link",
    tabIndex: 0,
    onclick: () => { location.hash = link("group", { run: chosenRun(), group: row.group, trajectory: row.trajectory }); },
    onkeydown: (event) => { if (event.key === "Enter") event.currentTarget.click(); },
  },
    COLUMNS.map(([name, , numeric]) => el("td", { class: numeric ? "number" : "" }, numeric ? number(row[name]) : shown(row[name] ?? "–"))),
    el("td", { class: "preview text" }, shown(row.preview ?? ""))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head, el("th", {}, "end of the completion"))), el("tbody", {}, rows)));
}

export async function groupsPage(place, query, signal) {
  const offset = Number(query.get("offset") ?? 0);
  const read = () => get("trajectories", { ...Object.fromEntries(query), run: chosenRun(), limit: PAGE_ROWS }, signal);
  const box = el("div");
  place.replaceChildren(filters(query), box);
  const draw = (answer) => {
    const last = Math.min(offset + PAGE_ROWS, answer.total);
    const note = answer.searched < answer.matching ? `; searched the first ${number(answer.searched)} of ${number(answer.matching)}` : "";
    box.replaceChildren(
      el("p", { class: "faint" }, answer.total ? `${number(offset + 1)}–${number(last)} of ${number(answer.total)} trajectories${note}` : `no trajectory matches${note}`),
      table(answer, query),
      el("div", { class: "bar" },
        el("button", { disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - PAGE_ROWS) }) }, "newer rows"),
        el("button", { disabled: last >= answer.total, onclick: () => go({ offset: offset + PAGE_ROWS }) }, "further rows")),
    );
  };
  draw(await read());
  return async () => { try { draw(await read()); } catch (error) { problem(error); } };
}
