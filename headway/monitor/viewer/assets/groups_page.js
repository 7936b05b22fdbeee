// All trajectories of a run, one row each: sorted, filtered and searched by the server, a page at a time.

import { get } from "./api.js";
import { el, number, shown } from "./dom.js";
import { chosenRun, link, problem, route } from "./app.js";

const PAGE_ROWS = 50;
const COLUMNS = [
  ["step", "step", true], ["group", "group", true], ["trajectory", "#", true], ["prompt", "row", true], ["reward", "reward", true],
  ["length", "tokens", true], ["staleness", "staleness", true], ["stop", "stop", false], ["state", "state", false],
];
const MEANINGS = {
  step: "training step that took the group", group: "one prompt with its completions", trajectory: "which completion of the group", prompt: "row of the prompt in the data",
  length: "sampled tokens", staleness: "of the group's oldest token when it was trained, in versions", stop: "why the completion ended",
  state: "waiting: rewarded and not taken yet; taken: in the step that goes on; dropped: never trained; failed: without a reward",
};
const RANGES = [["step", "step"], ["reward", "reward"], ["length", "tokens"], ["staleness", "staleness"]];
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
  const input = (name, placeholder) => el("input", {
    type: "number", step: "any", name, placeholder, "aria-label": `${name} ${placeholder}`, value: query.get(name) ?? "", onchange: change(name),
  });
  return el("div", { class: "bar filters" },
    el("input", { type: "search", name: "search", placeholder: "search prompts and completions", value: query.get("search") ?? "", onchange: change("search") }),
    RANGES.map(([name, title]) => el("span", { class: "range" }, title, input(`${name}_min`, "from"), "–", input(`${name}_max`, "to"))),
    el("span", { class: "range" }, "row", input("prompt", "any")),
    Object.entries(CHOICES).map(([name, values]) => el("select", { name, "aria-label": name, onchange: change(name) },
      el("option", { value: "" }, `any ${name}`),
      values.map((value) => el("option", { value, selected: query.get(name) === value }, value)))),
    el("button", { onclick: () => { location.hash = link("groups", { run: query.get("run") }); } }, "clear"));
}

function cell(row, name, numeric) {
  if (!numeric) return el("td", { class: row[name] === "failed" ? "bad" : "" }, shown(row[name] ?? "–"));
  return el("td", { class: name === "reward" && row.reward !== null ? `number ${row.reward > 0 ? "good" : "bad"}` : "number" }, number(row[name]));
}

function table(answer, query) {
  const sort = query.get("sort") ?? "group";
  const down = query.get("down") !== "0";
  const head = COLUMNS.map(([name, title, numeric]) => el("th", {
    class: `sortable ${numeric ? "number" : ""} ${sort === name ? "sorted" : ""}`,
    "aria-sort": sort === name ? (down ? "descending" : "ascending") : "none",
    title: MEANINGS[name] ?? "",
    tabIndex: 0,
    onclick: () => go({ sort: name, down: sort === name && down ? "0" : "1", offset: null }),
    onkeydown: (event) => { if (event.key === "Enter") event.currentTarget.click(); },
  }, title, sort === name ? (down ? " ↓" : " ↑") : ""));
  const rows = answer.rows.map((row) => el("tr", {
    class: "link",
    tabIndex: 0,
    onclick: () => { location.hash = link("group", { run: chosenRun(), group: row.group, trajectory: row.trajectory }); },
    onkeydown: (event) => { if (event.key === "Enter") event.currentTarget.click(); },
  },
    COLUMNS.map(([name, , numeric]) => cell(row, name, numeric)),
    el("td", { class: "text preview" }, shown(row.question ?? "")),
    el("td", { class: "text preview wide" }, shown(row.preview ?? ""))));
  return el("div", { class: "scroll" }, el("table", { class: "rows" },
    el("thead", {}, el("tr", {}, head, el("th", {}, "end of the prompt"), el("th", { class: "wide" }, "end of the completion"))), el("tbody", {}, rows)));
}

export async function groupsPage(place, query, signal) {
  const offset = Number(query.get("offset") ?? 0);
  const read = () => get("trajectories", { ...Object.fromEntries(query), run: chosenRun(), limit: PAGE_ROWS }, signal);
  const box = el("div");
  place.replaceChildren(filters(query), box);
  const draw = (answer) => {
    const last = Math.min(offset + PAGE_ROWS, answer.total);
    const note = answer.searched < answer.matching ? `; searched the first ${number(answer.searched)} of ${number(answer.matching)}` : "";
    const text = answer.total ? `${number(offset + 1)}–${number(last)} of ${number(answer.total)} trajectories${note}` : `No trajectory matches${note}.`;
    const pager = el("div", { class: "bar" }, el("span", { class: "faint", role: "status" }, text),
      el("button", { disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - PAGE_ROWS) }) }, "← previous"),
      el("button", { disabled: last >= answer.total, onclick: () => go({ offset: offset + PAGE_ROWS }) }, "next →"));
    box.replaceChildren(pager, answer.total ? table(answer, query) : "");
  };
  draw(await read());
  return async () => { try { draw(await read()); } catch (error) { problem(error); } };
}
