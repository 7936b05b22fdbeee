// One group: prompt and reference, its completions side by side, and one trajectory token by token with everything that
// is recorded of it.

import { get } from "./api.js";
import { el, number, shown, tip, visible } from "./dom.js";
import { chosenRun, link } from "./app.js";

const SHADES = {
  version: { title: "version", about: "the weights that sampled the token; a red mark is a swap" },
  behaviour: { title: "behaviour log-prob", about: "under the policy that sampled the token" },
  proximal: { title: "proximal log-prob", about: "under the weights before the training step" },
  current: { title: "current log-prob", about: "under the weights being trained, when the token's loss was computed" },
  weight: { title: "importance weight", about: "π_prox/π_behav as it was applied" },
  advantage: { title: "advantage", about: "what the token was reinforced by" },
  mask: { title: "mask", about: "sampled, and without full effect on the loss" },
};
let shade = "version";

const HUES = [210, 30, 130, 275, 330, 185, 55, 0];
const VERSION_ALPHA = 0.3;

function versionColor(version) {
  return `hsl(${HUES[version % HUES.length]} 75% 50% / ${VERSION_ALPHA})`;
}

function tint(name, value) {
  if (name === "mask") return value ? "hsl(30 90% 50% / .5)" : "transparent";
  if (value === null || value === undefined) return "transparent";
  if (name === "version") return versionColor(value);
  if (name === "weight") {
    if (value === 0) return "hsl(0 70% 50% / .6)";
    return `hsl(${value < 1 ? 210 : 30} 85% 50% / ${(0.6 * Math.min(1, Math.abs(Math.log(value)) * 2)).toFixed(3)})`;
  }
  if (name === "advantage") return `hsl(${value > 0 ? 135 : 0} 65% 45% / ${(0.55 * Math.min(1, Math.abs(value) / 2)).toFixed(3)})`;
  return `hsl(265 60% 50% / ${(0.65 * Math.min(1, -value / 5)).toFixed(3)})`;
}

function samples(tokens) {
  if (shade === "version") {
    const versions = [...new Set(tokens.version.filter((version) => version !== null))].sort((a, b) => a - b);
    return versions.map((version) => [versionColor(version), `v${version}`]);
  }
  const scales = { weight: [0.6, 0.8, 1, 1.25, 1.6], advantage: [-2, -1, 0, 1, 2], mask: ["masked"] }[shade] ?? [0, -1, -2, -3, -5];
  return scales.map((value) => [tint(shade, value), typeof value === "number" ? number(value, 2) : value]);
}

function facts(tokens, index) {
  const rows = [["token", `${JSON.stringify(visible(tokens.text[index]))} · id ${tokens.id[index]} · position ${index}`]];
  if (!tokens.sampled[index]) return [...rows, ["given", "by the prompt, the environment or a tool"]];
  for (const [name, { title }] of Object.entries(SHADES)) {
    const value = tokens[name]?.[index];
    if (name === "mask") rows.push(value ? ["mask", value] : ["in the loss", tokens.advantage[index] === null ? "not trained" : tokens.advantage[index] === 0 ? "yes, with no advantage" : "yes, with full effect"]);
    else if (value !== null && value !== undefined) rows.push([title, number(value, 6)]);
  }
  if (tokens.reward[index] !== null) rows.push(["reward placed here", number(tokens.reward[index])]);
  return rows;
}

function tokenView(tokens, wanted) {
  const box = el("div", { class: "tokens", role: "group", "aria-label": "tokens" });
  const parts = document.createDocumentFragment();
  let before = null;
  tokens.text.forEach((text, index) => {
    if (tokens.turns[index]) {
      parts.append(el("span", { class: `turn ${tokens.sampled[index] ? "policy" : ""}` }, shown(tokens.turns[index])));
    }
    const version = tokens.version[index];
    if (tokens.sampled[index]) {
      if (before !== null && version !== before) {
        parts.append(el("span", { class: "swap", title: `weights of version ${version} from here` }, `v${version}`));
      }
      before = version;
    }
    const whole = visible(text);
    parts.append(el("span", {
      class: `token${tokens.sampled[index] ? "" : " context"}${index === wanted ? " wanted" : ""}`,
      style: { background: tokens.sampled[index] ? tint(shade, tokens[shade]?.[index]) : "transparent" },
      "data-index": index,
    }, whole.length > 2000 ? `${whole.slice(0, 2000)}… (${whole.length - 2000} characters more)` : whole));
  });
  const left = tokens.total - tokens.text.length;
  if (left) parts.append(el("p", { class: "faint" }, `… ${number(left)} tokens more`));
  box.append(parts);
  const point = (event) => {
    const index = event.target?.dataset?.index;
    tip(event, index === undefined ? null : facts(tokens, Number(index)));
  };
  for (const kind of ["mousemove", "click"]) box.addEventListener(kind, point);
  box.addEventListener("mouseleave", () => tip({}, null));
  return box;
}

function legend(tokens) {
  return el("div", { class: "legend" }, el("span", {}, SHADES[shade].about),
    samples(tokens).map(([background, text]) => el("span", {}, el("i", { style: { background } }), text)));
}

