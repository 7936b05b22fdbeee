// The frame: which page is shown, for which runs, and how often live runs are read again.
// The address after # is the whole state: #PAGE?run=0&step=12 …, so that every view is a link.

import { get } from "./api.js";
import { color, el, tip, visible } from "./dom.js";
import { configPage } from "./config_page.js";
import { groupPage } from "./group_page.js";
import { groupsPage } from "./groups_page.js";
import { questionsPage } from "./questions_page.js";
import { runPage } from "./run_page.js";
import { timelinePage } from "./timeline_page.js";

const PAGES = {
  run: { title: "Run", show: runPage },
  timeline: { title: "Timeline", show: timelinePage },
  groups: { title: "Groups", show: groupsPage },
  questions: { title: "Questions", show: questionsPage },
  config: { title: "Config", show: configPage },
  group: { title: null, show: groupPage },
};
const OF_ONE_RUN = new Set(["timeline", "groups", "questions", "group"]);
const LIVE_EVERY_MS = 3000;

export const state = { runs: [], hidden: new Set() };
let refresh = null; // of the page that is shown: reads a live run again
let leaving = new AbortController(); // ends what the page that is left has begun

export function route() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: PAGES[page] ? page : "run", query: new URLSearchParams(query) };
}

export function link(page, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return `#${page}${query.size ? `?${query}` : ""}`;
}

export function runColor(index) {
  return color(`--run-${index % 6}`);
}

export function chosenRun() {
  return Number(route().query.get("run") ?? 0);
}

// The same page of another run: group ids and rows mean the same prompts where runs share seed and data.
function runPicker() {
  const options = state.runs.map((run, index) => el("option", { value: index, selected: index === chosenRun() }, run.name));
  const choose = (event) => {
    const { page, query } = route();
    for (const own of ["offset", "trajectory", "token"]) query.delete(own);
    location.hash = link(page, { ...Object.fromEntries(query), run: event.target.value });
  };
  return el("label", {}, swatch(chosenRun()), el("select", { "aria-label": "run", onchange: choose }, options));
}

export function swatch(index) {
  return el("span", { class: "swatch", style: { background: runColor(index) } });
}

async function readRuns() {
  const { runs } = await get("runs");
  state.runs = runs.map((run) => ({ ...run, name: visible(run.name), directory: visible(run.directory) }));
}

function drawHeader() {
  const { page: here, query } = route();
  const links = Object.entries(PAGES).filter(([, page]) => page.title);
  const run = query.get("run"); // every page stays with the run that was chosen on one
  document.getElementById("nav").replaceChildren(
    ...links.map(([name, page]) => el("a", { href: link(name, { run }), class: name === (here === "group" ? "groups" : here) ? "here" : "" }, page.title)),
  );
  const several = state.runs.length > 1;
  document.getElementById("runs").replaceChildren(...(several && OF_ONE_RUN.has(here) ? [runPicker()] : state.runs.map((one, index) => {
    const box = el("input", { type: "checkbox", checked: !state.hidden.has(index), onchange: () => toggle(index) });
    return el("label", { title: one.directory }, several && here === "run" ? box : null, swatch(index), one.name);
  })));
  drawStatus();
}

function drawStatus() {
  const live = state.runs.filter((run) => run.live).length;
  const status = document.getElementById("status");
  status.className = live ? "status live" : "status";
  status.textContent = live ? (live < state.runs.length ? `${live} of ${state.runs.length} live` : "live") : [...new Set(state.runs.map((run) => run.status))].join(", ");
}

function toggle(index) {
  if (!state.hidden.delete(index)) state.hidden.add(index);
  show();
}

export function problem(error) {
  if (error.name !== "AbortError") {
    document.getElementById("page").prepend(el("div", { class: "problem", role: "alert" }, error.message));
  }
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  refresh = null;
  tip({}, null);
  drawHeader();
  const { page, query } = route();
  const place = el("div");
  document.getElementById("page").replaceChildren(place);
  try {
    refresh = (await PAGES[page].show(place, query, signal)) ?? null;
  } catch (error) {
    problem(error);
  }
  if (!signal.aborted) document.body.dataset.shown = location.hash;
}

async function follow() {
  for (;;) {
    await new Promise((done) => setTimeout(done, LIVE_EVERY_MS));
    if (document.hidden || !state.runs.some((run) => run.live)) continue;
    try {
      await readRuns();
      drawStatus(); // not the header: a menu of it may be open
      await refresh?.();
    } catch (error) {
      document.getElementById("status").textContent = error.message;
    }
  }
}

async function start() {
  try {
    await readRuns();
  } catch (error) {
    return problem(error);
  }
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  await show();
  return follow();
}

start();
