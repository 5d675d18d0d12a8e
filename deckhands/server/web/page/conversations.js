// The list: filtered by the server, a page at a time, so that any number of conversations stays quick.

import { ask, place } from "./api.js";
import { ago, askFor, costText, el, named, note, replace } from "./dom.js";

const ID = /^[a-z0-9_-]{20,}$/i;
const NARROW_PX = 860, PAGE = 100, REFRESH_MS = 3_000, AT_ONCE = 8;
const STATES = ["", "running", "waiting", "scheduled", "rate_limited", "awaiting_user_confirmation", "awaiting_user_input",
  "paused", "finished", "error", "stopped", "rejected", "loading"];
const NO_FILTER = { state: "", label: "", text: "", tenant: "", model: "", cost: "" }, filter = { ...NO_FILTER };
/** How many pages without a match are passed over before the user is asked. */
const MOST_EMPTY = 20, SAVED = "deckhands.filters";

/** Return the filters that were saved in this browser, by name. */
function saved() {
  try { return JSON.parse(localStorage.getItem(SAVED) || "{}"); } catch { return {}; }
}

export function conversations({ main, signal, refused }) {
  named("Conversations");
  const chosen = new Set(), cursors = [""];
  let rows = [], next = null, isBusy = false, soon = 0, timer = 0, turn = 0;
  const body = el("tbody", {}), count = el("span", { role: "status" });
  const all = el("input", { type: "checkbox", "aria-label": "Choose all on this page", onchange: () => {
    for (const row of shown()) all.checked ? chosen.add(row.conversation_id) : chosen.delete(row.conversation_id);
    draw();
  } });
  const before = el("button", { type: "button", onclick: () => { cursors.pop(); load(); } }, "Newer");
  const after = el("button", { type: "button", onclick: () => { cursors.push(next); next = null; buttons(); load(); } }, "Older");
  const pause = el("button", { type: "button", onclick: () => act("pause", "Pause") }, "Pause");
  const requeue = el("button", { type: "button", title: "Let them continue that were paused, stopped, have failed or crashed", onclick: () => act("requeue", "Requeue") }, "Requeue");
  const compare = el("button", { type: "button", title: "Choose two", onclick: () => { location.hash = `#/compare/${[...chosen].join("/")}`; } }, "Compare");
  const cancel = el("button", { type: "button", class: "danger", onclick: () => act("cancel", "Cancel") }, "Cancel");
  const state = el("select", { id: "state", onchange: () => { filter.state = state.value; restart(); } },
    STATES.map((name) => el("option", { value: name, selected: name === filter.state }, name.replaceAll("_", " ") || "any")));
  const narrow = (name, placeholder, more = {}) => {
    const input = el("input", { id: name, placeholder, value: filter[name], autocomplete: "off", ...more, onchange: () => { if (input.reportValidity()) { filter[name] = input.value.trim(); restart(); } } });
    return input;
  };
  const label = narrow("label", "team=billing"), tenant = narrow("tenant", "acme", { maxlength: 64 }), model = narrow("model", "a part of its name", { maxlength: 300 });
  const cost = narrow("cost", "0.50", { type: "number", min: 0, step: "any" });
  const text = el("input", { id: "text", type: "search", placeholder: "title or id", maxlength: 300, value: filter.text,
    oninput: () => { clearTimeout(soon); soon = setTimeout(() => { filter.text = text.value.trim(); restart(); }, 300); } });
  const filters = el("select", { id: "saved", "aria-label": "Saved filters", onchange: () => { if (filters.value) choose(saved()[filters.value] || NO_FILTER); } });
  const keepFilter = el("button", { type: "button", class: "quiet", onclick: async () => {
    const name = (await askFor("Save this filter", "Its name; an empty filter removes the name", { action: "Save" }))?.trim();
    if (!name) return;
    const all = saved();
    if (Object.values(filter).some(Boolean)) all[name] = { ...filter }; else delete all[name];
    localStorage.setItem(SAVED, JSON.stringify(all));
    showSaved(name);
  } }, "Save filter");
  replace(main,
    el("div", { class: "bar" }, el("h1", {}, "Conversations"), count, el("span", { class: "grow" }), el("a", { class: "button main", href: "#/new" }, "New conversation")),
    el("form", { class: "bar filters", onsubmit: (event) => { event.preventDefault(); if (ID.test(text.value.trim())) location.hash = `#/c/${text.value.trim()}`; else if (text.value.trim()) location.hash = `#/search/${encodeURIComponent(text.value.trim())}`; } },
      el("label", { for: "text" }, "Search"), el("div", { class: "row" }, text, el("button", { class: "quiet", title: "Search tasks, messages, commands and outputs; Enter" }, "In all texts")), el("label", { for: "state" }, "State"), state,
      el("div", { class: "row actions" }, compare, pause, requeue, cancel),
      el("details", { class: "further", open: innerWidth > NARROW_PX }, el("summary", {}, "More filters"), el("div", { class: "row" },
        el("label", { for: "label" }, "Label"), label, el("label", { for: "tenant" }, "Tenant"), tenant, el("label", { for: "model" }, "Model"), model,
        el("label", { for: "cost" }, "Cost from $"), cost)),
      el("div", { class: "row" }, filters, keepFilter)),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Conversations" }, el("table", { class: "list" },
      el("thead", {}, el("tr", {}, el("td", {}, all), ...["Conversation", "State", "Steps", "Cost", "Updated"].map((name) => el("th", { scope: "col", class: name === "Steps" || name === "Cost" ? "number" : undefined }, name)))),
      body)),
    el("div", { class: "bar" }, before, after));

  const shown = () => rows;

  function showSaved(chosenName = "") {
    replace(filters, el("option", { value: "" }, "Saved filters"), Object.keys(saved()).sort().map((name) => el("option", { value: name, selected: name === chosenName }, name)));
    filters.hidden = !Object.keys(saved()).length;
  }
  function choose(wanted) {
    for (const name of Object.keys(NO_FILTER)) filter[name] = String(wanted[name] ?? "");
    state.value = filter.state; text.value = filter.text; label.value = filter.label; tenant.value = filter.tenant; model.value = filter.model; cost.value = filter.cost;
    restart();
  }

  function draw() {
    replace(body, shown().map((row) => {
      const box = el("input", { type: "checkbox", "aria-label": `Choose ${row.title || row.conversation_id}`, onchange: () => {
        box.checked ? chosen.add(row.conversation_id) : chosen.delete(row.conversation_id);
        buttons();
      } });
      box.checked = chosen.has(row.conversation_id);
      const labels = Object.entries(row.labels).map(([name, value]) => el("span", { class: "label" }, `${name}=${value}`));
      return el("tr", {},
        el("td", {}, box),
        el("td", {}, el("a", { href: `#/c/${row.conversation_id}` }, row.title || row.conversation_id), " ", labels,
          el("div", { class: "dim mono" }, row.conversation_id, row.tenant ? ` · ${row.tenant}` : "", row.model ? ` · ${row.model}` : "")),
        el("td", {}, el("span", { class: `state ${row.state}` }, row.state.replaceAll("_", " ")), row.wait_reason ? el("div", { class: "dim" }, `waits: ${row.wait_reason.replaceAll("_", " ")}`) : ""),
        el("td", { class: "number" }, row.numbers.iterations || "0"),
        el("td", { class: "number" }, costText(row.numbers.cost_usd || 0, row.numbers.has_unknown_cost !== "1")),
        el("td", { class: "nowrap" }, ago(row.updated)));
    }));
    if (!shown().length) replace(body, el("tr", {}, el("td", { colspan: 6, class: "empty" }, next ? "None of those that were looked at matches. “Older” looks further. " : Object.values(filter).some(Boolean) ? "No conversation matches. " : "No conversation is here. ", el("a", { href: "#/new" }, "Start one"), ".")));
    buttons();
  }

  function buttons() {
    pause.disabled = requeue.disabled = cancel.disabled = isBusy || !chosen.size;
    compare.disabled = chosen.size !== 2;
    before.disabled = cursors.length < 2;
    after.disabled = !next;
    count.textContent = chosen.size ? `${chosen.size} chosen` : `page ${cursors.length}`;
  }

  function query(textIs = "title") {
    const query = new URLSearchParams({ limit: PAGE, cursor: cursors.at(-1) });
    if (filter.text) query.append(textIs, filter.text);
    if (filter.state) query.append("state", filter.state);
    if (filter.tenant) query.append("tenant", filter.tenant);
    if (filter.model) query.append("model", filter.model);
    if (filter.cost) query.append("min_cost_usd", filter.cost);
    for (const one of filter.label.split(/[ ,]+/).filter(Boolean)) query.append("label", one);
    return query.toString();
  }

  async function load() {
    const number = turn += 1, asked = query(), asId = ID.test(filter.text) ? query("id") : "";
    try {
      let found = asId ? await ask(`/conversations?${asId}`, { signal }) : { conversations: [] };
      if (!found.conversations.length) found = await ask(`/conversations?${asked}`, { signal });
      for (let empty = 0; !found.conversations.length && found.next_cursor && empty < MOST_EMPTY && number === turn; empty += 1) {
        const further = new URLSearchParams(asked);
        further.set("cursor", found.next_cursor);
        found = await ask(`/conversations?${further}`, { signal });
      }
      if (number !== turn) return;  // another page or filter was chosen since
      rows = found.conversations;
      next = found.next_cursor;
      if (!document.activeElement || !body.contains(document.activeElement)) draw();
    } catch (error) { if (!signal.aborted) refused(error); }
  }

  function restart() { cursors.length = 1; chosen.clear(); load(); }

  async function act(verb, name) {
    const ids = [...chosen];
    const reason = await askFor(`${name} ${ids.length} conversation${ids.length === 1 ? "" : "s"}`, "Reason (it stands in the log)", { action: name });
    if (reason === null) return;
    isBusy = true;
    let done = 0, failed = "";
    const work = async () => {
      for (let id = ids.pop(); id !== undefined; id = ids.pop()) {
        try { await ask(`${place(id)}/${verb}`, { method: "POST", body: { reason } }); done += 1; } catch (error) { failed = error.message; }
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    isBusy = false;
    chosen.clear();
    note(failed ? `${done} done; the others were refused: ${failed}` : `${done} done.`, failed ? "bad" : "");
    load();
  }

  showSaved();
  async function refresh() {
    if (!document.hidden) await load();
    if (!signal.aborted) timer = setTimeout(refresh, REFRESH_MS);
  }
  refresh();
  signal.addEventListener("abort", () => clearTimeout(timer));
}
