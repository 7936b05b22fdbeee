// Building the page. Text always enters through textContent: what a model wrote is never parsed as HTML.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

// Control characters and direction marks are shown as what they are, so that text cannot hide or reorder other text.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text).replace(INVISIBLE, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

const LONGEST_SHOWN = 200_000;

export function shown(text) {
  const whole = visible(text);
  return whole.length <= LONGEST_SHOWN ? whole : `${whole.slice(0, LONGEST_SHOWN)} … (${whole.length - LONGEST_SHOWN} characters more)`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const s = Math.round(value);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")} min`;
  return `${Math.floor(s / 3600)}:${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} h`;
}

// Seconds between the marks of a time axis that read well as seconds, minutes, hours and days.
export const TIME_STEPS = [1, 2, 5, 10, 15, 30].flatMap((k) => [k, 60 * k]).concat([1, 2, 3, 6, 12, 24, 48, 120, 240].map((k) => 3600 * k)).sort((a, b) => a - b);

export function tip(event, rows) {
  const box = document.getElementById("tip");
  if (!rows) {
    box.hidden = true;
    return;
  }
  const lines = rows.map(([name, value]) => el("tr", {}, el("td", { class: "faint" }, name), el("td", {}, value)));
  box.replaceChildren(el("table", {}, lines));
  box.hidden = false;
  const place = event.target?.getBoundingClientRect?.();
  const x = event.clientX || place?.left || 0;
  const y = event.clientY || place?.bottom || 0;
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${y + 16 + box.offsetHeight > innerHeight ? Math.max(4, y - box.offsetHeight - 12) : y + 16}px`;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
