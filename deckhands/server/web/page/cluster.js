// The cluster: its recent past, its workers and queues, what needs an operator, and what an operator may change.

import { ask, place, read, revise, text } from "./api.js";
import { line, meter } from "./chart.js";
import { ago, askForAll, duration, el, grid, named, note, replace, usd } from "./dom.js";

const REFRESH_MS = 2_000, HISTORY_MS = 5_000;
const SPANS = { hour: { name: "Last hour", kept: 720 }, day: { name: "Last day", kept: 1_440 } };
const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const REASON = { name: "reason", label: "Reason (it is recorded)", required: true };
let span = "hour";

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

const label = (labels, name) => new RegExp(`(?:^|,)${name}="((?:[^"\\\\]|\\\\.)*)"`).exec(labels)?.[1] ?? "";
const count = (value) => Math.round(value).toLocaleString("en");

/** What is plotted: its field, its title, how a value is shown, and whether the samples' sum is the figure. */
const TILES = [
  ["steps", "Steps per second", (value) => value.toFixed(value < 10 ? 2 : 0)],
  ["spend", "Spend per hour", usd],
  ["running", "Conversations at work", count],
  ["waiting", "Waiting in queues", count],
  ["oldest", "Oldest in a queue", duration],
  ["takeovers", "Takeovers", count, true],
];

function tiles(samples, stepSeconds) {
  const start = samples.length ? ago(samples[0].at) : "";
  return TILES.map(([name, title, show, isSummed]) => {
    const values = samples.map((one) => one[name]), most = Math.max(0, ...values);
    const now = isSummed ? values.reduce((sum, value) => sum + value, 0) : values.at(-1) ?? 0;
    return el("section", { class: "card tile" }, el("h2", {}, title), el("p", { class: "figure" }, samples.length ? show(now) : "…"),
      line(`${title}: ${show(now)} ${isSummed ? "in all" : "now"}, ${show(most)} at most`, samples.map((one) => [Date.parse(one.at), one[name]]), { gapMs: 4_000 * stepSeconds }),
      el("p", { class: "axis dim" }, el("span", {}, start), el("span", {}, `max ${show(most)}`)));
  });
}

