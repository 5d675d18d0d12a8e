// One conversation: its live timeline, why it waits, and the actions of the user.

import { ask, download, follow, place } from "./api.js";
import { composer } from "./composer.js";
import { tree } from "./delegates.js";
import { askFor, askForAll, clean, costText, el, named, note, replace, save } from "./dom.js";
import { card, tasks } from "./events.js";
import { ask as askPerson } from "./question.js";
import { usage } from "./usage.js";
import { why } from "./why.js";
import { zipped } from "./zip.js";

const WHY_MS = 3_000, NEAR_PX = 120, DRAWN = 2_000, MOST_FILES = 500;
const AT_REST = new Set(["finished", "rejected", "error", "stopped", "paused", "awaiting_user_input", "awaiting_user_confirmation"]);

export function conversation({ main, signal, refused }, id, eventId) {
  const events = [], byId = new Map();
  const seen = { state: "loading", title: id, asked: null, list: null };
  const delegates = tree(id, signal), used = usage();
  let waiting = [], isDrawing = false, isAtEnd = !eventId, whySoon = 0;

  const title = el("h1", {}, id), facts = el("p", { class: "facts" });
  const connection = document.getElementById("connection");
  const question = el("section", { class: "card question", "aria-live": "polite", hidden: true });
  const reasons = el("section", { class: "card" }), list = el("section", { class: "card", hidden: true });
  const below = el("section", { class: "card", hidden: true }, el("h2", {}, "Delegates"), delegates.node);
  const timeline = el("div", { class: "timeline", role: "log", "aria-label": "Events", "aria-busy": "true" });
  const earlier = el("button", { type: "button", hidden: true, onclick: () => drawEarlier() });
  const writing = el("article", { class: "event model writing", hidden: true }, el("header", {}, el("strong", {}, "The model writes…")), el("pre", {}));
  const form = composer((content, images) => post("messages", { content, ...(images.length ? { images } : {}) }));
  const verb = (path, name, kind = "") => el("button", { type: "button", class: kind, onclick: () => act(path, name) }, name);
  const buttons = { pause: verb("pause", "Pause"), interrupt: verb("interrupt", "Interrupt"), resume: verb("resume", "Resume"), cancel: verb("cancel", "Cancel", "danger") };
  replace(main,
    el("div", { class: "bar" }, title, el("span", { class: "grow" }), ...Object.values(buttons),
      el("button", { type: "button", onclick: () => fork() }, "Fork…"),
      el("button", { type: "button", onclick: () => beside() }, "Compare…"),
      el("button", { type: "button", onclick: (event) => archive(event.currentTarget) }, "Download")),
    facts,
    el("div", { class: "columns" }, el("div", { class: "wide" }, earlier, timeline, writing, question, form),
      el("aside", { "aria-label": "About the conversation" }, reasons, list, below)));

  function take(event) {
    events.push(event);
    used.take(event);
    switch (event.kind) {
      case "conversation.created": seen.title = event.title || id; seen.origin = event.forked_from || ""; break;
      case "observation.agent_state_changed": seen.state = event.agent_state; seen.asked = event.agent_state === "awaiting_user_confirmation" ? event.action_id : null; explain(); break;
      case "model.reply":
        writing.hidden = true; writing.lastChild.textContent = "";
        break;
      case "action.task_tracking": case "observation.task_tracking": if (event.task_list?.length) seen.list = event.task_list; break;
      case "action.delegate": case "conversation.delegate_ended": delegates.take(event); break;
    }
    waiting.push(event);
    if (!isDrawing) { isDrawing = true; requestAnimationFrame(draw); }
  }

  function draw() {
    isDrawing = false;
    const made = document.createDocumentFragment();
    const skipped = Math.max(0, waiting.length - DRAWN);
    const from = eventId && waiting[0] && eventId - waiting[0].id < skipped ? Math.max(0, eventId - waiting[0].id) : skipped;
    for (const event of waiting.slice(from)) { const node = card(event, id); byId.set(event.id, node); made.append(node); }
    waiting = [];
    const isNear = innerHeight + scrollY > document.body.scrollHeight - NEAR_PX;
    timeline.append(made);
    timeline.setAttribute("aria-busy", "false");
    head();
    const target = byId.get(eventId);
    if (target && !isAtEnd) { target.scrollIntoView({ block: "center" }); target.classList.add("aimed"); target.focus({ preventScroll: true }); isAtEnd = true; }
    else if (isNear) scrollTo(0, document.body.scrollHeight);
  }

  function drawEarlier() {
    const first = Math.min(...byId.keys()), some = events.slice(Math.max(0, first - 1 - DRAWN / 4), first - 1);
    timeline.prepend(...some.map((event) => { const node = card(event, id); byId.set(event.id, node); return node; }));
    head();
  }

  function head() {
    named(seen.title);
    title.textContent = "";
    title.append(el("span", {}, seen.title));
    const hidden = events.length - byId.size;
    earlier.hidden = hidden <= 0;
    earlier.textContent = `Show earlier events (${hidden.toLocaleString("en")})`;
    replace(facts, el("span", { class: `state ${seen.state}`, id: "state" }, seen.state.replaceAll("_", " ")),
      el("span", {}, `${used.steps} steps`), el("span", { id: "spent", title: "With its delegates" }, costText(used.cost, used.isWhole)),
      el("span", {}, `${used.tokens.toLocaleString("en")} tokens`), el("span", {}, `${events.length} events`),
      seen.origin ? el("span", {}, "fork of ", el("a", { href: `#/c/${seen.origin}` }, seen.origin)) : "", el("span", { class: "mono dim" }, id));
    const isRest = AT_REST.has(seen.state);
    buttons.pause.hidden = buttons.interrupt.hidden = isRest;
    buttons.resume.hidden = !["paused", "error", "stopped"].includes(seen.state);
    buttons.cancel.hidden = ["finished", "rejected", "error", "stopped"].includes(seen.state);
    ask_();
    list.hidden = !seen.list;
    if (seen.list) replace(list, el("h2", {}, "Tasks"), tasks(seen.list));
    below.hidden = !delegates.size;
  }

  /** Show the question that the user must answer, once per action. */
  function ask_() {
    const asked = seen.asked;
    if (question.dataset.asked === String(asked ?? "")) return;
    question.dataset.asked = String(asked ?? "");
    question.hidden = asked === null || asked === undefined;
    if (question.hidden) { replace(question); return; }
    askPerson(question, asked, events.find((event) => event.id === asked) || {}, answer, refused);
  }

  async function post(path, body) {
    try { await ask(`${place(id)}/${path}`, { method: "POST", body }); return true; } catch (error) { refused(error); return false; }
  }
  async function answer(path, body) { if (await post(path, body)) { question.hidden = true; explain(); } }
  async function act(path, name) {
    const reason = await askFor(name, "Reason (it stands in the log)", { action: name });
    if (reason !== null) post(path, { reason });
  }
  async function fork() {
    const last = events.at(-1)?.id || 1;
    const given = await askForAll("Fork", [{ name: "at", label: `From event (1 to ${last})`, value: String(eventId || last) }, { name: "model", label: "Another model, or nothing for the same" }], { action: "Fork" });
    if (given === null) return;
    try {
      const at = Number(given.at), model = given.model.trim();
      const made = await ask(`${place(id)}/fork`, { method: "POST", body: { ...(at && at !== last ? { at } : {}), ...(model ? { model } : {}) } });
      location.hash = `#/c/${made.conversation_id}`;
    } catch (error) { refused(error); }
  }
  async function beside() {
    const other = await askFor("Compare with another conversation", "Its id", { value: (seen.origin || "").split("@")[0], action: "Compare" });
    if (other?.trim()) location.hash = `#/compare/${other.trim()}/${id}`;
  }
  /** Save the events, the patch and the files as one ZIP; missing parts are left out. */
  async function archive(button) {
    button.disabled = true;
    const files = [[`${id}/events.jsonl`, new Blob(events.map((event) => `${JSON.stringify(event)}\n`))]];
    try {
      const patch = await download(`${place(id)}/patch`);
      if (patch.size) files.push([`${id}/workspace.patch`, patch]);
      for (const one of (await ask(`${place(id)}/files`, { signal })).slice(0, MOST_FILES)) {
        if (one.kind === "link") continue;
        const content = await download(`${place(id)}/files/${encodeURIComponent(one.name)}`);
        files.push([`${id}/workspace/${one.name}${one.kind === "directory" ? ".tar" : ""}`, content]);
      }
    } catch { note("The workspace cannot be read now; the archive lacks its missing files."); }
    try { save(await zipped(files), `${id}.zip`); } catch (error) { refused(error); }
    button.disabled = false;
  }

  /** Ask soon why the conversation waits; repeated calls are combined into one request. */
  function explain() {
    clearTimeout(whySoon);
    whySoon = setTimeout(async () => {
      try { await why(id, reasons, signal); } catch { /* the stream reports the error */ }
      if (!signal.aborted && !AT_REST.has(seen.state)) whySoon = setTimeout(explain, WHY_MS);
    }, 300);
  }

  /** j and k move to the next and the previous event. */
  function keyed(event) {
    const step = { j: 1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
    const here = document.activeElement.closest?.(".timeline > .event");
    const next = here ? (step > 0 ? here.nextElementSibling : here.previousElementSibling) : step > 0 ? timeline.firstElementChild : timeline.lastElementChild;
    if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); event.preventDefault(); }
  }
  addEventListener("keydown", keyed, { signal });

  const names = { live: "live", away: "the server is away, trying again", over: "archived" };
  follow(id, {
    event: take,
    delta: (piece) => { writing.hidden = false; writing.lastChild.textContent = (writing.lastChild.textContent + clean(piece.text || "")).slice(-20_000); },
    state: (state) => { connection.textContent = names[state]; connection.className = state; if (state === "live") explain(); },
    problem: refused,
  }, signal);
  head();
  signal.addEventListener("abort", () => { clearTimeout(whySoon); connection.textContent = ""; });
}
