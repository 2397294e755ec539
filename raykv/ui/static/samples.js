// Counts over time: sums that never fall, and the rates between them.

const POINTS = 150; // of a chart, about, at most
const LONGEST = 3000; // samples; then all are fetched anew. The server keeps fewer; older samples are further apart

export class Samples {
  constructor() {
    this.t = [];
    this.sums = {};
  }

  /** Time of the newest sample: the next question asks for later samples. 0: for all. */
  get newest() {
    return this.t.length < LONGEST ? this.t.at(-1) ?? 0 : 0;
  }

  add({ t, ...sums }) {
    if (this.t.length >= LONGEST) [this.t, this.sums] = [[], {}];
    for (const [name, values] of Object.entries(sums)) {
      this.sums[name] ??= this.t.map(() => null);
      this.sums[name].push(...values);
    }
    this.t.push(...t);
  }

  names(prefix) {
    return Object.keys(this.sums).filter((name) => name.startsWith(prefix));
  }

  total(name) {
    return this.sums[name]?.at(-1) ?? 0;
  }

  /** The samples to draw a chart of the last `seconds` (0: of all) from: at most about POINTS, evenly apart. */
  pick(seconds) {
    const from = this.since(seconds);
    const step = Math.max(1, (this.t.at(-1) - from) / POINTS);
    const bucket = (i) => Math.floor(this.t[i] / step);
    const chosen = this.t.map((_, i) => i).filter((i) => i === this.t.length - 1 || bucket(i) !== bucket(i + 1));
    return chosen.slice(Math.max(0, chosen.findIndex((i) => this.t[i] >= from) - 1));
  }

  /** Growth of a sum from each picked sample to the next. */
  increments(name, picked) {
    const sums = this.sums[name] ?? [];
    return picked.slice(1).map((i, k) => (sums[i] ?? 0) - (sums[picked[k]] ?? 0));
  }

  /** The same growth per second. */
  rates(name, picked) {
    return this.increments(name, picked).map((n, k) => n / (this.t[picked[k + 1]] - this.t[picked[k]]));
  }

  /** Growth of a sum in the last `seconds`. */
  lately(name, seconds) {
    const sums = this.sums[name] ?? [];
    const first = this.t.findIndex((t) => t >= this.t.at(-1) - seconds);
    return first < 0 ? 0 : (sums.at(-1) ?? 0) - (sums[first] ?? 0);
  }

  /** Time at which the last `seconds` begin; 0: at which the samples begin. */
  since(seconds) {
    return seconds ? Math.max(this.t[0], this.t.at(-1) - seconds) : this.t[0];
  }
}
