// One conversation as a workplace: its steps as they happen, what it needs, and everything that a user can do about it.

import { ask, download, place } from "./api.js";
import { Timeline, Usage } from "./analysis.js";
import { Card } from "./cards.js";
import { composer } from "./composer.js";
import { tree } from "./delegates.js";
import { askFor, askForAll, clean, costText, duration, named, note, save } from "./dom.js";
import { tasks } from "./events.js";
import { help, isTyping } from "./keys.js";
import { Log } from "./log.js";
import { ask as askPerson } from "./question.js";
import { classOf, group, has, lineOf } from "./steps.js";
import { isOffered, Terminal } from "./terminal.js";
import { forgetOpen, html, Nodes, render, useEffect, useMemo, useReducer, useRef, useState } from "./ui.js";
import { usage } from "./usage.js";
import { List } from "./virtual.js";
import { why } from "./why.js";
import { Files } from "./workspace.js";
import { zipped } from "./zip.js";

const WHY_MS = 3_000, MOST_FILES = 500, MOST_LANDMARKS = 300, SEARCH_MS = 150;
const AT_REST = new Set(["finished", "rejected", "error", "stopped", "paused", "awaiting_user_input", "awaiting_user_confirmation"]);
const ENDED = ["finished", "rejected", "error", "stopped"];
const TABS = [["log", "Log"], ["timeline", "Timeline"], ["usage", "Usage"], ["files", "Files"], ["about", "About"], ["terminal", "Terminal"]];
const FILTERS = [["", "All"], ["messages", "Messages"], ["commands", "Commands"], ["changes", "Changes"], ["bad", "Errors"], ["others", "Others"]];
const CONNECTION = { live: "live", away: "the server is away, trying again", over: "archived" };

/** Show a conversation; return an object whose `aim(event)` leads to an event. */
export function conversation({ main, signal, refused }, id, eventId) {
  const here = { aim: () => {} };
  forgetOpen();
  main.replaceChildren();
  main.classList.add("fills");
  render(html`<${View} id=${id} eventId=${eventId} signal=${signal} refused=${refused} here=${here} main=${main} />`, main);
  signal.addEventListener("abort", () => { render(null, main); main.classList.remove("fills"); });
  return here;
}

/** Return what the events say about the conversation as a whole. */
function factsOf(log, id) {
  const facts = { title: log.row?.title || "", state: log.row?.state || "loading", asked: null, tasks: null, created: null, model: log.row?.model || "", used: usage() };
  for (const event of log.events) {
    facts.used.take(event);
    switch (event.kind) {
      case "conversation.created": facts.created = event; facts.title = event.title || facts.title; facts.model ||= event.agent?.llm?.model || ""; break;
      case "conversation.changed": if (event.title) facts.title = event.title; break;
      case "observation.agent_state_changed": facts.state = event.agent_state; facts.asked = event.agent_state === "awaiting_user_confirmation" ? event.action_id : null; break;
      case "action.task_tracking": case "observation.task_tracking": if (event.task_list?.length) facts.tasks = event.task_list; break;
      case "model.reply": if ((event.service || "agent") === "agent" && event.model) facts.model = event.model; break;
    }
  }
  facts.title ||= id;
  return facts;
}

