// The figures, the charts and the totals of the page.

import { Chart } from "./chart.js";
import { byId, element, put } from "./dom.js";
import { count, duration, length, observed, percent, plural, rate, short } from "./format.js";

const MAX_LINES = 6;
const COLORS = 7;

function total(gathered) {
  const all = [...gathered.values()].map((one) => one.all);
  return { steps: [], all: all.length ? all[0].map((_, i) => all.reduce((sum, counts) => sum + counts[i], 0)) : undefined };
}

export function showFigures(status, shown, parts) {
  const all = total(parts.namespaces);
  const busiest = [...parts.propose].sort(([, a], [, b]) => sum(b.all) - sum(a.all))[0];
  const latency = (q) => observed(shown.bounds_s.propose)(busiest ? shown.percentile(busiest[1], "propose", q).overall : null);
  const seen = parts.visibility.get("");
  const visible = (q) => observed(shown.bounds_s.visibility)(seen ? shown.percentile(seen, "visibility", q).overall : null);
  const tokens = sum(status.namespaces.map((n) => n.tokens));
  const quota = sum(status.namespaces.map((n) => n.quota_tokens));
  const documents = sum(status.namespaces.map((n) => n.documents));
  const transports = Object.entries(Object.groupBy(status.attachments, (a) => a.transport)).map(([name, list]) => `${list.length} ${name}`);
  const drafts = all.all?.[shown.place.drafts] ?? 0;
  const figure = (id, name, value, note) =>
    element("div", { id: `figure-${id}` }, element("dt", {}, name), element("dd", {}, element("b", {}, value), element("small", {}, note)));
  put(
    byId("figures"),
    figure(
      "length",
      "Acceptance length",
      length(shown.ratio(all, "accepted_tokens", "drafts").overall),
      drafts ? `of ${short(drafts)} drafts` : "no draft verified",
    ),
    figure("rate", "Acceptance rate", percent(shown.ratio(all, "accepted_tokens", "draft_tokens").overall), "of draft tokens"),
    figure("committed", "Committed", rate(shown.rate(parts.namespaces, "committed_tokens").overall), "tokens/s on average"),
    figure("propose", "Propose p50", latency(0.5), busiest ? `p99 ${latency(0.99)}, ${busiest[0]}` : "no call"),
    figure("visible", "Visible after p50", visible(0.5), seen ? `p99 ${visible(0.99)}` : "nothing new"),
    figure("engines", "Engines", count(status.attachments.length), transports.join(", ") || "none attached"),
    figure("corpus", "Corpus", short(tokens), `tokens, ${percent(quota ? tokens / quota : null)} of quota`),
    figure("documents", "Documents", short(documents), `in ${plural(status.namespaces.length, "namespace")}`),
  );
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

const charts = {
  length: new Chart({ title: "Acceptance length", unit: "accepted tokens a draft", format: length }),
  rate: new Chart({ title: "Acceptance rate", unit: "of draft tokens", format: percent }),
  tokens: new Chart({ title: "Tokens", unit: "a second", format: rate }),
  propose: new Chart({ title: "Propose latency", unit: "by transport", format: duration, log: true }),
  visibility: new Chart({
    title: "Visible after",
    unit: "from arrival until others draft from it",
    format: duration,
    log: true,
  }),
  refresh: new Chart({ title: "Refresh", unit: "of an index, by kind", format: duration, log: true }),
};
byId("charts").append(...Object.values(charts).map((chart) => chart.node));

// A name keeps its colour as long as it is shown.
const colors = new Map();

function colorsOf(names) {
  for (const name of colors.keys()) if (!names.includes(name)) colors.delete(name);
  for (const name of names) {
    const used = new Set(colors.values());
    if (!colors.has(name)) colors.set(name, Array.from({ length: COLORS }, (_, i) => i).find((i) => !used.has(i)) ?? 0);
  }
  return (name) => (name === "others" ? "other" : `c${colors.get(name)}`);
}

// The lines of the busiest names; what is left over is one line.
function busiest(gathered) {
  const sorted = [...gathered].sort(([a, x], [b, y]) => y.all[0] - x.all[0] || a.localeCompare(b));
  const named = sorted.filter(([name]) => name !== "_other");
  const kept = named.slice(0, MAX_LINES).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const left = [...named.slice(MAX_LINES), ...sorted.filter(([name]) => name === "_other")];
  if (!left.length) return kept;
  const steps = Array.from({ length: left[0][1].steps.length }, (_, i) => merged(left.map(([, one]) => one.steps[i])));
  return [...kept, ["others", { steps, all: merged(left.map(([, one]) => one.all)) }]];
}

function merged(list) {
  return list.filter(Boolean).reduce((a, b) => (a ? a.map((n, i) => n + b[i]) : b), undefined);
}

export function showCharts(shown, parts, group) {
  for (const name of ["propose", "visibility", "refresh"]) charts[name].format = observed(shown.bounds_s[name]);
  const draw = (chart, series, empty) => chart.draw({ from_s: shown.from_s, step_s: shown.step_s, count: shown.count, series, empty });
  const lines = busiest(parts[group]);
  const color = colorsOf(lines.map(([name]) => name).filter((name) => name !== "others"));
  const ratios = (part, whole) => lines.map(([name, gathered]) => ({ name, color: color(name), ...shown.ratio(gathered, part, whole) }));
  const noDraft = "No draft was verified in this time.";
  draw(charts.length, ratios("accepted_tokens", "drafts"), noDraft);
  draw(charts.rate, ratios("accepted_tokens", "draft_tokens"), noDraft);
  const tokens = [
    ["committed", "committed_tokens", "c0"],
    ["drafted", "draft_tokens", "c1"],
    ["accepted", "accepted_tokens", "c2"],
  ];
  draw(
    charts.tokens,
    tokens.map(([name, field, color_]) => ({ name, color: color_, ...shown.rate(parts.namespaces, field) })),
    "Nothing was counted in this time.",
  );
  const fixed = { mapped: "c0", inline: "c1", handle: "c2", live: "c0", recent: "c1", merge: "c2", full: "c3", "": "c0" };
  const percentiles = (part) =>
    [...parts[part]]
      .sort(([a], [b]) => a.localeCompare(b))
      .flatMap(([label, gathered]) =>
        [0.5, 0.99].map((q) => ({
          name: `${label} p${q * 100}`.trim(),
          color: fixed[label] ?? "c4",
          dashed: q > 0.5,
          ...shown.percentile(gathered, part, q),
        })),
      );
  draw(charts.propose, percentiles("propose"), "No engine asked for drafts in this time.");
  draw(charts.visibility, percentiles("visibility"), "Nothing new came in this time.");
  draw(charts.refresh, percentiles("refresh"), "No index was refreshed in this time.");
}

const TOTALS = {
  proposals: "Propose calls",
  rows: "Rows",
  drafts: "Verified drafts",
  draft_tokens: "Draft tokens",
  accepted_tokens: "Accepted tokens",
  committed_tokens: "Committed tokens",
  fail_opens: "Fail-opens",
};

export function showTotals(status) {
  put(
    byId("totals"),
    ...Object.entries(TOTALS).map(([name, label]) =>
      element("div", {}, element("dt", {}, label), element("dd", { id: `total-${name}` }, count(status.totals[name]))),
    ),
  );
}
