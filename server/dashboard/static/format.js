// Figures as text. What is missing is a dash, which zero is not.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
export const NONE = "–";
const orNone = (format) => (value) => (value === null || value === undefined || Number.isNaN(value) ? NONE : format(value));

export const count = orNone((n) => whole.format(n));
export const short = orNone((n) => (Math.abs(n) < 10_000 ? whole.format(n) : compact.format(n)));
export const rate = orNone((n) => (n === 0 ? "0" : n < 10 ? n.toPrecision(2) : short(n)));
export const percent = orNone((share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`);
export const length = orNone((n) => (n === 0 ? "0" : n.toFixed(2)));
export const tick = (n) => String(Number(n.toPrecision(3)));
export const duration = orNone((s) => {
  const [value, unit] = s < 0.001 ? [s * 1e6, "µs"] : s < 1 ? [s * 1e3, "ms"] : [s, "s"];
  return `${Number(value.toPrecision(value < 100 ? 2 : 3))} ${unit}`;
});
// The last bound of a histogram stands for all that is above it.
export const observed = (bounds_s) => orNone((s) => (s >= (bounds_s?.at(-1) ?? Infinity) ? `≥ ${duration(s)}` : duration(s)));
export const bytes = (n) =>
  n < 2 ** 20 ? `${whole.format(n / 2 ** 10)} KiB` : n < 2 ** 30 ? `${tick(n / 2 ** 20)} MiB` : `${tick(n / 2 ** 30)} GiB`;
export const age = (s) =>
  s < 120
    ? `${Math.floor(s)} s`
    : s < 7200
      ? `${Math.floor(s / 60)} min`
      : s < 172_800
        ? `${Math.floor(s / 3600)} h`
        : `${Math.floor(s / 86_400)} days`;
export const plural = (n, one, many = `${one}s`) => `${whole.format(n)} ${n === 1 ? one : many}`;

export function clock(at_s, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(withSeconds ? { second: "2-digit" } : {}) };
  return new Date(at_s * 1000).toLocaleTimeString("en-GB", options);
}
