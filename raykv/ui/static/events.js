// Events: on a time axis, and as a list, the latest first.

import { at, clock, h } from "./dom.js";

const LISTED = 50;

export function drawEvents(events, from, until) {
  const place = (event) => (100 * (event.t - from)) / Math.max(1, until - from);
  const shown = events.filter((event) => event.t >= from);
  const dots = shown.map((event) => {
    const dot = h("span", { class: `dot ${event.kind}`, title: `${clock(event.t)} ${event.text}` });
    dot.style.left = `${place(event)}%`;
    return dot;
  });
  const ends = [h("span", { class: "from" }, clock(from)), h("span", { class: "until" }, clock(until))];
  at("timeline").replaceChildren(h("div", { class: "line" }, ...dots), ...ends);
  const rows = events.slice(-LISTED).toReversed().map(row);
  at("events").replaceChildren(...(rows.length ? rows : [h("li", { class: "quiet" }, "Nothing has happened yet.")]));
}

const row = (event) => h("li", { class: event.kind }, h("time", { datetime: new Date(1000 * event.t).toISOString() }, clock(event.t)), h("span", {}, event.text));
