// Asks the server for news every two seconds, and draws it.

import { draw, forget } from "./charts.js";
import { at, bytes, count, duration, fillTable, h, percent, rate } from "./dom.js";
import { drawEvents } from "./events.js";
import { drawNodes } from "./nodes.js";
import { Samples } from "./samples.js";

const ASK_MS = 2000;
const OLD_S = 15; // without news for so long, the page says that it is old
const LATELY_S = 60;

let server = null; // the run of the server that sent the data
let samples = new Samples();
let events = [];
let texts = {}; // of sums of faults, by name
let now = null; // the latest look
let range = 3600;

async function ask() {
  const after = samples.newest;
  const answer = await fetch(`api/pool?after=${after}`);
  if (answer.status === 401 || answer.status === 403) return location.reload();
  if (!answer.ok) throw new Error(`the page's server answers ${answer.status}`);
  const found = await answer.json();
  if (!after || found.run !== server) [samples, events] = [new Samples(), []];
  if (after && found.run !== server) return; // the server was restarted: the next question asks for everything
  server = found.run;
  samples.add(found.samples);
  events.push(...found.events);
  texts = found.faults;
  now = found.now;
  const age = found.seen === null ? 0 : found.time - found.seen;
  say(found.trouble || age > OLD_S ? `What is shown was seen ${duration(age)} ago. ${found.trouble}` : "");
  if (now) drawAll();
}

function say(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text;
}

function drawAll() {
  document.title = `raykv: ${now.pool}`;
  at("pool").textContent = now.pool;
  at("summary").textContent = now.summary.join(" · ");
  drawTiles();
  drawNodes(now.nodes);
  drawTime();
  drawTables();
}

function drawTime() {
  draw(samples, range, events, texts);
  drawEvents(events, samples.since(range), samples.t.at(-1));
}

function drawTiles() {
  const { counts } = now;
  const known = Object.keys(counts).length > 0;
  const hits = known && counts.lookups ? percent(counts.hits / counts.lookups) : "-";
  const lately = samples.lately("asked", LATELY_S);
  const found = samples.names("hit:").reduce((sum, name) => sum + samples.lately(name, LATELY_S), 0);
  const [used, size] = now.nodes.map((node) => node.fills.memory ?? [0, 0]).reduce((a, b) => [a[0] + b[0], a[1] + b[1]], [0, 0]);
  const moved = samples.names("bytes:").reduce((sum, name) => sum + samples.lately(name, LATELY_S), 0);
  const faults = samples.names("fault:").filter((name) => samples.total(name));
  const worst = faults.map((name) => `${count(samples.total(name))} ${texts[name]}`).join(", ");
  const seconds = Math.max(1, Math.min(LATELY_S, samples.t.at(-1) - samples.t[0]));
  const curve = now.hit_curve;
  const twice = "2" in curve ? `; hit rate with twice as much ${percent(curve["2"])}, with this ${percent(curve["1"])}` : "";
  const tiles = [
    ["hit-rate", "Hit rate", hits, known ? `${count(counts.hits)} of ${count(counts.lookups)} blocks asked for` : "the directory does not answer"],
    ["lately", "Last minute", lately ? percent(found / lately) : "-", lately ? `${count(found)} of ${count(lately)} blocks` : "no block was asked for"],
    ["memory", "Memory in use", size ? percent(used / size, 0) : "-", `${bytes(used)} of ${bytes(size)}${twice}`],
    ["keys", "Blocks", known ? count(counts.keys) : "-", known ? `${count(counts.pinned)} pinned, ${count(counts.leases)} being read` : ""],
    ["moved", "Between nodes", `${rate(moved / seconds)}B/s`, "in the last minute"],
    ["evicted", "Evicted", `${rate(samples.lately("evicted", LATELY_S) / seconds).trim()}/s`, known ? `${count(counts.evicted)} since the pool started` : ""],
    ["clients", "Clients", known ? count(counts.clients) : "-", "processes that use the pool"],
    ["fault-count", "Faults", count(faults.reduce((sum, name) => sum + samples.total(name), 0)), worst || "none counted"],
  ];
  at("tiles").replaceChildren(
    ...tiles.map(([id, title, value, text]) =>
      h("div", { id }, h("dt", {}, title), h("dd", {}, h("strong", {}, value), h("span", { class: "quiet" }, text))),
    ),
  );
}

function drawTables() {
  const prefixes = [
    { title: "Prefix", cell: (p) => h("code", {}, p.key.slice(0, 12)) },
    { title: "Look-ups", number: true, cell: (p) => count(p.hits) },
    { title: "Blocks long", number: true, cell: (p) => count(p.blocks) },
    { title: "Size", number: true, cell: (p) => bytes(p.bytes) },
    { title: "Last hit", number: true, cell: (p) => `${duration(p.idle_s)} ago` },
    { title: "In memory of", cell: (p) => p.nodes.join(", ") || "no node" },
  ];
  fillTable(at("prefixes"), prefixes, now.prefixes, "No look-up has found anything yet.");
  const routes = [
    { title: "Reader", cell: (r) => r.reader },
    { title: "From", cell: (r) => r.from },
    { title: "By", cell: (r) => r.transport },
    { title: "Read", number: true, cell: (r) => bytes(total(r.bytes)) },
    { title: "Speed", number: true, cell: (r) => `${r.gbps.toFixed(2)} GB/s` },
    { title: "Failed", cell: (r) => Object.entries(r.failed).map(([by, n]) => `${by} ${count(n)}`).join(", ") || "-" },
  ];
  const busiest = now.routes.toSorted((a, b) => total(b.bytes) - total(a.bytes)).slice(0, 50);
  fillTable(at("routes"), routes, busiest, "No node has read from another yet.");
}

const total = (byTransport) => Object.values(byTransport).reduce((sum, n) => sum + n, 0);

at("range").addEventListener("change", (event) => {
  range = Number(event.target.value);
  if (now) drawTime();
});

function redraw() {
  forget();
  if (now) drawTime();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redraw();
  width = innerWidth;
});

for (;;) {
  if (!document.hidden) await ask().catch((error) => say(`What is shown may be old: ${error.message}.`));
  await new Promise((resolve) => setTimeout(resolve, ASK_MS));
}
