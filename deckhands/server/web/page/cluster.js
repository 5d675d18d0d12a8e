// The cluster: its progress, speed and cost, its workers and queues, and the limits that bind.
// Plots start when this page is first opened in a tab, and continue while the tab shows another page.

import { ask, text } from "./api.js";
import { line, meter } from "./chart.js";
import { duration, el, grid, named, replace, usd } from "./dom.js";

const REFRESH_MS = 2_000, SAMPLE_MS = 5_000, KEPT = 720, WINDOW_MS = 30_000;
const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const COUNTERS = ["deckhands_steps_total", "deckhands_cost_usd_total", "deckhands_takeovers_total"];
const history = [];
let sampler = 0, counted = [], latest = null;

/** Parse Prometheus' text format: name → [[labels, value]]. */
function metrics(content) {
  const found = new Map();
  for (const row of content.split("\n")) {
    const parts = SAMPLE.exec(row);
    if (!parts || !Number.isFinite(Number(parts[3]))) continue;
    if (!found.has(parts[1])) found.set(parts[1], []);
    found.get(parts[1]).push([parts[2] || "", Number(parts[3])]);
  }
  return found;
}

const sum = (found, name, wanted = () => true) => (found.get(name) || []).reduce((total, [labels, value]) => wanted(labels) ? total + value : total, 0);
const label = (labels, name) => new RegExp(`(?:^|,)${name}="((?:[^"\\\\]|\\\\.)*)"`).exec(labels)?.[1] ?? "";

/** Take a sample: gauges as they are, counters as their rate per second over the last half minute. */
async function sample() {
  if (document.hidden) return;
  const found = metrics(await text("/metrics")), now = Date.now();
  const values = new Map(COUNTERS.flatMap((name) => (found.get(name) || []).map(([labels, value]) => [`${name} ${labels}`, value])));
  counted = [...counted.filter(([at]) => now - at <= WINDOW_MS), [now, values]];
  const [then, before] = counted[0];
  // A worker that started or ended meanwhile counts from its next sample on.
  const grown = (name) => [...values].reduce((total, [series, value]) => series.startsWith(`${name} `) && before.has(series) ? total + Math.max(0, value - before.get(series)) : total, 0);
  const rate = (name) => now > then ? (1000 * grown(name)) / (now - then) : 0;
  latest = found;
  if (before === values) return;  // nothing to compare with yet
  history.push({ at: now, steps: rate(COUNTERS[0]), spend: 3600 * rate(COUNTERS[1]), takeovers: grown(COUNTERS[2]),
    running: sum(found, "deckhands_conversations", (labels) => label(labels, "state") === "running"),
    waiting: sum(found, "deckhands_queue_entries", (labels) => label(labels, "standing") !== "held"),
    oldest: Math.max(0, ...(found.get("deckhands_queue_oldest_seconds") || []).map(([, value]) => value)) });
  history.splice(0, Math.max(0, history.length - KEPT));
}

const TILES = [
  ["steps", "Steps per second", (value) => value.toFixed(value < 10 ? 2 : 0)],
  ["spend", "Spend per hour", usd],
  ["running", "Conversations at work", (value) => value.toLocaleString("en")],
  ["waiting", "Waiting in queues", (value) => value.toLocaleString("en")],
  ["oldest", "Oldest in a queue", duration],
  ["takeovers", "Takeovers in 30 s", (value) => value.toLocaleString("en")],
];

function tiles() {
  const minutes = history.length > 1 ? Math.max(1, Math.round((history.at(-1).at - history[0].at) / 60_000)) : 0;
  return TILES.map(([name, title, show]) => {
    const now = history.at(-1)?.[name] ?? 0, most = Math.max(0, ...history.map((one) => one[name]));
    return el("section", { class: "card tile" }, el("h2", {}, title), el("p", { class: "figure" }, history.length ? show(now) : "…"),
      line(`${title}: ${show(now)} now, ${show(most)} at most`, history.map((one) => [one.at, one[name]])),
      el("p", { class: "axis dim" }, el("span", {}, minutes ? `${minutes} min` : ""), el("span", {}, `max ${show(most)}`)));
  });
}