function View({ id, eventId, signal, refused, here, main }) {
  const [version, changed] = useReducer((count) => count + 1, 0);
  const [tab, setTab] = useState("log"), [filesOf, setFilesOf] = useState(0), [filter, setFilter] = useState(""), [query, setQuery] = useState(""), [sought, setSought] = useState("");
  const [hasTerminal, setHasTerminal] = useState(false), [wasTerminal, setWasTerminal] = useState(false);
  const [isTailed, setTailed] = useState(!eventId), [missing, setMissing] = useState(null), [isBusy, setBusy] = useState(false);
  const at = useRef({ aim: eventId, writing: "", isDrawing: false, focus: false, timer: 0 }).current;
  const handle = useRef({}).current, find = useRef(null), reasons = useRef(null), question = useRef(null);

  const draw = () => { if (!at.isDrawing) { at.isDrawing = true; requestAnimationFrame(() => { at.isDrawing = false; if (!signal.aborted) changed(); }); } };
  const parts = useMemo(() => ({
    delegates: tree(id, signal), fed: new Set(),
    form: composer((content, images) => post("messages", { content, ...(images.length ? { images } : {}) })),
    log: new Log(id, {
      changed: (event) => { if (event?.kind === "model.reply") at.writing = ""; if (!event || event.kind === "observation.agent_state_changed") explain(); draw(); },
      delta: (piece) => { at.writing = (at.writing + clean(piece.text || "")).slice(-20_000); draw(); },
      state: (state) => { const node = document.getElementById("connection"); node.textContent = CONNECTION[state]; node.className = state; if (state === "live") explain(); },
      problem: fail,
    }, signal),
  }), []);
  const { log } = parts;

  function fail(error) {
    if (signal.aborted) return;
    if (error.status === 404) setMissing(error); else refused(error);
  }
  useEffect(() => {
    log.open().catch(fail);
    isOffered(id, signal).then((is) => { if (is && !signal.aborted) setHasTerminal(true); });
    signal.addEventListener("abort", () => { clearTimeout(at.timer); document.getElementById("connection").textContent = ""; });
    const ticking = setInterval(() => { if (!document.hidden) changed(); }, 1_000);
    return () => clearInterval(ticking);
  }, []);

  const count = log.events.length, first = log.events[0]?.id;
  const facts = useMemo(() => factsOf(log, id), [count, first, log.row]);
  const all = useMemo(() => group(log.events), [count, first]);
  const isRest = AT_REST.has(facts.state), isEnded = ENDED.includes(facts.state);
  const items = useMemo(() => filter === "" ? all : all.filter((item) => filter === "bad" ? item.isBad : classOf(item) === filter), [all, filter]);
  const shown = at.writing && !filter ? [...items, { type: "writing", key: "writing", first: 0, last: 0, events: [], text: at.writing }] : items;
  const hits = useMemo(() => sought ? items.map((item, index) => has(item, sought) ? index : -1).filter((index) => index >= 0) : [], [items, sought]);
  const hitKeys = useMemo(() => new Set(hits.map((index) => items[index].key)), [hits]);
  const current = at.key ? items.findIndex((item) => item.key === at.key) : -1;
  const errors = useMemo(() => all.filter((item) => item.isBad).length, [all]);
  const lastStep = useMemo(() => all.findLast((item) => item.type === "step")?.key, [all]);

  for (const event of log.events) if (/delegate/.test(event.kind) && !parts.fed.has(event.id)) { parts.fed.add(event.id); parts.delegates.take(event); }
  useEffect(() => named(facts.title), [facts.title]);

  /** Lead to an item: into the middle, marked. */
  function go(index, isFocused = true) {
    if (index < 0 || index >= items.length) return;
    at.key = items[index].key;
    at.focus = isFocused;
    handle.show?.(index);
    changed();
  }
  here.aim = (event) => { at.aim = event; setFilter(""); setTab("log"); changed(); };
  useEffect(() => {
    if (!at.aim || tab !== "log") return;
    const index = items.findIndex((item) => item.first <= at.aim && at.aim <= item.last && item.events.some((event) => event.id === at.aim));
    if (index >= 0) { at.aim = 0; go(index); } else if (log.isWhole && !filter) { note(`The conversation has no event ${at.aim}.`, "bad"); at.aim = 0; }
  });
  useEffect(() => {
    if (!at.focus) return;
    const node = document.getElementById(`i${items[current]?.first}`);
    if (node) { at.focus = false; node.focus({ preventScroll: true }); }
  });
  useEffect(() => { const soon = setTimeout(() => setSought(query.trim().toLowerCase()), SEARCH_MS); return () => clearTimeout(soon); }, [query]);
  useEffect(() => { if (hits.length) go(hits.find((index) => index >= (handle.first?.() ?? 0)) ?? hits[0], false); }, [sought]);

  function end() { at.key = ""; handle.end?.(); changed(); }
  function nextHit(step) {
    if (!hits.length) return;
    const next = step > 0 ? hits.find((index) => index > current) ?? hits[0] : hits.findLast((index) => index < current) ?? hits.at(-1);
    go(next, false);
  }
  function nextError() {
    const found = items.findIndex((item, index) => index > current && item.isBad);
    const next = found >= 0 ? found : items.findIndex((item) => item.isBad);
    if (next >= 0) go(next); else note("There is no error.");
  }

  async function post(path, body) {
    try { await ask(`${place(id)}/${path}`, { method: "POST", body }); return true; } catch (error) { refused(error); return false; }
  }
  async function answer(path, body) { if (await post(path, body)) { question.current.hidden = true; explain(); } }
  async function act(path, name) {
    const reason = await askFor(name, "Reason (it stands in the log)", { action: name });
    if (reason !== null) post(path, { reason });
  }
  async function fork(from) {
    const last = log.events.at(-1)?.id || 1;
    const given = await askForAll("Fork", [{ name: "at", label: `From event (1 to ${last})`, value: String(from || last) }, { name: "model", label: "Another model, or nothing for the same" }],
      { action: "Fork", says: "A copy continues from there. This conversation does not change." });
    if (given === null) return;
    try {
      const chosen = Number(given.at), model = given.model.trim();
      const made = await ask(`${place(id)}/fork`, { method: "POST", body: { ...(chosen && chosen !== last ? { at: chosen } : {}), ...(model ? { model } : {}) } });
      location.hash = `#/c/${made.conversation_id}`;
    } catch (error) { refused(error); }
  }
  async function beside() {
    const other = await askFor("Compare with another conversation", "Its id", { value: (facts.created?.forked_from || "").split("@")[0], action: "Compare" });
    if (other?.trim()) location.hash = `#/compare/${other.trim()}/${id}`;
  }
  /** Save the events in full, the patch and the files as one ZIP; missing parts are left out. */
  async function archive() {
    setBusy(true);
    try {
      const lines = [];
      for (let after = 0; after !== null;) {
        const page = await ask(`${place(id)}/events?whole=true&after=${after}`, { signal });
        lines.push(...page.events.map((event) => `${JSON.stringify(event)}\n`));
        after = page.next_after;
      }
      const files = [[`${id}/events.jsonl`, new Blob(lines)]];
      try {
        const patch = await download(`${place(id)}/patch`);
        if (patch.size) files.push([`${id}/workspace.patch`, patch]);
        for (const one of (await ask(`${place(id)}/files`, { signal })).slice(0, MOST_FILES)) {
          if (one.kind === "link") continue;
          const content = await download(`${place(id)}/files/${encodeURIComponent(one.name)}`);
          files.push([`${id}/workspace/${one.name}${one.kind === "directory" ? ".tar" : ""}`, content]);
        }
      } catch { note("The workspace cannot be read now; the archive lacks its missing files."); }
      save(await zipped(files), `${id}.zip`);
    } catch (error) { refused(error); }
    setBusy(false);
  }

  /** Ask soon why the conversation waits; repeated calls are combined into one request. */
  function explain() {
    clearTimeout(at.timer);
    at.timer = setTimeout(async () => {
      try { if (reasons.current) await why(id, reasons.current, signal); } catch { /* the stream reports the error */ }
      if (!signal.aborted && !AT_REST.has(at.state)) at.timer = setTimeout(explain, WHY_MS);
    }, 300);
  }
  at.state = facts.state;

  /** Show the question that the user must answer, once per action. */
  useEffect(() => {
    const panel = question.current, { asked } = facts, name = String(asked ?? "");
    if (!panel) return;
    const action = log.events.find((event) => event.id === asked);
    if (panel.dataset.asked === name || (asked && !action && !log.isWhole)) return;
    panel.dataset.asked = name;
    panel.hidden = !asked;
    if (panel.hidden) panel.replaceChildren();
    else log.whole(action || { id: asked, isCut: true }).then((whole) => { if (panel.dataset.asked === name) askPerson(panel, asked, whole, answer, refused); }, refused);
  });

  function show(name) {
    if (name === "terminal") { if (!hasTerminal) return; setWasTerminal(true); }
    setFilesOf(0);
    setTab(name);
  }
  const click = (name) => document.getElementById(name)?.click();
  const KEYS = {
    j: () => go(current < 0 ? handle.first?.() ?? 0 : Math.min(items.length - 1, current + 1)), k: () => go(current < 0 ? items.length - 1 : Math.max(0, current - 1)),
    g: () => go(0), G: end,
    "/": () => { setTab("log"); find.current?.focus(); }, n: () => nextHit(1), N: () => nextHit(-1), e: nextError,
    c: () => click("confirm"), v: () => click("edit"), x: () => click("reject"), m: () => document.getElementById("message")?.focus(),
    p: () => { if (!isRest) act("pause", "Pause"); }, i: () => { if (!isRest) act("interrupt", "Interrupt"); }, r: () => { if (["paused", "error", "stopped"].includes(facts.state)) act("resume", "Resume"); },
    f: () => fork(items[current]?.last), a: () => { location.hash = `#/new/${id}`; }, ...Object.fromEntries(TABS.map(([name], number) => [String(number + 1), () => show(name)])),
  };
  useEffect(() => {
    const pressed = (event) => {
      if (isTyping(event)) {
        if (event.target === find.current && event.key === "Enter") { nextHit(event.shiftKey ? -1 : 1); event.preventDefault(); }
        if (event.target === find.current && event.key === "Escape") { setQuery(""); find.current.blur(); }
        return;
      }
      const run = Object.hasOwn(KEYS, event.key) && KEYS[event.key];
      if (run) { event.preventDefault(); run(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });

  if (missing) {
    return html`<section class="card narrow"><h1>There is no conversation ${id}</h1><p>It does not exist, was deleted, or belongs to a tenant that your key may not see.</p><p><a href="#/">All conversations</a></p></section>`;
  }
  const verb = (path, name, kind = "") => html`<button type="button" class=${kind} onClick=${() => act(path, name)}>${name}</button>`;
  const used = facts.used, numbers = log.row?.numbers || {}, isCounted = log.isWhole;
  const agent = facts.created?.agent?.name, workspace = facts.created?.workspace;
  const started = log.row?.created || facts.created?.timestamp, until = isRest ? log.events.at(-1)?.timestamp : new Date().toISOString();
  const fact = (label, value, more = {}) => value || value === 0 ? html`<span class="fact" ...${more}><span class="dim">${label}</span> <span>${value}</span></span>` : "";
  const steps = isCounted ? used.steps : numbers.iterations || "…";
  const landmarks = all.filter((item) => item.type === "user" || item.isBad || item.parts?.some(({ action }) => action.kind === "action.finish")).slice(-MOST_LANDMARKS);
  return html`<div class="work">
    <header class="head">
      <div class="bar"><h1><bdi>${facts.title}</bdi></h1><span class=${`state ${facts.state}`} id="state">${facts.state.replaceAll("_", " ")}</span><span class="grow"></span>
        <div class="acts">${isRest ? "" : [verb("pause", "Pause"), verb("interrupt", "Interrupt")]}${["paused", "error", "stopped"].includes(facts.state) ? verb("resume", "Resume", "main") : ""}${isEnded ? "" : verb("cancel", "Cancel", "danger")}
          <details class="menu" onClick=${(event) => { if (event.target.localName === "button" || event.target.localName === "a") event.currentTarget.open = false; }}><summary>More</summary><div class="card">
            <button type="button" onClick=${() => fork(items[current]?.last)}>Fork…</button><a class="button" href=${`#/new/${id}`}>Repeat…</a><button type="button" onClick=${beside}>Compare…</button>
            <button type="button" disabled=${isBusy} onClick=${archive}>Download</button><button type="button" onClick=${help}>Keys</button></div></details></div></div>
      <div class="facts">${fact("Model", facts.model)}${fact("Agent", agent)}${fact("Workspace", workspace?.path || workspace?.source?.url || (facts.created ? "empty" : ""))}
        ${started ? fact("Time", duration((new Date(until) - new Date(started)) / 1000)) : ""}${fact("Steps", steps)}
        ${fact("Cost", isCounted ? costText(used.cost, used.isWhole) : costText(numbers.cost_usd || 0, numbers.has_unknown_cost !== "1"), { id: "spent", title: "With its delegates" })}
        ${fact("Tokens", isCounted ? used.tokens.toLocaleString("en") : "…")}
        ${facts.created?.forked_from ? html`<span class="fact"><span class="dim">Fork of</span> <a href=${`#/c/${facts.created.forked_from}`}>${facts.created.forked_from}</a></span>` : ""}
        ${facts.created?.parent ? html`<span class="fact"><span class="dim">Delegate of</span> <a href=${`#/c/${facts.created.parent.conversation_id || facts.created.parent.id || ""}`}>its parent</a></span>` : ""}<span class="fact mono dim">${id}</span></div>
      <div class="bar tools"><div class="tabs" role="tablist" aria-label="Views">${TABS.filter(([name]) => name !== "terminal" || hasTerminal).map(([name, label]) => html`<button type="button" role="tab" id=${`tab-${name}`} class=${name === "about" ? "narrow-only" : ""} aria-selected=${tab === name ? "true" : "false"} aria-controls="view" onClick=${() => show(name)}>${label}</button>`)}</div>
        <span class="grow"></span>
        ${tab === "log" ? html`<div class="finder"><input type="search" id="find" ref=${find} aria-label="Search in the log" placeholder="Search  /" value=${query} onInput=${(event) => setQuery(event.target.value)} />
          ${sought ? html`<span class="dim" role="status" id="hits">${hits.length ? `${hits.indexOf(current) + 1 || "–"} of ${hits.length}` : "nothing found"}</span><button type="button" class="icon" aria-label="Previous match" onClick=${() => nextHit(-1)}>↑</button><button type="button" class="icon" aria-label="Next match" onClick=${() => nextHit(1)}>↓</button>` : ""}
          <select aria-label="Show" id="filter" value=${filter} onChange=${(event) => { setFilter(event.target.value); at.key = ""; }}>${FILTERS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>
          ${errors ? html`<button type="button" id="next-error" class="danger" title="Next error (e)" onClick=${nextError}>${errors} ${errors === 1 ? "error" : "errors"}</button>` : ""}</div>` : ""}</div>
    </header>
    <div class=${`body tab-${tab}`} id="view" role="tabpanel" aria-labelledby=${`tab-${tab}`}>
      <div class="pane">
        ${tab === "timeline" ? html`<${Timeline} id=${id} items=${all} events=${log.events} signal=${signal} onOpen=${(event) => here.aim(event)} />` : tab === "usage" ? html`<${Usage} events=${log.events} items=${all} />` : tab === "files" ? html`<${Files} id=${id} signal=${signal} since=${filesOf} key=${filesOf} />` : tab === "log" ? html`
        <${List} count=${shown.length} keyOf=${(index) => shown[index]?.key ?? index} estimate=${150} handle=${handle} isTailed=${isTailed || !at.aim} onTail=${setTailed} tabindex="0"
          role="log" aria-label="Steps" aria-busy=${count ? "false" : "true"} class="virtual timeline"
          row=${(index) => { const item = shown[index]; return html`<${Card} log=${log} item=${item} isOver=${isRest || item.key !== lastStep} isCurrent=${item.key === at.key} isHit=${hitKeys.has(item.key)} onFork=${fork} onFiles=${(event) => { setFilesOf(event); setTab("files"); }} />`; }} />
        ${!count ? html`<p class="dim empty" role="status">Reading the log…</p>` : !shown.length ? html`<p class="dim empty">No step is of this kind. <button type="button" class="quiet" onClick=${() => setFilter("")}>Show all</button></p>` : ""}
        ${!isTailed && count ? html`<div class="ender"><button type="button" class="to-end" onClick=${end}>To the end ↓</button></div>` : ""}` : ""}
        ${wasTerminal ? html`<${Terminal} id=${id} signal=${signal} isShown=${tab === "terminal"} />` : ""}
        <div class="foot" hidden=${tab !== "log"}><section class="card question" aria-live="polite" ref=${question} hidden></section><${Nodes} make=${() => parts.form} of=${[]} /></div>
      </div>
      <aside aria-label="About the conversation">
        <section class="card" ref=${reasons}></section>
        ${facts.tasks ? html`<section class="card"><h2>Tasks</h2><${Nodes} make=${() => tasks(facts.tasks)} of=${[facts.tasks]} /></section>` : ""}
        <section class="card" hidden=${!parts.delegates.size}><h2>Delegates</h2><${Nodes} make=${() => parts.delegates.node} of=${[]} /></section>
        ${landmarks.length ? html`<section class="card"><h2>Outline</h2><ol class="outline">${landmarks.map((item) => html`<li class=${item.isBad ? "bad" : item.type} key=${item.key}><a href=${`#/c/${id}@${item.first}`}>${lineOf(item).slice(0, 120)}</a></li>`)}</ol></section>` : ""}
      </aside>
    </div></div>`;
}
