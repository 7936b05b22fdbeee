// One group: its completions side by side, and one trajectory token by token with everything that is recorded of it.

import { get } from "./api.js";
import { el, number, shown, tip, visible } from "./dom.js";
import { chosenRun, link } from "./app.js";

const SHADES = {
  version: { title: "version", about: "the weights that sampled the token; red bars are swaps" },
  behaviour: { title: "behaviour log-prob", about: "dark: unlikely under the policy that sampled it" },
  proximal: { title: "proximal log-prob", about: "dark: unlikely under the weights before the training step" },
  current: { title: "current log-prob", about: "dark: unlikely under the weights after the training step's minibatch" },
  weight: { title: "importance weight", about: "π_prox/π_behav: blue below 1, orange above 1" },
  advantage: { title: "advantage", about: "green: reinforced, red: discouraged" },
  mask: { title: "mask", about: "orange: sampled and not trained, with the reason on hover" },
};
let shade = "version";

const HUES = [210, 30, 130, 275, 330, 185, 55, 0];

function background(tokens, index) {
  const value = tokens[shade]?.[index];
  if (shade === "mask") return value ? "hsl(30 90% 50% / .45)" : "transparent";
  if (value === null || value === undefined) return "transparent";
  if (shade === "version") return `hsl(${HUES[value % HUES.length]} 75% 50% / .25)`;
  if (shade === "weight") {
    const size = Math.min(1, Math.abs(Math.log(value)) * 2);
    return `hsl(${value < 1 ? 210 : 30} 85% 50% / ${(0.6 * size).toFixed(3)})`;
  }
  if (shade === "advantage") return `hsl(${value > 0 ? 135 : 0} 65% 45% / ${(0.55 * Math.min(1, Math.abs(value) / 2)).toFixed(3)})`;
  return `hsl(265 60% 50% / ${(0.6 * Math.min(1, -value / 6)).toFixed(3)})`;
}

function facts(tokens, index) {
  const rows = [["token", `${JSON.stringify(visible(tokens.text[index]))} · id ${tokens.id[index]} · position ${index}`]];
  if (!tokens.sampled[index]) return [...rows, ["", "not sampled by a policy (prompt or tool)"]];
  for (const [name, { title }] of Object.entries(SHADES)) {
    const value = tokens[name]?.[index];
    if (name === "mask") rows.push(["trained", value ? `no: ${value}` : tokens.trained[index] ? "yes" : "no"]);
    else if (value !== null && value !== undefined) rows.push([title, number(value, 6)]);
  }
  return rows;
}

function tokenView(tokens) {
  const box = el("div", { class: "tokens" });
  const parts = document.createDocumentFragment();
  let before = null;
  tokens.text.forEach((text, index) => {
    if (tokens.turns[index]) parts.append(el("span", { class: "turn" }, shown(tokens.turns[index])));
    const version = tokens.version[index];
    if (tokens.sampled[index]) {
      if (before !== null && version !== before) {
        parts.append(el("span", { class: "swap", title: `weights of version ${version} from here` }, `v${version}`));
      }
      before = version;
    }
    parts.append(el("span", {
      class: tokens.sampled[index] ? "token" : "token context",
      tabIndex: -1,
      style: { background: tokens.sampled[index] ? background(tokens, index) : "transparent" },
      "data-index": index,
    }, visible(text)));
  });
  box.append(parts);
  const point = (event) => {
    const index = event.target?.dataset?.index;
    tip(event, index === undefined ? null : facts(tokens, Number(index)));
  };
  for (const kind of ["mousemove", "click", "focusin"]) box.addEventListener(kind, point);
  for (const kind of ["mouseleave", "focusout"]) box.addEventListener(kind, () => tip({}, null));
  return box;
}

function legend(tokens) {
  const items = [];
  if (shade === "version") {
    for (const version of [...new Set(tokens.version.filter((_, index) => tokens.sampled[index]))].sort((a, b) => a - b)) {
      items.push(el("span", {}, el("i", { style: { background: `hsl(${HUES[version % HUES.length]} 75% 50% / .4)` } }), `version ${version}`));
    }
  }
  return el("div", { class: "legend" }, el("span", {}, SHADES[shade].about), items);
}

function components(trajectory) {
  const entries = Object.entries(trajectory.components ?? {});
  return entries.length ? ` (${entries.map(([name, value]) => `${name} ${number(value)}`).join(", ")})` : "";
}

function completion(run, group, trajectory, chosen) {
  const head = el("div", { class: "bar" },
    el("a", { href: link("group", { run, group, trajectory: trajectory.index }), class: chosen ? "on" : "" }, `trajectory ${trajectory.index}`),
    el("b", { class: trajectory.reward > 0 ? "good" : "bad" }, `reward ${number(trajectory.reward)}${components(trajectory)}`),
    el("span", { class: "faint" }, `${number(trajectory.length)} tokens · ${trajectory.stops.join(", ")} · versions ${trajectory.versions.join("–")}`));
  return el("div", { class: "completion" }, head, el("div", { class: "text" }, shown(trajectory.text)));
}

export async function groupPage(place, query, signal) {
  const run = chosenRun();
  const group = Number(query.get("group") ?? 0);
  const answer = await get("group", { run, group }, signal);
  const chosen = Number(query.get("trajectory") ?? answer.trajectories[0]?.index ?? 0);
  const has = answer.trajectories.some((one) => one.index === chosen);
  const tokens = has ? await get("tokens", { run, group, trajectory: chosen }, signal) : null;
  const view = el("div");
  const draw = () => {
    if (!tokens) return;
    const usable = Object.keys(SHADES).filter((name) => tokens[name]?.some((value) => value !== null && value !== ""));
    if (!usable.includes(shade)) shade = usable[0] ?? "version";
    const buttons = usable.map((name) => el("button", { class: name === shade ? "on" : "", onclick: () => { shade = name; draw(); } }, SHADES[name].title));
    view.replaceChildren(el("div", { class: "bar" }, el("span", { class: "faint" }, "colour by"), buttons), legend(tokens), tokenView(tokens));
  };
  const step = (change) => link("group", { run, group: group + change });
  const task = Object.entries(answer.task ?? {}).map(([name, value]) => el("tr", {}, el("td", { class: "faint" }, shown(name)), el("td", { class: "text" }, shown(value))));
  place.replaceChildren(
    el("div", { class: "bar" },
      group > 0 ? el("a", { href: step(-1) }, "← group before") : "", el("b", {}, `Group ${group}`), el("a", { href: step(1) }, "next group →"),
      el("span", { class: "faint" }, `row ${answer.prompt} · ${answer.state} · admitted at version ${answer.admitted_version} with η = ${answer.eta}`),
      answer.same_prompt.map((other) => el("a", { href: link("group", { run, group: other.group }) }, `same prompt at step ${other.step ?? "–"}`))),
    el("h2", {}, "Prompt"), el("div", { class: "text" }, shown(answer.text)),
    task.length ? el("table", {}, el("tbody", {}, task)) : "",
    el("h2", {}, `Trajectory ${chosen}, token by token`), view,
    el("h2", {}, "All completions of the group"),
    el("div", { class: "side" },
      answer.trajectories.map((trajectory) => completion(run, group, trajectory, trajectory.index === chosen)),
      answer.failures.map((failure) => el("div", { class: "completion" },
        el("b", { class: "bad" }, `trajectory ${failure.trajectory} failed`), el("div", { class: "text" }, shown(failure.reason))))),
  );
  draw();
}
