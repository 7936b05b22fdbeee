// The config of each run, and where they differ.

import { get } from "./api.js";
import { el, shown } from "./dom.js";
import { state } from "./app.js";

let onlyChanged = true;

export async function configPage(place, _query, signal) {
  const { rows } = await get("configs", {}, signal);
  const several = state.runs.length > 1;
  const draw = () => {
    const listed = rows.filter((row) => !several || !onlyChanged || row.differs);
    const box = el("input", { type: "checkbox", checked: onlyChanged, onchange: (event) => { onlyChanged = event.target.checked; draw(); } });
    place.replaceChildren(
      several ? el("label", {}, box, " only knobs that differ") : null ?? "",
      listed.length ? el("div", { class: "scroll" }, el("table", { class: "diff" },
        el("thead", {}, el("tr", {}, ["knob", ...state.runs.map((run) => run.name)].map((name) => el("th", {}, name)))),
        el("tbody", {}, listed.map((row) => el("tr", {}, el("td", {}, shown(row.knob)),
          row.values.map((value) => el("td", { class: row.differs ? "changed text" : "text" }, shown(value)))))))) : el("p", { class: "faint" }, "The configs are equal."),
    );
  };
  draw();
}
