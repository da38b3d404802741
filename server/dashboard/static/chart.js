// A line chart over time, in SVG. A value that is missing is a gap in its line; zero is drawn.

import { element, shape } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 148;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };

// Round steps for about `wanted` ticks from 0 to `top`.
function linearTicks(top, wanted) {
  const rough = top / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = 0; i * step < top * 1.0001 || ticks.length < 2; i++) ticks.push(i * step);
  if (ticks.at(-1) < top) ticks.push(ticks.length * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const m of [1, 2, 5]) ticks.push(m * 10 ** power);
  }
  const from = Math.max(
    0,
    ticks.findLastIndex((t) => t <= low * 1.0001),
  );
  const to = ticks.findIndex((t) => t >= high * 0.9999);
  const used = ticks.slice(from, Math.max(to, from + 1) + 1);
  const every = Math.ceil(used.length / 5);
  return { ticks: used.filter((_, i) => (used.length - 1 - i) % every === 0), low: used[0], high: used.at(-1) };
}

export class Chart {
  // format: a value as text. axis: the same at a grid line. log: logarithmic axis.
  constructor({ title, unit, format, axis = format, log = false }) {
    this.format = format;
    this.axis = axis;
    this.log = log;
    this.cursor = null;
    this.title = title;
    this.time = element("time", { class: "at" });
    this.svg = shape("svg", { role: "slider", tabindex: 0, "aria-label": `${title}, moment`, height: HEIGHT });
    this.empty = element("p", { class: "empty", hidden: true });
    this.legend = element("ul", { class: "legend" });
    this.node = element(
      "section",
      { class: "card chart", "aria-label": title },
      element("header", {}, element("h2", {}, title), element("p", { class: "note" }, unit), this.time),
      element("div", { class: "plot" }, this.svg, this.empty),
      this.legend,
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerdown", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.data && this.render()).observe(this.svg.parentElement);
  }

  // data: { from_s, step_s, count, series: [{ name, color, dashed, values, overall }], empty: text where there is nothing }
  draw(data) {
    this.data = data;
    this.render();
  }

  point(x) {
    if (!this.data) return;
    const { count } = this.data;
    const share = (x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    this.move(Math.min(count - 1, Math.max(0, Math.floor(share * count))));
  }

  key(event) {
    const last = this.data.count - 1;
    const at = this.cursor ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.move(to === null ? null : Math.min(last, Math.max(0, to)));
  }

  move(cursor) {
    this.cursor = cursor;
    if (this.data) this.render();
  }

  // What the axis spans, and where a value lies on it, in pixels.
  scale(series) {
    const values = series.flatMap((one) => one.values.filter((v) => v !== null));
    const bottom = HEIGHT - MARGIN.bottom;
    const height = bottom - MARGIN.top;
    if (this.log) {
      const positive = values.filter((v) => v > 0);
      const { ticks, low, high } = logTicks(Math.min(...positive, 1e9), Math.max(...positive, 1e-9));
      const y = (v) => bottom - (height * Math.log(Math.max(v, low) / low)) / Math.log(high / low);
      return { ticks, y };
    }
    const ticks = linearTicks(Math.max(...values) || 1, 3);
    const y = (v) => bottom - (height * v) / ticks.at(-1);
    return { ticks, y };
  }

  render() {
    const { from_s, step_s, count, series, empty } = this.data;
    this.width = this.svg.parentElement.clientWidth;
    const filled = series.some((one) => one.values.some((v) => v !== null));
    this.svg.setAttribute("width", this.width);
    this.svg.replaceChildren();
    this.empty.hidden = filled;
    this.empty.textContent = filled ? "" : empty;
    this.svg.toggleAttribute("inert", !filled);
    const x = (i) => MARGIN.left + ((i + 0.5) * (this.width - MARGIN.left - MARGIN.right)) / count;
    this.axes(x, filled ? this.scale(series) : { ticks: [], y: () => 0 });
    if (filled) {
      const { y } = this.scale(series);
      for (const one of series) this.line(one, x, y);
      if (this.cursor !== null) {
        const at = x(this.cursor);
        this.svg.append(shape("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
      }
    }
    this.describe(filled ? series : []);
  }

  axes(x, { ticks, y }) {
    const { from_s, step_s, count } = this.data;
    for (const tick of ticks) {
      this.svg.append(
        shape("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        shape("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, this.axis(tick)),
      );
    }
    const span_s = count * step_s;
    const every_s = [10, 20, 30, 60, 120, 180, 300, 600].find((s) => (span_s / s) * 62 < this.width - MARGIN.left) ?? 900;
    for (let at_s = Math.ceil(from_s / every_s) * every_s; at_s < from_s + span_s; at_s += every_s) {
      const at = x((at_s - from_s) / step_s - 0.5);
      if (at < MARGIN.left + 14 || at > this.width - 24) continue;
      const label = clock(at_s, every_s < 60);
      this.svg.append(shape("text", { class: "tick", x: at, y: HEIGHT - 5, "text-anchor": "middle" }, label));
    }
  }

  line({ values, color, dashed }, x, y) {
    let path = "";
    values.forEach((value, i) => {
      if (value === null) return;
      const starts = i === 0 || values[i - 1] === null;
      const alone = starts && (i === values.length - 1 || values[i + 1] === null);
      // A value between two gaps has no line; a stroke without length is drawn as a dot.
      path += `${starts ? "M" : "L"}${x(i).toFixed(1)} ${y(value).toFixed(1)}${alone ? "h0" : ""}`;
    });
    this.svg.append(shape("path", { class: `line ${color}${dashed ? " dashed" : ""}`, d: path }));
    if (this.cursor !== null && values[this.cursor] !== null) {
      this.svg.append(shape("circle", { class: `spot ${color}`, cx: x(this.cursor), cy: y(values[this.cursor]), r: 3 }));
    }
  }

  describe(series) {
    const { from_s, step_s, count } = this.data;
    const at = this.cursor === null ? null : from_s + this.cursor * step_s;
    this.time.textContent = at === null ? "" : clock(at);
    const shown = series.map((one) => {
      const value = this.cursor === null ? one.overall : one.values[this.cursor];
      return { ...one, text: value === null ? "–" : this.format(value) };
    });
    this.legend.replaceChildren(
      ...shown.map(({ name, color, dashed, text }) =>
        element(
          "li",
          {},
          element("span", { class: `swatch ${color}${dashed ? " dashed" : ""}`, "aria-hidden": "true" }),
          element("span", { class: "name", title: name }, name),
          element("b", {}, text),
        ),
      ),
    );
    this.svg.setAttribute("aria-valuemin", 0);
    this.svg.setAttribute("aria-valuemax", count - 1);
    this.svg.setAttribute("aria-valuenow", this.cursor ?? count - 1);
    const when = at === null ? "time shown" : clock(at);
    this.svg.setAttribute("aria-valuetext", `${when}: ${shown.map(({ name, text }) => `${name} ${text}`).join(", ") || this.data.empty}`);
  }
}
