// A new conversation: its task, and what it runs with. It may repeat another one's.

import { ask, place } from "./api.js";
import { named } from "./dom.js";
import { html, render, useEffect, useState } from "./ui.js";

const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
const DRAFT = "deckhands.draft";
const EMPTY = { task: "", title: "", model: "", agent: "", workspace: "", iterations: "", budget: "", minutes: "", labels: "", start: "", answers: true, cron: "", name: "", reason: "" };
/** The fields that a server's answer can name, and the field of the form that has them. */
const FIELDS = { task: "task", title: "title", model: "model", agent: "agent", workspace: "workspace", max_iterations: "iterations", max_budget_usd: "budget", max_seconds: "minutes", labels: "labels", not_before: "start", schedule: "cron", cron: "cron" };

export function begin({ main, signal, refused }, source) {
  named(source ? "Repeat a conversation" : "New conversation");
  main.replaceChildren();
  render(html`<${Form} source=${source} signal=${signal} refused=${refused} />`, main);
  signal.addEventListener("abort", () => render(null, main));
}

/** Return the form's fields from the first events of another conversation. */
async function repeated(id, signal) {
  const { events } = await ask(`${place(id)}/events?limit=20&whole=true`, { signal });
  const created = events.find((one) => one.kind === "conversation.created") || {}, first = events.find((one) => one.kind === "action.message" && one.source === "user");
  const limits = created.limits || {}, { source } = created.workspace || {};
  return { ...EMPTY, task: first?.content || "", title: created.title || "", model: created.agent?.llm?.model || "", agent: created.agent?.name || "",
    workspace: created.workspace?.path || (source?.url ? `${source.url.startsWith("git+") ? "" : "git+"}${source.url}${source.ref ? `#${source.ref}` : ""}` : ""), iterations: limits.max_iterations || "", budget: limits.max_budget_usd || "",
    minutes: limits.max_seconds ? limits.max_seconds / 60 : "", labels: Object.entries(created.labels || {}).map(([name, value]) => `${name}=${value}`).join(" "), answers: created.headless === false };
}

/** Return the task of the form's fields, as the server takes it. */
function taskOf(fields) {
  const limits = { ...(fields.iterations ? { max_iterations: Number(fields.iterations) } : {}), ...(fields.budget ? { max_budget_usd: Number(fields.budget) } : {}), ...(fields.minutes ? { max_seconds: 60 * Number(fields.minutes) } : {}) };
  const labels = Object.fromEntries(fields.labels.split(/[ ,]+/).filter(Boolean).map((one) => { const [name, ...value] = one.split("="); return [name, value.join("=")]; }));
  return { task: fields.task, headless: !fields.answers, ...Object.fromEntries(["title", "model", "agent", "workspace"].map((name) => [name, String(fields[name]).trim()]).filter(([, value]) => value)),
    ...(Object.keys(limits).length ? { limits } : {}), ...(Object.keys(labels).length ? { labels } : {}), ...(fields.start ? { not_before: new Date(fields.start).toISOString() } : {}) };
}

function draft() {
  try { return { ...EMPTY, ...JSON.parse(sessionStorage.getItem(DRAFT) || "{}") }; } catch { return EMPTY; }
}

function Form({ source, signal, refused }) {
  const [fields, setFields] = useState(source ? null : draft), [offers, setOffers] = useState({ models: [], agents: [], defaults: [] }), [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null), [isRecurring, setRecurring] = useState(false);
  useEffect(() => {
    if (source) repeated(source, signal).then(setFields, (error) => { if (error.status === 404) setFields(EMPTY); refused(error); });
    Promise.all([ask("/models", { signal }), ask("/agents", { signal })]).then(([models, agents]) => setOffers({ models: models.names, defaults: models.defaults, agents: agents.names }), () => { /* both may be typed */ });
  }, [source]);
  if (!fields) return html`<p class="dim empty">Reading the conversation…</p>`;
  const set = (name, value) => { const next = { ...fields, [name]: value }; setFields(next); setProblem(null); if (!source) sessionStorage.setItem(DRAFT, JSON.stringify(next)); };

  async function send(event) {
    event.preventDefault();
    if (isBusy || !fields.task.trim()) return;
    setBusy(true);
    try {
      const task = taskOf(fields);
      if (isRecurring) {
        await ask(`/schedules/${encodeURIComponent(fields.name.trim())}`, { method: "PUT", body: { cron: fields.cron.trim(), zone: ZONE, request: { ...task, not_before: undefined }, reason: fields.reason.trim() } });
        sessionStorage.removeItem(DRAFT);
        location.hash = "#/";
        return;
      }
      const made = await ask("/conversations", { method: "POST", body: task });
      sessionStorage.removeItem(DRAFT);
      location.hash = `#/c/${made.conversation_id}`;
    } catch (error) {
      if (error.status === 401) refused(error);
      else setProblem({ text: error.message, at: Object.keys(FIELDS).find((name) => new RegExp(`\\b${name}\\b`).test(error.message)) });
    } finally { setBusy(false); }
  }

  const bad = (name) => problem && FIELDS[problem.at] === name ? { "aria-invalid": "true", "aria-describedby": "form-problem" } : {};
  const input = (name, label, more = {}, says = "") => html`<div class="field"><label for=${`new-${name}`}>${label}</label><input id=${`new-${name}`} value=${fields[name]} onInput=${(event) => set(name, event.target.value)} autocomplete="off" ...${more} ...${bad(name)} />${says ? html`<small class="dim">${says}</small>` : ""}</div>`;
  const models = [...new Set([...(fields.model && !offers.models.includes(fields.model) ? [fields.model] : []), ...offers.models])];
  return html`<form class="begin" onSubmit=${send} onKeyDown=${(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.requestSubmit(); }}>
    <div class="bar"><h1>${source ? "Repeat a conversation" : "New conversation"}</h1></div>
    <section class="card"><div class="field"><label for="new-task">Task</label><textarea id="new-task" rows="8" required maxlength="100000" ref=${(node) => node && !node.dataset.met && (node.dataset.met = "1", node.focus())} placeholder="What is to be done, and how to tell that it is done" value=${fields.task} onInput=${(event) => set("task", event.target.value)} ...${bad("task")}></textarea></div>
      <div class="fields"><div class="field"><label for="new-model">Model</label><select id="new-model" value=${fields.model} onChange=${(event) => set("model", event.target.value)} ...${bad("model")}><option value="">${offers.defaults.length ? `The workers' default (${offers.defaults.join(", ")})` : "The workers' default"}</option>${models.map((name) => html`<option value=${name} selected=${name === fields.model}>${name}</option>`)}</select></div>
        <div class="field"><label for="new-agent">Agent</label><input id="new-agent" list="agents" value=${fields.agent} placeholder="CodeActAgent" autocomplete="off" onInput=${(event) => set("agent", event.target.value)} ...${bad("agent")} /><datalist id="agents">${offers.agents.map((name) => html`<option value=${name}></option>`)}</datalist></div>
        ${input("workspace", "Workspace", { placeholder: "empty directory" }, "A directory of the tool workers, or git+https://…#REF")}
        ${input("title", "Title", { maxlength: 200, placeholder: "the first line of the task" })}</div></section>
    <section class="card"><h2>Limits</h2><div class="fields">${input("iterations", "Steps", { type: "number", min: 1, placeholder: "500" })}${input("budget", "Cost in $", { type: "number", min: 0, step: "any", placeholder: "none" })}${input("minutes", "Minutes", { type: "number", min: 0, step: "any", placeholder: "none" })}</div>
      <label class="check"><input type="checkbox" id="new-answers" checked=${fields.answers} onChange=${(event) => set("answers", event.target.checked)} /> The agent may ask me questions</label></section>
    <section class="card"><h2>Labels and time</h2><div class="fields">${input("labels", "Labels", { placeholder: "team=billing ticket=4711" })}${isRecurring ? "" : input("start", "Start no earlier than", { type: "datetime-local" })}
        ${isRecurring ? [input("name", "Name of the schedule", { required: true, pattern: "[A-Za-z0-9_.-]{1,64}", placeholder: "nightly" }), input("cron", "Times (cron)", { required: true, placeholder: "0 6 * * 1-5" }, `Minute, hour, day, month, day of the week; ${ZONE}`), input("reason", "Reason", { required: true, maxlength: 500 }, "It stands in the record of operations")] : ""}</div>
      <label class="check"><input type="checkbox" id="new-recurring" checked=${isRecurring} onChange=${(event) => setRecurring(event.target.checked)} /> Start it again and again, by a schedule</label></section>
    ${problem ? html`<p class="problem" id="form-problem" role="alert">${problem.text}</p>` : ""}
    <div class="row end"><a class="button quiet" href=${source ? `#/c/${source}` : "#/"}>Cancel</a><button class="main" id="start" disabled=${isBusy}>${isRecurring ? "Add the schedule" : "Start"}</button></div></form>`;
}
