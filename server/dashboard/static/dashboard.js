// The page: asks the service every second while somebody looks, and shows what it says or that it says nothing.

import { byId } from "./dom.js";
import { age } from "./format.js";
import { History } from "./history.js";
import { showCorpus, showEngines, showEvents } from "./lists.js";
import { showCharts, showFigures, showTotals } from "./overview.js";

const POLL_MS = 1000;
const SLOW_POLL_MS = 5000;
const TIMEOUT_MS = 5000;
const STALE_AFTER_MS = 2500;
const TOKEN_KEY = "draftd-token";

const history_ = new History();
const page = {
  span_s: 300,
  group: "engines",
  status: null,
  heard_ms: null,
  timer: null,
  asking: false,
  sort: { key: "engine", down: false },
};

// ---- asking

class Refused extends Error {
  constructor(status) {
    super(`HTTP ${status}`);
    this.status = status;
  }
}

async function get(path) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Refused(answer.status);
  return answer.json();
}

async function ask() {
  const [status, first] = await Promise.all([get("/v1/status"), get(`/v1/history?after=${history_.number}`)]);
  if (!history_.take(first)) history_.take(await get("/v1/history?after=0"));
  page.status = status;
  page.heard_ms = performance.now();
}

async function poll() {
  clearTimeout(page.timer);
  if (document.hidden || page.asking) return;
  page.asking = true;
  let wait_ms = POLL_MS;
  try {
    await ask();
    signIn(null);
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      signIn(error.status);
      return;
    }
    // Anything else is a service that does not answer, or not now: the page says so and goes on asking.
    if (error.status === 429) wait_ms = SLOW_POLL_MS;
  } finally {
    page.asking = false;
  }
  render();
  page.timer = setTimeout(poll, wait_ms);
}

function signIn(refused) {
  byId("forget").hidden = !sessionStorage.getItem(TOKEN_KEY);
  byId("sign-in").hidden = refused === null;
  if (refused === null) return;
  const had = sessionStorage.getItem(TOKEN_KEY) !== null;
  sessionStorage.removeItem(TOKEN_KEY);
  byId("forget").hidden = true;
  byId("main").hidden = true;
  byId("stale").hidden = true;
  document.body.dataset.state = "refused";
  byId("state").textContent = "Needs a token";
  const wrong =
    refused === 403 ? "That token may not read every namespace, which this page shows." : "That token is not valid, or no longer.";
  if (had) byId("sign-in-why").textContent = wrong;
  byId("token").focus();
}

// ---- showing

function render() {
  const stale_ms = page.heard_ms === null ? null : performance.now() - page.heard_ms;
  const stale = stale_ms === null || stale_ms > STALE_AFTER_MS;
  const { status } = page;
  const state = stale ? "stale" : status.ready ? "ready" : "starting";
  if (document.body.dataset.state !== state) {
    document.body.dataset.state = state;
    byId("state").textContent = { stale: "No answer", ready: "Ready", starting: "Starting or stopping" }[state];
    document.title = `draftd – ${byId("state").textContent.toLowerCase()}`;
  }
  byId("stale").hidden = !stale || stale_ms === null;
  if (stale_ms !== null) byId("stale-age").textContent = age(stale_ms / 1000);
  if (status === null) return;
  byId("main").hidden = false;
  byId("about").textContent = `${status.version} · run ${status.instance.slice(0, 8)} · up ${age(status.uptime_s)}`;
  const failure = status.store?.failure;
  byId("warning").hidden = !failure;
  byId("warning").textContent = failure
    ? `The store cannot be written: ${failure}. Drafting goes on; what is committed now would not survive a stop.`
    : "";
  const shown = history_.window(page.span_s);
  const parts = Object.fromEntries(
    ["engines", "namespaces", "sources", "propose", "refresh", "visibility"].map((name) => [name, shown.gather(name)]),
  );
  showFigures(status, shown, parts);
  showCharts(shown, parts, page.group);
  showEngines(status, shown, parts.engines, page.sort);
  showCorpus(status, shown, parts.namespaces);
  showEvents([...history_.events.values()], byId("problems").checked);
  showTotals(status);
}

// ---- what people do

byId("window").addEventListener("change", (event) => {
  page.span_s = Number(event.target.value);
  if (page.status) render();
});
byId("group").addEventListener("change", (event) => {
  page.group = event.target.value;
  if (page.status) render();
});
byId("problems").addEventListener("change", () => page.status && render());
byId("engines").addEventListener("click", (event) => {
  const key = event.target.dataset?.sort;
  if (!key) return;
  page.sort = {
    key,
    down: page.sort.key === key ? !page.sort.down : typeof page.status.attachments[0]?.[key] !== "string" && key !== "engine",
  };
  render();
});
byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, byId("token").value.trim());
  byId("token").value = "";
  poll();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN_KEY);
  location.reload();
});
document.addEventListener("visibilitychange", poll);
// A service that takes the call and does not answer it is as silent as one that is gone.
setInterval(
  () => document.body.dataset.state !== "refused" && page.heard_ms !== null && !document.hidden && page.asking && render(),
  POLL_MS,
);
poll();