export function cluster({ main, signal, refused }) {
  named("Cluster");
  const state = el("p", { class: "facts" }), shown = el("div", { class: "tiles" }), parts = el("div", { class: "cards" });
  let samples = [], seesAll = true, drawn = [];
  const spans = el("div", { class: "row", role: "group", "aria-label": "Time" }, Object.entries(SPANS).map(([name, one]) => el("button", { type: "button", "data-span": name, onclick: () => { span = name; samples = []; press(); plot(); } }, one.name)));
  const press = () => spans.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.span === span)));
  press();
  replace(main, el("div", { class: "bar" }, el("h1", {}, "Cluster"), el("span", { class: "grow" }), spans), state, shown, parts);

  /** Read the samples that the server has taken since, and draw them. */
  async function plot() {
    if (!seesAll) return;
    const wanted = span, query = new URLSearchParams({ of: wanted });
    if (samples.length) query.set("after", samples.at(-1).at);
    try {
      const found = await ask(`/history?${query}`, { signal });
      if (wanted !== span) return;
      samples = [...samples, ...found.samples].slice(-SPANS[span].kept);
      replace(shown, tiles(samples, found.step_seconds));
    } catch (error) {
      if (signal.aborted || error.status !== 403) return;  // else it is tried again
      seesAll = false;
      spans.hidden = true;
      replace(shown, el("p", { class: "dim" }, "Figures of the whole cluster need a key with the scope admin for all tenants."));
    }
  }

  /** Ask for a reason, perform a change, say how it went, and show the result. */
  async function change(title, fields, act, { action = title, says = "" } = {}) {
    const given = await askForAll(title, [...fields, REASON], { action, says });
    if (given === null) return;
    try { await act(given); note("Done."); } catch (error) { note(error.message, "bad"); }
    load(true);
  }
  const button = (name, of, act, kind = "quiet") => el("button", { type: "button", class: kind, "aria-label": of ? `${name} ${of}` : undefined, onclick: act }, name);

  async function load(isNow = false) {
    try {
      const wanted = ["/ready", "/workers", "/queues", "/quotas", "/budgets", "/dead-letters", "/schedules", "/webhooks", "/keys", "/mcp-logins"];
      const [ready, workers, queues, quotas, budgets, dead, schedules, webhooks, keys, logins, rollouts, figures] = await Promise.allSettled([...wanted.map((path) => ask(path, { signal })), read("/rollouts"), text("/metrics")]);
      if (signal.aborted) return;
      const lost = [workers, queues, quotas, budgets].find((each) => each.reason?.status === 401);
      if (lost) throw lost.reason;
      const active = document.activeElement;
      if (!isNow && parts.contains(active) && active.matches("a, button, summary")) return;
      const found = figures.value ? metrics(figures.value) : null, isReady = ready.status === "fulfilled";
      replace(state, el("span", { class: isReady ? "good" : "bad" }, isReady ? "Work gets on." : "Work does not get on: a store, a controller worker or a tool worker is missing."),
        queues.value ? el("span", {}, `${queues.value.parked.toLocaleString("en")} parked`) : "", queues.value ? el("span", {}, `${queues.value.dead.toLocaleString("en")} dead`) : "");
      const isAdmin = quotas.status === "fulfilled", isOperator = dead.status === "fulfilled";
      const cards = [
        dead.value?.conversations.length || dead.value?.entries.length ? deadLetters(dead.value) : "",
        card("Workers", workers, ["Worker", "Role", "Version", "#Load", "CPU", "#Memory free", "Heartbeat"], workerRow, ["deckhands up", "starts some."]),
        card("Budgets", budgets, ["Account", "Used", "#Spent", "#Limit", "#Waiting", "What binds", "Change"], (one) => [one.account, used(one), usd(one.spent_usd), one.limit_usd === null ? "none" : usd(one.limit_usd), one.waiting, binding(one),
          isAdmin ? button("Change", one.account, () => setLimit(one.account, one.limit_usd)) : ""], ["deckhands budget set ACCOUNT USD", "sets one."], undefined, isAdmin ? button("New limit…", "", () => setLimit("", null), "") : ""),
        card("Queues", queues, ["Queue", "#Waiting", "#In line", "#Taken up", "#Oldest"], (one) => one, [], found ? ages(found) : queues.value?.queues?.map((one) => [`${one.name} (${one.shard})`, one.waiting, one.in_line, one.pending, ""])),
        card("Quotas of models", quotas, ["Models", "Key", "Used", "#In flight", "#Waiting", "What binds", "Change"], (one) => [...quotaRow(one), el("div", { class: "row" }, one.keys.map((key) => button(key.is_published ? "Change" : "Remove", `${one.models} ${key.name}`, () => setQuota(one.models, key.name))))], ["DECKHANDS_QUOTAS", "names them."]),
        rollouts.value?.value.length ? rolloutRuns(rollouts.value) : "",
        card("Schedules", schedules, ["Schedule", "Times", "Next", "#Started", "Last problem", "Change"], scheduleRow, ["deckhands schedule add", "adds one; so does the form of a new conversation."]),
        card("Webhooks", webhooks, ["Address", "Events", "State", "Change"], (one) => webhookRow(one, isOperator), ["deckhands webhook add URL", "adds one."], undefined, isOperator ? button("New webhook…", "", addWebhook, "") : ""),
        keys.value ? card("API keys", keys, ["Key", "Tenant", "Scopes", "State", "Last used", "Change"], keyRow, [], undefined, button("New key…", "", addKey, "")) : "",
        logins.value?.length ? card("Logins at MCP servers", logins, ["Server", "Address", "State", "Change"], loginRow, []) : "",
      ].filter(Boolean);
      if (!isNow && cards.length === drawn.length && cards.every((one, at) => one.isEqualNode(drawn[at]))) return;
      drawn = cards.map((one) => one.cloneNode(true));  // what a reader has opened since is no change
      replace(parts, cards);
    } catch (error) { if (!signal.aborted) refused(error); }
  }

  function deadLetters({ conversations, entries }) {
    const rows = conversations.map((one) => [el("a", { href: `#/c/${one.conversation_id}` }, one.title || one.conversation_id), one.tenant,
      one.last_error || (one.workers.length ? `crashed ${one.workers.join(", ")}` : "crashed three workers"), one.died.length ? ago(one.died.at(-1)) : "",
      el("div", { class: "row" }, button("Requeue", one.title, () => change(`Requeue ${one.title}`, [], ({ reason }) => ask(`${place(one.conversation_id)}/requeue`, { method: "POST", body: { reason } }), { action: "Requeue", says: "It continues from its last state, with another three workers." })),
        button("Close", one.title, () => change(`Close ${one.title}`, [], ({ reason }) => ask(`${place(one.conversation_id)}/close`, { method: "POST", body: { reason } }), { action: "Close it", says: "Its log stays readable, and accepts nothing more." })))]);
    return el("section", { class: "card wide dead" }, el("h2", {}, "Dead letters"), rows.length ? scrolled("Dead letters", grid(["Conversation", "Tenant", "Cause", "Died", "Change"], rows)) : "",
      entries.length ? el("details", {}, el("summary", {}, `${entries.length} unreadable ${entries.length === 1 ? "entry" : "entries"}`), scrolled("Unreadable entries", grid(["Key", "Entry", "Why"], entries.map((one) => [one.key, one.entry_id, one.why])))) : "");
  }

  async function setLimit(account, limit) {
    let tag = null;
    try {
      if (account) {
        const found = await read(`/budgets/${encodeURIComponent(account)}`);
        tag = found.tag;
        limit = found.value.limit_usd;
      }
    } catch (error) { note(error.message, "bad"); return; }
    await change(account ? `Limit of ${account}` : "New limit", [...(account ? [] : [{ name: "account", label: "Account, such as tenant:acme", required: true }]),
    { name: "limit", label: "Limit in $; nothing for no limit", value: limit === null ? "" : String(limit) }], async (given) => {
    const usd = given.limit.trim();
    if (usd && !(Number(usd) >= 0 && Number(usd) < Infinity)) throw new Error(`“${usd}” is not an amount. Write it like 25 or 0.50.`);
    const path = `/budgets/${encodeURIComponent(account || given.account.trim())}`;
    await ask(path, { method: "PUT", body: { limit_usd: usd ? Number(usd) : null, reason: given.reason }, match: tag ?? (await read(path)).tag });
  }, { action: "Set", says: "Conversations that wait for the account continue if it has room." });
  }

  async function setQuota(models, name) {
    const path = `/quotas/${encodeURIComponent(models)}`;
    let key, tag;
    try {
      const found = await read(path);
      tag = found.tag;  // of what is shown: a change that another administrator makes meanwhile is not overwritten
      key = found.value.keys.find((one) => one.name === name);
      if (!key) throw new Error(`The quota of ${models} has no key ${name} any more.`);
    } catch (error) { note(error.message, "bad"); return; }
    const limits = key.limits.filter((limit) => limit.field);
    await change(`Limits of ${models}, key ${key.name}`, limits.map((limit) => ({ name: limit.field, label: `${limit.name[0].toUpperCase()}${limit.name.slice(1)}; the file says ${limit.published.toLocaleString("en")}`, value: String(limit.limit) })), async (given) => {
      const wanted = {};
      for (const limit of limits) {
        const text = given[limit.field].trim().replaceAll(",", ""), amount = Number(text);
        if (text && !(Number.isInteger(amount) && amount >= 1)) throw new Error(`“${text}” is not an amount. Write a whole number from 1, or nothing for the file's.`);
        if (text && amount !== limit.published) wanted[limit.field] = amount;
      }
      await ask(path, { method: "PUT", body: { key: key.name, limits: wanted, reason: given.reason }, match: tag });
    }, key.is_published ? { action: "Set", says: "They hold until they are changed again, also when controllers start again. Nothing means the file's limit." }
      : { action: "Remove", says: `The controllers' file has no such key any more. Its set limits (${key.set}) hold again when it comes back, unless you remove them.` });
  }

  function scheduleRow(one) {
    const path = `/schedules/${encodeURIComponent(one.name)}`, verb = one.is_paused ? "Resume" : "Pause";
    return [one.conversation_id ? el("a", { href: `#/c/${one.conversation_id}` }, one.name) : one.name, el("span", { class: "mono" }, `${one.cron} ${one.zone}`), one.is_paused ? "paused" : one.next ? new Date(one.next).toLocaleString() : "", one.begun, one.error,
      el("div", { class: "row" }, button(verb, one.name, () => change(`${verb} ${one.name}`, [], ({ reason }) => revise(path, `/${verb.toLowerCase()}`, { method: "POST", body: { reason } }), { action: verb })),
        button("Remove", one.name, () => change(`Remove ${one.name}`, [], ({ reason }) => revise(path, `?reason=${encodeURIComponent(reason)}`, { method: "DELETE" }), { action: "Remove", says: "Conversations that it has started continue." })))];
  }

  function webhookRow(one, isOperator) {
    const path = `/webhooks/${one.id}`, verb = one.is_enabled ? "Disable" : "Enable";
    return [el("span", { class: "mono" }, one.url), one.events.join(", "), one.is_enabled ? "on" : el("span", { class: "warm" }, `off${one.why_off ? `: ${one.why_off}` : ""}`),
      !isOperator ? "" : el("div", { class: "row" }, button(verb, one.url, () => change(`${verb} ${one.url}`, [], ({ reason }) => revise(path, `/${verb.toLowerCase()}`, { method: "POST", body: { reason } }), { action: verb })),
        button("Remove", one.url, () => change(`Remove ${one.url}`, [], ({ reason }) => revise(path, `?reason=${encodeURIComponent(reason)}`, { method: "DELETE" }), { action: "Remove", says: "Its deliveries are removed, too." })))];
  }
  const addWebhook = () => change("New webhook", [{ name: "url", label: "Address", required: true }], async ({ url, reason }) => {
    const made = await ask("/webhooks", { method: "POST", body: { url: url.trim(), reason } });
    await askForAll("The secret of the webhook", [{ name: "secret", label: "It verifies signatures, and is not shown again", value: made.secret }], { action: "I have kept it" });
  }, { action: "Add", says: "It is notified when a conversation settles." });

  const keyRow = (one) => [el("span", {}, one.name, el("div", { class: "dim mono" }, one.id)), one.tenant, one.scopes.join(", "),
    one.state === "good" ? one.expires ? `until ${new Date(one.expires).toLocaleDateString()}` : "good" : el("span", { class: "warm" }, one.state), one.used ? ago(one.used) : "never",
    one.state === "revoked" ? "" : button("Revoke", one.name, () => change(`Revoke ${one.name}`, [], ({ reason }) => ask(`/keys/${one.id}?reason=${encodeURIComponent(reason)}`, { method: "DELETE" }), { action: "Revoke", says: "It is refused from now on; its open streams end within 15 seconds." }))];
  const loginRow = (one) => [one.name, el("span", { class: "mono" }, one.url), one.is_logged_in ? "logged in" : el("span", { class: "warm" }, `needs a login${one.problem ? `: ${one.problem}` : ""}`),
    el("div", { class: "row" }, button("Log in", one.name, () => change(`Log in at ${one.name}`, [], async ({ reason }) => {
      const { address } = await ask(`/mcp-logins/${one.name}`, { method: "POST", body: { return_to: location.origin, reason } });
      if (!/^https?:/.test(address)) throw new Error("The authorization server has no address for a browser.");
      const tab = window.open("about:blank", "_blank");
      if (!tab) throw new Error("Allow this page to open a tab, and try again.");
      tab.opener = null;
      tab.location = address;
    }, { action: "Log in", says: "A new tab opens, where you allow the access. Tool workers use it within a minute." })),
    one.is_logged_in ? button("Forget", one.name, () => change(`Forget the login at ${one.name}`, [], ({ reason }) => ask(`/mcp-logins/${one.name}?reason=${encodeURIComponent(reason)}`, { method: "DELETE" }), { action: "Forget", says: "Workers that are connected use their token until it expires." })) : "")];
  const addKey = () => change("New API key", [{ name: "name", label: "Name", required: true }, { name: "tenant", label: "Tenant; * for all", required: true }, { name: "scopes", label: "Scopes, of read, write, operate and admin", value: "read, write", required: true }, { name: "days", label: "Valid for days; nothing: until it is revoked" }], async (given) => {
    const days = given.days.trim(), body = { name: given.name.trim(), tenant: given.tenant.trim(), scopes: given.scopes.split(/[\s,]+/).filter(Boolean), days: days ? Number(days) : null, reason: given.reason };
    const made = await ask("/keys", { method: "POST", body });
    await askForAll("The new key", [{ name: "token", label: "It is not shown again", value: made.token }], { action: "I have kept it" });
  }, { action: "Make", says: "It has at most the scopes of your key, and expires no later." });

  load();
  plot();
  const timers = [setInterval(() => { if (!document.hidden) load(); }, REFRESH_MS), setInterval(() => { if (!document.hidden) plot(); }, HISTORY_MS)];
  signal.addEventListener("abort", () => timers.forEach(clearInterval));
}

