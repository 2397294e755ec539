// Elements and words. Data becomes text only: no markup is ever made of it.

export const at = (id) => document.getElementById(id);

/** An element with properties (`class`, `title`, `onclick`, `data-x`, ...) and children: elements or text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Makes a table of columns {title, number, cell: row => text} and rows; `none` is said where there is no row. */
export function fillTable(table, columns, rows, none) {
  if (isSelectedIn(table)) return; // the user is about to copy the text
  const head = columns.map((c) => h("th", { scope: "col", class: c.number ? "number" : "" }, c.title));
  const cells = (row) => columns.map((c) => h("td", { class: c.number ? "number" : "", "data-title": c.title }, c.cell(row)));
  const body = rows.length
    ? rows.map((row) => h("tr", {}, ...cells(row)))
    : [h("tr", {}, h("td", { colspan: columns.length, class: "quiet" }, none))];
  table.replaceChildren(h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...body));
}

function isSelectedIn(element) {
  const selection = getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = [" ", " k", " M", " G", " T"];

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return [value.toFixed(digits), units[unit]];
}

export const bytes = (n) => scaled(n, 1024, SIZES).join(" ");
export const rate = (n) => scaled(n, 1000, DECIMAL).join("");
export const count = (n) => n.toLocaleString("en");
export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
export const clock = (t) => new Date(1000 * t).toLocaleTimeString("en-GB");

/** As `raykv status` says it: 12s, 3m04s, 5h07m, 12d03h. */
export function duration(seconds) {
  if (seconds === null) return "-";
  const s = Math.floor(seconds);
  for (const [unit, smaller, size, part] of [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]]) {
    if (s >= size) return `${Math.floor(s / size)}${unit}${String(Math.floor((s % size) / part)).padStart(2, "0")}${smaller}`;
  }
  return `${s}s`;
}
