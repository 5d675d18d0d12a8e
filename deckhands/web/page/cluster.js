// The cluster: whether it gets on, its workers, queues and budgets.

import { ask } from "./api.js";
import { el, replace, usd } from "./dom.js";

const REFRESH_MS = 2_000;

export function cluster({ main, signal, refused }) {
  document.title = "Cluster · Deckhands";
  const parts = el("div", { class: "cards" });
  replace(main, el("div", { class: "bar" }, el("h1", {}, "Cluster")), parts);

  async function load() {
    try {
      const wanted = ["/ready", "/workers", "/queues", "/budgets"];
      const found = await Promise.allSettled(wanted.map((path) => ask(path, { signal })));
      if (signal.aborted) return;
      const [, workers, queues, budgets] = found.map((each) => each.value);
      const lost = found.slice(1).find((each) => each.reason?.status === 401);
      if (lost) throw lost.reason;
      replace(parts, readiness(found[0]), table("Workers", ["Worker", "Role", "Heartbeat"], workers, found[1],
        (one) => [one.worker_id, one.role, one.left_seconds > 0 ? "alive" : `silent for ${Math.round(-one.left_seconds)} s`]),
      table("Queues", ["Queue", "Waiting", "Taken up", "In line"], queues?.queues, found[2],
        (one) => [`${one.name} (${one.shard})`, one.waiting, one.pending, one.in_line],
        queues ? `${queues.parked} parked, ${queues.dead} dead` : ""),
      table("Budgets", ["Account", "Limit", "Spent", "Left", "Waiting"], budgets, found[3],
        (one) => [one.account, one.limit_usd === null ? "none" : usd(one.limit_usd), usd(one.spent_usd), one.left_usd === null ? "" : usd(one.left_usd), one.waiting]));
    } catch (error) { if (!signal.aborted) refused(error); }
  }

  load();
  const timer = setInterval(() => { if (!document.hidden) load(); }, REFRESH_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function readiness(found) {
  const isReady = found.status === "fulfilled";
  const text = isReady ? "Work gets on." : "Work does not get on: a store, a controller worker or a tool worker is missing.";
  return el("section", { class: "card" }, el("h2", {}, "State"), el("p", { class: isReady ? "good" : "bad" }, text));
}

function table(title, head, rows, outcome, cells, after = "") {
  const why = outcome.status === "rejected" ? outcome.reason.message : "There is none.";
  return el("section", { class: "card" }, el("h2", {}, title), rows?.length
    ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, cells(row).map((cell) => el("td", {}, String(cell))))))))
    : el("p", { class: "dim" }, why), after ? el("p", { class: "dim" }, after) : "");
}