/** Return the queues with their ages. */
function ages(metrics) {
  const found = new Map();
  for (const [labels, value] of metrics.get("deckhands_queue_entries") || []) {
    const name = label(labels, "queue");
    found.set(name, { ...found.get(name), [label(labels, "standing")]: value });
  }
  const oldest = new Map((metrics.get("deckhands_queue_oldest_seconds") || []).map(([labels, value]) => [label(labels, "queue"), value]));
  return [...found].map(([name, one]) => [name, one.waiting || 0, one.in_line || 0, one.held || 0, one.waiting || one.in_line ? duration(oldest.get(name) || 0) : ""]);
}

function workerRow(one) {
  const { load } = one, percent = (share) => `${Math.round(100 * share)} %`;
  const held = load.conversations ?? load.running;
  return [el("span", { class: "mono" }, one.worker_id, one.facts.node ? el("div", { class: "dim" }, one.facts.node) : ""), one.role, one.version,
    held === undefined ? "" : `${count(held)} ${load.conversations === undefined ? "running" : "held"}`, load.host_cpu === undefined ? "" : meter(`${percent(load.host_cpu)} of the machine's CPU are busy`, load.host_cpu),
    load.host_memory_free === undefined ? "" : percent(load.host_memory_free),
    one.left_seconds > 0 ? el("span", { class: "good" }, "alive") : el("span", { class: "bad" }, `silent for ${duration(-one.left_seconds)}`)];
}

