// The four charts over time, with uPlot. They share the time axis, the cursor and the marks of events.

import { at, h, percent, rate } from "./dom.js";

const HEIGHT = 170;
const SOURCES = { "this node": "blue", "other nodes": "green", gpu: "violet", "external tier": "amber" };
const COLORS = ["blue", "green", "amber", "violet", "red", "grey"];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Each: {id, shown: sample names, label(name, faults), color, values(samples, name, picked samples), format, stacked, top: least height}. */
const CHARTS = [
  {
    id: "hits",
    shown: (samples) => Object.keys(SOURCES).map((source) => `hit:${source}`).filter((name) => samples.total(name)),
    label: (name) => name.slice(4),
    color: (name) => SOURCES[name.slice(4)],
    values(samples, name, picked) {
      const asked = samples.increments("asked", picked);
      return samples.increments(name, picked).map((n, i) => (asked[i] ? n / asked[i] : null));
    },
    format: (share) => percent(share, 0),
    stacked: true,
    top: 1,
    none: "No block was found yet.",
  },
  {
    id: "traffic",
    shown: (samples) => samples.names("bytes:"),
    label: (name) => name.slice(6),
    values: (samples, name, picked) => samples.rates(name, picked),
    format: (n) => `${rate(n)}B/s`,
    stacked: true,
    top: 1000,
    none: "Nothing was read from another node yet.",
  },
  {
    id: "blocks",
    shown: (samples) => ["stored", "evicted", "refused"].filter((name) => samples.total(name)),
    label: (name) => name,
    color: (name) => ({ stored: "blue", evicted: "amber", refused: "red" })[name],
    values: (samples, name, picked) => samples.rates(name, picked),
    format: (n) => `${rate(n).trim()}/s`,
    top: 1,
    none: "No block was stored yet.",
  },
  {
    id: "faults",
    shown: (samples) => samples.names("fault:").filter((name) => samples.total(name)),
    label: (name, faults) => faults[name],
    color: (_, i) => ["red", "amber", "violet", "blue", "green", "grey"][i % COLORS.length],
    values: (samples, name, picked) => samples.rates(name, picked).map((n) => 60 * n),
    format: (n) => `${rate(n).trim()}/min`,
    top: 1,
    none: "No fault was counted.",
  },
];

const plots = new Map();

/** Draws all charts. marks: times of events, with their kinds. faults: texts by sample name. */
export function draw(samples, seconds, marks, faults) {
  for (const chart of CHARTS) drawOne(chart, samples, seconds, marks, faults);
}

/** The colours or the width have changed: the next `draw` makes all charts again. */
export function forget() {
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
}

function drawOne(chart, samples, seconds, marks, faults) {
  const place = at(chart.id);
  const names = chart.shown(samples);
  const known = plots.get(chart.id);
  const picked = samples.t.length ? samples.pick(seconds) : [];
  if (!names.length || picked.length < 2) {
    known?.plot.destroy();
    plots.delete(chart.id);
    place.replaceChildren(h("p", { class: "quiet none" }, chart.none));
    return;
  }
  const raw = names.map((name) => chart.values(samples, name, picked));
  const times = picked.slice(1).map((i) => samples.t[i]);
  const data = [times, ...(chart.stacked ? stack(raw) : raw)];
  const until = samples.t.at(-1);
  const scale = { min: samples.since(seconds), max: until };
  if (known?.names.join() === names.join()) {
    Object.assign(known, { raw, marks, scale });
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  place.replaceChildren();
  const labels = names.map((name) => chart.label(name, faults));
  const state = { names, labels, raw, marks, scale, plot: null };
  state.plot = new uPlot(options(chart, state, place), data, place);
  plots.set(chart.id, state);
}

/** Each series on top of the series after it, so that the first drawn series reaches highest. */
function stack(raw) {
  const sums = raw[0].map(() => 0);
  return raw
    .toReversed()
    .map((values) => values.map((value, i) => (value === null ? null : (sums[i] += value))))
    .toReversed();
}

function options(chart, state, place) {
  const grid = { stroke: style("grid"), width: 1 };
  const axis = { stroke: style("quiet"), grid, ticks: { show: false }, gap: 6, font: "12px system-ui, sans-serif" };
  const color = (name, i) => style(chart.color?.(name, i) ?? COLORS[i % COLORS.length]);
  const shownAt = (i) => (plot, _, series, index) => {
    const value = index === null ? lastOf(state.raw[i]) : state.raw[i][index];
    return value === null || value === undefined ? "-" : chart.format(value);
  };
  return {
    width: place.clientWidth,
    height: HEIGHT,
    cursor: { sync: { key: "time" }, points: { size: 6 }, drag: { x: false, y: false } },
    legend: { live: true },
    scales: {
      x: { time: true, range: () => [state.scale.min, state.scale.max] },
      y: { range: (_, low, high) => [0, chart.id === "hits" ? 1 : Math.max(chart.top, (high ?? 0) * 1.1)] },
    },
    axes: [
      { ...axis, space: 80, size: 26, values: clocks },
      { ...axis, size: 66, values: (_, splits) => splits.map((n) => chart.format(n)) },
    ],
    series: [
      { label: "time", value: (_, t) => (t ? new Date(1000 * t).toLocaleTimeString("en-GB") : "now") },
      ...state.names.map((name, i) => ({
        label: state.labels[i],
        stroke: color(name, i),
        fill: chart.stacked ? color(name, i) + "66" : undefined,
        width: 1.5,
        spanGaps: true, // there is no hit rate while nobody asks
        points: { show: false },
        value: shownAt(i),
      })),
    ],
    hooks: { draw: [(plot) => drawMarks(plot, state.marks)] },
  };
}

const lastOf = (values) => values.findLast((value) => value !== null);

function clocks(_, splits) {
  const options = { hour: "2-digit", minute: "2-digit" };
  const fine = splits.length > 1 && splits[1] - splits[0] < 60;
  return splits.map((t) => new Date(1000 * t).toLocaleTimeString("en-GB", fine ? { ...options, second: "2-digit" } : options));
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([3, 3]);
  ctx.lineWidth = devicePixelRatio;
  ctx.globalAlpha = 0.7;
  for (const { t, kind } of marks) {
    if (kind === "good") continue;
    const x = plot.valToPos(t, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = style(kind === "bad" ? "red" : "quiet");
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
