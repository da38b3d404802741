// What the service sent, second by second, and what follows from it over a window: rates, ratios and percentiles.

const KEPT_S = 900;
const POINTS = 150;
const MAX_EVENTS = 200;

export class History {
  constructor() {
    this.run = null;
    this.number = 0;
    this.samples = [];
    this.events = new Map();
  }

  // Takes an answer of /v1/history. False if it is of another run than the one before: ask again for all of it.
  take(answer) {
    if (this.run !== null && this.run !== answer.run) {
      // What the run before left stays on the charts, and the gap between the two too.
      this.run = null;
      this.number = 0;
      return false;
    }
    this.run = answer.run;
    this.number = answer.number;
    this.counts = answer.counts;
    this.bounds_s = answer.bounds_s;
    this.now_s = answer.now_s;
    this.received_ms = performance.now();
    const known = this.samples.at(-1)?.at_s ?? 0;
    this.samples.push(...answer.samples.filter((sample) => sample.at_s > known));
    this.samples = this.samples.filter((sample) => sample.at_s > answer.now_s - KEPT_S - 10);
    for (const event of answer.events) this.events.set(`${answer.run}/${event.id}`, event);
    const newest = [...this.events].sort(([, a], [, b]) => b.last_s - a.last_s);
    this.events = new Map(newest.slice(0, MAX_EVENTS));
    return true;
  }

  // The service's clock.
  time_s() {
    return this.now_s + (performance.now() - this.received_ms) / 1000;
  }

  // The samples of the last `span_s` seconds, in steps.
  window(span_s) {
    return new Window(this, span_s);
  }
}

export class Window {
  constructor(history, span_s) {
    this.step_s = Math.max(1, span_s / POINTS);
    this.count = Math.round(span_s / this.step_s);
    // Steps start at whole multiples, so that a point does not change any more once its step is over.
    this.from_s = (Math.ceil(history.time_s() / this.step_s) - this.count) * this.step_s;
    this.place = Object.fromEntries(history.counts.map((name, i) => [name, i]));
    this.bounds_s = history.bounds_s;
    this.samples = [];
    this.seconds = new Array(this.count).fill(0);
    this.total_s = 0;
    for (const sample of history.samples) {
      // A sample is of the second that ends at its time.
      const step = Math.floor((sample.at_s - sample.seconds / 2 - this.from_s) / this.step_s);
      if (step < 0 || step >= this.count) continue;
      this.samples.push([step, sample]);
      this.seconds[step] += sample.seconds;
      this.total_s += sample.seconds;
    }
  }

  // Sums of one part of the samples: { name: { steps: [counts or undefined], all: counts } }.
  gather(part) {
    const found = new Map();
    for (const [step, sample] of this.samples) {
      for (const [name, counts] of Object.entries(sample[part])) {
        if (!found.has(name)) found.set(name, { steps: new Array(this.count), all: counts.map(() => 0) });
        const { steps, all } = found.get(name);
        steps[step] ??= counts.map(() => 0);
        counts.forEach((count, i) => {
          steps[step][i] += count;
          all[i] += count;
        });
      }
    }
    return found;
  }

  // One count divided by another, in every step and over all; null where there is nothing to divide by.
  ratio({ steps, all }, part, whole) {
    const of = (counts) => (counts && counts[this.place[whole]] ? counts[this.place[part]] / counts[this.place[whole]] : null);
    return { values: Array.from(steps, of), overall: of(all) };
  }

  // A count of all names together, a second; 0 where nothing was counted, null where nobody counted.
  rate(gathered, name) {
    const sums = new Array(this.count).fill(0);
    for (const { steps } of gathered.values()) steps.forEach((counts, i) => (sums[i] += counts?.[this.place[name]] ?? 0));
    const values = sums.map((sum, i) => (this.seconds[i] ? sum / this.seconds[i] : null));
    return { values, overall: this.total_s ? sums.reduce((a, b) => a + b, 0) / this.total_s : null };
  }

  // A count a second, over the time since it was first counted.
  rateSinceFirst({ steps, all }, name) {
    const first = steps.findIndex((counts) => counts);
    if (first < 0) return this.total_s ? 0 : null;
    const since_s = this.seconds.slice(first).reduce((a, b) => a + b, 0);
    return all[this.place[name]] / since_s;
  }

  // A percentile of a histogram in seconds, in every step and over all.
  percentile({ steps, all }, histogram, q) {
    const of = (counts) => quantile(counts, this.bounds_s[histogram], q);
    return { values: Array.from(steps, of), overall: of(all) };
  }
}

// Interpolated within its bucket, as Prometheus does; the last bound stands for all above it. Null without observations.
export function quantile(counts, bounds, q) {
  const total = counts?.reduce((a, b) => a + b, 0);
  if (!total) return null;
  let below = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (counts[i] && below + counts[i] >= q * total) {
      const from = i ? bounds[i - 1] : 0;
      return from + ((bounds[i] - from) * (q * total - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}
