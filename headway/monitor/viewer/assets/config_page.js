// The config of each run, and where they differ.

import { get } from "./api.js";
import { el, shown } from "./dom.js";
import { state } from "./app.js";

let onlyChanged = true;
let wanted = "";

export async function configPage(place, _query, signal) {
  const { rows } = await get("configs", {}, signal);
  const several = state.runs.length > 1;
  const box = el("input", { type: "checkbox", checked: onlyChanged, onchange: (event) => { onlyChanged = event.target.checked; draw(); } });
  const filter = el("input", { type: "search", placeholder: "filter knobs and values", value: wanted, oninput: (event) => { wanted = event.target.value; draw(); } });
  const table = el("div");
  place.replaceChildren(el("div", { class: "bar" }, filter, several ? el("label", {}, box, " only knobs that differ") : ""), table);
  const has = (row) => [row.knob, ...row.values].some((text) => text.toLowerCase().includes(wanted.toLowerCase()));
  const draw = () => {
    const listed = rows.filter((row) => (!several || !onlyChanged || row.differs) && has(row));
    table.replaceChildren(
      listed.length ? el("div", { class: "scroll" }, el("table", { class: "diff" },
        el("thead", {}, el("tr", {}, ["knob", ...state.runs.map((run) => run.name)].map((name) => el("th", {}, name)))),
        el("tbody", {}, listed.map((row) => el("tr", {}, el("td", {}, shown(row.knob)),
          row.values.map((value) => el("td", { class: row.differs ? "changed text" : "text" }, shown(value || "\"\"")))))))) : el("p", { class: "faint" }, wanted ? "No knob matches." : "The configs are equal."),
    );
  };
  draw();
}