function completion(parameters, trajectory, chosen, several) {
  const versions = [...new Set(trajectory.versions ?? [])].map((version) => `v${version}`).join("–");
  const parts = Object.entries(trajectory.components ?? {}).map(([name, value]) => el("span", { class: "chip" }, `${shown(name)} ${number(value)}`));
  return el("section", { class: chosen ? "completion chosen" : "completion" },
    el("div", { class: "bar" },
      several ? el("a", { href: link("group", { ...parameters, trajectory: trajectory.index }) }, `#${trajectory.index}`) : "",
      el("b", { class: trajectory.reward > 0 ? "good" : "bad" }, `reward ${number(trajectory.reward)}`), parts,
      el("span", { class: "faint" }, `${number(trajectory.length)} tokens · ${trajectory.stops.join(", ")} · ${versions || "nothing sampled"}`)),
    el("div", { class: "text" }, shown(trajectory.text)));
}

function sameText(other) {
  if (other.evaluation === undefined) return `step ${other.step ?? "–"}`;
  return `v${other.step}: reward ${number(other.reward)}`;
}

function heading(answer, { run, group, evaluation }) {
  const step = (change) => link("group", { run, group: group + change, evaluation });
  const others = answer.same_prompt.map((other) => el("a", { href: link("group", { run, group: other.group, evaluation: other.evaluation }) }, sameText(other)));
  return el("div", { class: "bar" },
    el("h1", {}, evaluation === undefined ? `Group ${group}` : `Held-out problem ${group}`),
    el("span", { class: "faint" }, [answer.state, answer.step ? `at step ${answer.step}` : "",
      answer.eta === undefined ? "" : `admitted at v${answer.admitted_version}, η = ${answer.eta}`, `row ${answer.row}`].filter(Boolean).join(" · ")),
    others.length ? el("span", {}, "same prompt at ", others.flatMap((link, index) => (index ? [", ", link] : [link]))) : "",
    el("span", { class: "right" }, group > 0 ? el("a", { href: step(-1) }, "← previous") : "", " ", el("a", { href: step(1) }, "next →")));
}

function question(answer) {
  const reference = Object.entries(answer.reference ?? {}).map(([name, value]) =>
    el("div", {}, el("h3", {}, `data row: ${shown(name)}`), el("div", { class: "text limited" }, shown(value))));
  return el("div", { class: "question" },
    el("div", {}, el("h3", {}, "prompt"), el("div", { class: "text limited" }, shown(answer.text))), reference);
}

function unrecorded(tokens, answer) {
  if (tokens.recorded) return "";
  const trained = answer.step ? "the run did not record them (trainer.record_tokens)" : "this group was not trained";
  return el("span", { class: "faint" }, `no proximal and current log-probs, weights and advantages: ${trained}`);
}

export async function groupPage(place, query, signal) {
  const run = chosenRun();
  const [group, evaluation] = [Number(query.get("group") ?? 0), query.get("evaluation") ?? undefined];
  const parameters = { run, group, evaluation };
  const answer = await get("group", parameters, signal);
  const chosen = Number(query.get("trajectory") ?? answer.trajectories[0]?.index ?? 0);
  const wanted = query.has("token") ? Number(query.get("token")) : undefined;
  const has = answer.trajectories.some((one) => one.index === chosen);
  const tokens = has ? await get("tokens", { ...parameters, trajectory: chosen }, signal) : null;
  const view = el("div", { class: "panel" });
  const draw = () => {
    if (!tokens) return;
    const usable = Object.keys(SHADES).filter((name) => tokens[name]?.some((value) => value !== null && value !== ""));
    const used = usable.includes(shade) ? shade : usable[0] ?? "version";
    shade = used;
    const buttons = usable.map((name) => el("button", { class: name === used ? "on" : "", onclick: () => { shade = name; draw(); } }, SHADES[name].title));
    view.replaceChildren(
      el("div", { class: "bar" }, el("h2", {}, answer.trajectories.length > 1 ? `Trajectory #${chosen}` : "Token by token"),
        el("div", { class: "switch", role: "group", "aria-label": "colour by" }, buttons), unrecorded(tokens, answer)),
      legend(tokens), tokenView(tokens, wanted));
  };
  const several = answer.trajectories.length + answer.failures.length > 1;
  place.replaceChildren(
    heading(answer, parameters), question(answer), has ? view : "",
    several || !has ? el("h2", {}, "All completions") : "",
    el("div", { class: "side" },
      several ? answer.trajectories.map((trajectory) => completion(parameters, trajectory, trajectory.index === chosen, several)) : answer.trajectories.map((trajectory) => completion(parameters, trajectory, false, false)),
      answer.failures.map((failure) => el("section", { class: "completion" },
        el("b", { class: "bad" }, `#${failure.trajectory} failed`), el("div", { class: "text" }, shown(failure.reason))))),
  );
  draw();
  view.querySelector(".wanted")?.scrollIntoView({ block: "center" });
}