export function cluster({ main, signal, refused }) {
  named("Cluster");
  const state = el("p", { class: "facts" }), shown = el("div", { class: "tiles" }), parts = el("div", { class: "cards" });
  let sees = true;
  replace(main, el("div", { class: "bar" }, el("h1", {}, "Cluster")), state, shown, parts);

  async function plot() {
    try { await sample(); } catch (error) { if (error.status === 403) { sees = false; clearInterval(sampler); } }
    if (!signal.aborted) replace(shown, sees ? tiles() : el("p", { class: "dim" }, "Figures of the whole cluster need a key with the scope admin for all tenants."));
  }

  async function load() {
    try {
      const wanted = ["/ready", "/workers", "/queues", "/quotas", "/budgets"];
      const found = await Promise.allSettled(wanted.map((path) => ask(path, { signal })));
      if (signal.aborted) return;
      const lost = found.slice(1).find((each) => each.reason?.status === 401);
      if (lost) throw lost.reason;
      if (parts.contains(document.activeElement) && document.activeElement.matches("a, button, summary")) return;
      const [, workers, queues, quotas, budgets] = found.map((each) => each.value);
      const isReady = found[0].status === "fulfilled";
      replace(state, el("span", { class: isReady ? "good" : "bad" }, isReady ? "Work gets on." : "Work does not get on: a store, a controller worker or a tool worker is missing."),
        queues ? el("span", {}, `${queues.parked.toLocaleString("en")} parked`) : "", queues ? el("span", {}, `${queues.dead.toLocaleString("en")} dead`) : "",
        latest ? el("span", {}, `${sum(latest, COUNTERS[2]).toLocaleString("en")} takeovers in all`) : "");
      replace(parts,
        card("Budgets", found[4], budgets, ["Account", "Used", "#Spent", "#Limit", "#Waiting", "What binds"], (one) => [one.account, used(one), usd(one.spent_usd), one.limit_usd === null ? "none" : usd(one.limit_usd), one.waiting, binding(one)],
          "deckhands budget set ACCOUNT USD", "sets one."),
        card("Quotas of models", found[3], quotas, ["Models", "Key", "Used", "#In flight", "#Waiting", "What binds"], quotaRow, "DECKHANDS_QUOTAS", "names them."),
        card("Queues", found[2], latest ? ages() : queues?.queues?.map((one) => [`${one.name} (${one.shard})`, one.waiting, one.in_line, one.pending, ""]), ["Queue", "#Waiting", "#In line", "#Taken up", "#Oldest"], (one) => one),
        card("Workers", found[1], workers, ["Worker", "Role", "Node", "Heartbeat"], (one) => [el("span", { class: "mono" }, one.worker_id), one.role, one.facts.node || "",
          one.left_seconds > 0 ? el("span", { class: "good" }, "alive") : el("span", { class: "bad" }, `silent for ${duration(-one.left_seconds)}`)], "deckhands up", "starts some."));
    } catch (error) { if (!signal.aborted) refused(error); }
  }

  load();
  plot();
  clearInterval(sampler);
  sampler = setInterval(() => { sample().catch(() => {}); }, SAMPLE_MS);
  const timers = [setInterval(() => { if (!document.hidden) load(); }, REFRESH_MS), setInterval(() => { if (sees && !document.hidden) replace(shown, tiles()); }, SAMPLE_MS)];
  signal.addEventListener("abort", () => timers.forEach(clearInterval));
}

/** Return the queues with their ages, from the latest sample. */
function ages() {
  const found = new Map();
  for (const [labels, value] of latest.get("deckhands_queue_entries") || []) {
    const name = label(labels, "queue");
    found.set(name, { ...found.get(name), [label(labels, "standing")]: value });
  }
  const oldest = new Map((latest.get("deckhands_queue_oldest_seconds") || []).map(([labels, value]) => [label(labels, "queue"), value]));
  return [...found].map(([name, one]) => [name, one.waiting || 0, one.in_line || 0, one.held || 0, one.waiting || one.in_line ? duration(oldest.get(name) || 0) : ""]);
}

function used(one) {
  if (one.limit_usd === null) return "";
  const spent = one.spent_usd + one.reserved_usd + one.lost_usd, part = one.limit_usd > 0 ? spent / one.limit_usd : 1;
  return meter(`${Math.round(100 * part)} % of ${usd(one.limit_usd)}`, part);
}

function binding(one) {
  if (one.limit_usd === null || one.left_usd > 0 && !one.waiting) return "";
  return el("span", { class: "warm" }, one.waiting ? `${one.waiting} wait for room${one.reserved_usd > 0 ? `; ${usd(one.reserved_usd)} reserved` : ""}` : "used up");
}

function quotaRow(one) {
  const keys = one.keys.length ? one.keys : [{ name: "", limits: [], in_flight: 0, binds: "not published yet" }];
  const stack = (make) => keys.map((key) => el("div", {}, make(key)));
  return [one.models, stack((key) => key.name),
    stack((key) => key.limits.map((limit) => el("div", { class: "limit" }, meter(`${Math.floor(limit.left).toLocaleString("en")} of the ${Math.floor(limit.at_once).toLocaleString("en")} are left that may be used at once, of ${limit.limit.toLocaleString("en")} ${limit.name}`, 1 - limit.left / limit.at_once),
      el("span", { class: "dim" }, `${limit.limit.toLocaleString("en")} ${limit.name}`)))),
    stack((key) => String(key.in_flight)), one.waiting,
    stack((key) => key.binds ? el("span", { class: "warm" }, key.binds, key.blocked_seconds ? `: ${duration(key.blocked_seconds)}` : "", key.share < 1 ? ` (at ${Math.round(100 * key.share)} % of its limits)` : "") : "")];
}

function card(title, outcome, rows, head, cells, command = "", then = "") {
  const why = outcome.status === "rejected" ? [outcome.reason.message] : ["There is none. ", command ? el("code", {}, command) : "", command ? ` ${then}` : ""];
  return el("section", { class: "card" }, el("h2", {}, title), rows?.length
    ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, grid(head, rows.map(cells))) : el("p", { class: "dim" }, why));
}