function rolloutRuns({ value, next }) {
  const title = next ? `Rollout runs: the ${value.length} that changed last` : "Rollout runs";
  return card(title, { status: "fulfilled", value }, ["Run", "Model", "State", "#Version", "#Groups", "#Not read"], rolloutRow);
}

const rolloutRow = (one) => [el("span", {}, one.name, one.tenant ? el("div", { class: "dim" }, one.tenant) : ""), one.model, el("span", { class: one.is_driven || one.state !== "running" ? "" : "warm" }, one.state, one.state === "running" && !one.is_driven ? ", without a driver" : ""), one.version, count(one.groups), count(one.waiting)];

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
    stack((key) => key.is_published === false ? el("span", { class: "warm" }, `not in the file any more; set: ${key.set}`) : key.limits.map((limit) => el("div", { class: "limit" }, meter(`${Math.floor(limit.left).toLocaleString("en")} of the ${Math.floor(limit.at_once).toLocaleString("en")} are left that may be used at once, of ${limit.limit.toLocaleString("en")} ${limit.name}`, 1 - limit.left / limit.at_once),
      el("span", { class: "dim nowrap" }, `${limit.limit.toLocaleString("en")} ${limit.name}`, limit.field && limit.limit !== limit.published ? ` (file: ${limit.published.toLocaleString("en")})` : "")))),
    stack((key) => String(key.in_flight)), one.waiting,
    stack((key) => key.binds ? el("span", { class: "warm" }, key.binds, key.blocked_seconds ? `: ${duration(key.blocked_seconds)}` : "", key.share < 1 ? ` (at ${Math.round(100 * key.share)} % of its limits)` : "") : "")];
}

const scrolled = (title, table) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table);

/** Return a section with a table, a broad one over the whole width; without rows it says why. `tool` makes something new. */
function card(title, outcome, head, cells, [command, then] = [], rows = outcome.value, tool = "") {
  const why = outcome.status === "rejected" ? [outcome.reason.message] : ["There is none. ", command ? el("code", {}, command) : "", command ? ` ${then}` : ""];
  return el("section", { class: head.length > 6 ? "card wide" : "card" }, el("div", { class: "bar" }, el("h2", {}, title), el("span", { class: "grow" }), tool), rows?.length ? scrolled(title, grid(head, rows.map(cells))) : el("p", { class: "dim" }, why));
}
