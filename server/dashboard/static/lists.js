// The lists of the page: attachments, the corpus, events.

import { byId, element, put } from "./dom.js";
import { NONE, bytes, clock, count, length, percent, plural, rate } from "./format.js";

const EVENTS_SHOWN = 60;

function bar(share, label, text) {
  const value = Math.min(1, Math.max(0, share));
  const inner = element("span", { class: "fill" });
  inner.style.width = `${(100 * value).toFixed(1)}%`;
  const meter = element(
    "span",
    {
      class: "bar",
      role: "meter",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * value),
      "aria-valuetext": text,
    },
    inner,
  );
  return element("span", { class: "with-bar" }, meter, text);
}

// columns: [key, heading, number?, cell of a row]; the table turns into a list of cards where it is narrow.
function table(label, columns, rows, sort) {
  const heading = ([key, name, number]) => {
    const sorted = sort?.key === key ? (sort.down ? "descending" : "ascending") : undefined;
    const inside = sort ? element("button", { type: "button", "data-sort": key }, name) : name;
    return element("th", { scope: "col", role: "columnheader", class: number ? "number" : undefined, "aria-sort": sorted }, inside);
  };
  const cell = (row, [key, name, number, content], i) =>
    element(
      i ? "td" : "th",
      {
        role: i ? "cell" : "rowheader",
        scope: i ? undefined : "row",
        class: number ? "number" : undefined,
        "data-name": name,
        "data-key": key,
      },
      content(row),
    );
  return element(
    "table",
    { role: "table", "aria-label": label },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...columns.map(heading))),
    element(
      "tbody",
      { role: "rowgroup" },
      ...rows.map((row) =>
        element("tr", { role: "row", class: row.asleep ? "asleep" : undefined }, ...columns.map((column, i) => cell(row, column, i))),
      ),
    ),
  );
}

function engineRows(status, shown, gathered) {
  return status.attachments.map((a) => {
    const counts = gathered.get(a.engine) ?? { steps: [], all: undefined };
    return {
      engine: a.engine,
      transport: a.transport,
      namespace: a.namespaces[0],
      more: a.namespaces.length - 1,
      rows: a.rows,
      max_rows: a.max_rows,
      lease: a.lease_left_ms,
      lease_ms: status.lease_ms,
      proposals: shown.rateSinceFirst(counts, "proposals"),
      committed: shown.rateSinceFirst(counts, "committed_tokens"),
      length: shown.ratio(counts, "accepted_tokens", "drafts").overall,
      rate: shown.ratio(counts, "accepted_tokens", "draft_tokens").overall,
      failed: a.fail_opens,
    };
  });
}

const ENGINE_COLUMNS = [
  ["engine", "Engine", false, (e) => e.engine],
  ["transport", "Transport", false, (e) => e.transport],
  ["namespace", "Namespace", false, (e) => (e.more ? `${e.namespace} +${e.more}` : e.namespace)],
  ["rows", "Rows", true, (e) => `${count(e.rows)} of ${count(e.max_rows)}`],
  ["lease", "Lease", true, (e) => bar(e.lease / e.lease_ms, "Lease left", `${(Math.max(0, e.lease) / 1000).toFixed(1)} s`)],
  ["proposals", "Calls/s", true, (e) => rate(e.proposals)],
  ["committed", "Tokens/s", true, (e) => rate(e.committed)],
  ["length", "Acc. length", true, (e) => length(e.length)],
  ["rate", "Acc. rate", true, (e) => percent(e.rate)],
  ["failed", "Fail-opens", true, (e) => count(e.failed)],
];

export function showEngines(status, shown, gathered, sort) {
  if (!status.attachments.length) {
    const endpoint = Object.values(status.endpoints)[0];
    put(
      byId("engines"),
      element(
        "p",
        { class: "empty" },
        "No engine is attached yet. One attaches when it makes a ",
        element("code", {}, `Drafter("${endpoint}", …)`),
        "; to see one at once, run:",
      ),
      element("pre", {}, `draftd replay samples/gsm8k.jsonl.gz --endpoint ${endpoint} --step-ms 20`),
    );
    return;
  }
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : (a ?? -1) - (b ?? -1));
  const rows = engineRows(status, shown, gathered).sort(
    (a, b) => (sort.down ? -1 : 1) * compare(a[sort.key], b[sort.key]) || compare(a.engine, b.engine),
  );
  const focused = document.activeElement?.dataset?.sort;
  put(byId("engines"), table("Attachments", ENGINE_COLUMNS, rows, sort));
  if (focused) byId("engines").querySelector(`[data-sort="${focused}"]`)?.focus();
}

export function showCorpus({ store, namespaces, asleep }, shown, gathered) {
  byId("store").textContent = store
    ? `store: ${bytes(store.bytes)}, ${store.pending_documents ? `${plural(store.pending_documents, "document")} not on disk` : "all on disk"}`
    : "no store: nothing is kept after a stop";
  if (!namespaces.length && !asleep.length) {
    put(
      byId("corpus"),
      element("p", { class: "empty" }, "The corpus is empty. It fills with what engines commit; to bring documents along, run:"),
      element("pre", {}, "draftd import FILE"),
    );
    return;
  }
  const none = { steps: [], all: undefined };
  const columns = [
    ["name", "Namespace", false, (n) => (n.asleep ? `${n.name} (asleep)` : n.name)],
    [
      "quota",
      "Quota used",
      true,
      (n) => (n.asleep ? NONE : bar(n.tokens / n.quota_tokens, "Quota used", percent(n.tokens / n.quota_tokens))),
    ],
    ["tokens", "Tokens", true, (n) => count(n.tokens)],
    ["documents", "Documents", true, (n) => count(n.documents)],
    ["open", "In flight", true, (n) => count(n.open_documents)],
    ["evicted", "Evicted", true, (n) => count(n.evicted_tokens)],
    ["generation", "Generation", true, (n) => count(n.generation)],
    ["bytes", "Memory", true, (n) => (n.asleep ? NONE : bytes(n.bytes))],
    ["engines", "Engines", true, (n) => count(n.attachments)],
    ["length", "Acc. length", true, (n) => length(shown.ratio(gathered.get(n.name) ?? none, "accepted_tokens", "drafts").overall)],
  ];
  put(byId("corpus"), table("Namespaces", columns, [...namespaces, ...asleep.map((n) => ({ ...n, asleep: true }))], null));
}

export function showEvents(all, problems) {
  const events = all.filter((event) => !problems || event.level !== "info").slice(0, EVENTS_SHOWN);
  if (!events.length) {
    put(byId("events"), element("p", { class: "empty" }, problems ? "No problem since the service started." : "Nothing has happened yet."));
    return;
  }
  const times = ({ first_s, last_s }) => (last_s - first_s < 1 ? clock(last_s) : `${clock(first_s)} – ${clock(last_s)}`);
  const item = (event) =>
    element(
      "li",
      { class: event.level },
      element("time", {}, times(event)),
      element("span", { class: "kind" }, event.kind),
      element(
        "span",
        { class: "what" },
        event.subject && element("b", {}, event.subject),
        event.subject && " ",
        event.amount > 1 ? `${count(event.amount)} ` : "",
        event.text,
      ),
    );
  // The list stays the same, so that it stays where it was scrolled to.
  const list = byId("events").querySelector("ol") ?? element("ol", { tabindex: 0, "aria-label": "Events, newest first" });
  put(list, ...events.map(item));
  if (!list.isConnected) byId("events").replaceChildren(list);
}
