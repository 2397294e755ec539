// What was counted, over time: sums that never fall, and the rates between them.

const LONGEST = 3000; // samples; the server keeps fewer, the older the further apart

export class Samples {
  constructor() {
    this.t = [];
    this.sums = {};
  }

  /** The time of the newest: what is to be asked for is later. 0: all. */
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

  /** How much more of it there was at each sample than at the one before, from sample `first` on. */
  increments(name, first) {
    const sums = this.sums[name] ?? [];
    return this.t.slice(first).map((_, i) => (first + i ? (sums[first + i] ?? 0) - (sums[first + i - 1] ?? 0) : null));
  }

  /** The same a second. */
  rates(name, first) {
    return this.increments(name, first).map((n, i) => (n === null ? null : n / (this.t[first + i] - this.t[first + i - 1])));
  }

  /** In the last `seconds` of what was seen. */
  lately(name, seconds) {
    const sums = this.sums[name] ?? [];
    const first = this.t.findIndex((t) => t >= this.t.at(-1) - seconds);
    return first < 0 ? 0 : (sums.at(-1) ?? 0) - (sums[first] ?? 0);
  }

  /** When what is shown of the last `seconds` begins; 0: of all. */
  since(seconds) {
    return seconds ? Math.max(this.t[0], this.t.at(-1) - seconds) : this.t[0];
  }

  /** Index of the first sample of the last `seconds`; 0: of all. */
  first(seconds) {
    return seconds ? Math.max(0, this.t.findIndex((t) => t >= this.t.at(-1) - seconds)) : 0;
  }
}
