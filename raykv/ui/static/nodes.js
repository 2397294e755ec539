// The map of nodes: one tile each, how full its tiers are, and its facts on a click.

import { at, bytes, duration, h, percent } from "./dom.js";

const FEW = 24; // nodes that get large tiles
const TIERS = ["gpu", "memory", "external"];
let open = ""; // id of the node whose facts are shown

/** A tile stays as long as its node, so that no click is lost on a replaced tile. */
export function drawNodes(nodes) {
  const list = at("nodes");
  list.classList.toggle("many", nodes.length > FEW);
  const before = new Map([...list.children].map((item) => [item.firstChild.dataset.node, item]));
  const items = nodes.map((node) => drawTile(before.get(node.id) ?? newTile(node.id), node));
  if (before.size !== items.length || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
  const shown = nodes.find((node) => node.id === open);
  if (shown && at("node").open) drawFacts(shown);
}

const newTile = (id) => h("li", {}, h("button", { type: "button", "data-node": id, "aria-haspopup": "dialog" }));

function drawTile(item, node) {
  const bars = TIERS.filter((tier) => node.fills[tier]).map((tier) => bar(tier, ...node.fills[tier]));
  const head = h("span", { class: "head" }, h("strong", {}, node.shown), h("span", { class: `state ${kind(node)}` }, node.state));
  item.firstChild.replaceChildren(head, h("span", { class: "quiet who" }, node.host), ...bars);
  item.firstChild.onclick = () => show(node);
  return item;
}

function bar(tier, used, size) {
  const share = size ? used / size : 0;
  const text = `${percent(share, 0)} of ${bytes(size)}`;
  const meter = h("progress", { max: 1, value: share, class: tier, "aria-label": `${tier}, ${text}` });
  return h("span", { class: "fill" }, h("span", { class: "tier" }, tier), meter, h("span", { class: "of" }, text));
}

const kind = (node) => (node.state === "alive" ? "good" : ["silent", "no store", "restarting"].includes(node.state) ? "bad" : "note");

function show(node) {
  open = node.id;
  drawFacts(node);
  at("node").showModal();
}

function drawFacts(node) {
  at("node-title").textContent = `${node.shown} (${node.host})`;
  const facts = {
    State: node.why ? `${node.state}: ${node.why}` : node.state,
    "Part in the pool": node.roles.join(", ") || "none",
    ...Object.fromEntries(Object.entries(node.fills).map(([tier, [used, size]]) => [tier[0].toUpperCase() + tier.slice(1), `${bytes(used)} of ${bytes(size)}`])),
    "Store runs for": duration(node.uptime_s),
    "Restarts of it": node.restarts ?? "-",
    "Faults it counted": node.faults.join("; ") || "none",
    Address: node.address,
    "Ray node id": node.id,
  };
  const pairs = Object.entries(facts).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]);
  at("node-facts").replaceChildren(...pairs);
}
