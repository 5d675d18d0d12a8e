// One card for each group of events: what was said, the calls with their results, and what it cost.

import { ask, place } from "./api.js";
import { Code, Diff, languageOfPath, Output } from "./code.js";
import { clean, costText, duration, el, time, usd } from "./dom.js";
import { picture, tasks } from "./events.js";
import { explanationOf, reasonOf } from "./errors.js";
import { nodesOf } from "./markdown.js";
import { callsIn, lineOf, lineOfCall, nameOf, outcomeOf, QUIET, saidIn } from "./steps.js";
import { Fold, html, Nodes, useEffect, useState } from "./ui.js";

const MOST_IMAGES = 8, IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;
const PICTURED = ["image_urls", "set_of_marks", "screenshot"];

export const Markdown = ({ text }) => html`<${Nodes} class="said md" make=${() => nodesOf(text)} of=${[text]} />`;
const Time = ({ at }) => html`<${Nodes} name="span" make=${() => [time(at)].filter(Boolean)} of=${[at]} />`;
const seconds = (from, to) => (new Date(to) - new Date(from)) / 1000;
const loader = (log, event, field) => event.isCut ? async () => { try { return (await log.whole(event))[field]; } catch { return null; } } : null;
/** Return the loader of a text only if it is that text which was cut. */
const rest = (log, event, field) => typeof event[field] === "string" && (event[field].length >= 8_000 || event.blobs?.[field]) ? loader(log, event, field) : null;

/** Show the pictures of an event. Those of other servers are named only: fetching one would reveal the reader. */
function Pictures({ log, event }) {
  const [whole, setWhole] = useState(null);
  const isPictured = PICTURED.some((name) => event[name] && event[name].length);
  useEffect(() => { if (isPictured && event.isCut) log.whole(event).then(setWhole, () => {}); }, [event.id]);
  if (!isPictured) return null;
  const shown = event.isCut ? whole : event;
  if (!shown) return html`<p class="dim">The picture is on its way…</p>`;
  const found = [...(shown.image_urls || []), shown.set_of_marks || shown.screenshot || ""].filter(Boolean).slice(0, MOST_IMAGES);
  return html`<${Nodes} class="shots" of=${[event.id, found.length]} make=${() => found.map((source) => IMAGE.test(source)
    ? picture(source, event.url ? `The page ${event.url}` : `A picture in event ${event.id}`) : el("p", { class: "dim mono" }, `picture: ${source.slice(0, 200)}`))} />`;
}

function Badge({ kind, text }) {
  return text ? html`<span class=${`badge ${kind}`}>${text}</span>` : null;
}

/** Show one call: its name, what it was given, and its results. */
function Call({ log, part, isOver }) {
  const { action, results } = part, last = results.at(-1), id = `${log.id}-${action.id}`;
  const outcome = outcomeOf(part, isOver), took = last ? seconds(action.timestamp, last.timestamp) : 0;
  const isCommand = action.kind === "action.run";
  return html`<section class="call" aria-label=${lineOfCall(action)}>
    <header><span class="verb">${nameOf(action)}</span>${action.path || action.url ? html`<span class="mono">${action.path || action.url}</span>` : ""}
      ${action.kind === "action.delegate" ? html`<strong>${action.agent}</strong>` : ""}${action.kind.startsWith("action.call_tool") ? html`<span class="mono">${action.name || ""}</span>` : ""}
      <span class="grow"></span>${took >= 0.1 ? html`<span class="dim">${duration(took)}</span>` : ""}<${Badge} kind=${outcome[0]} text=${outcome[1]} /></header>
    ${isCommand ? html`<pre class="command" tabindex=${action.command.split("\n", 20).length > 15 ? 0 : undefined}><span class="prompt" aria-hidden="true">$ </span>${action.command}</pre>` : html`<${Given} log=${log} action=${action} results=${results} id=${id} />`}
    ${results.filter((one) => !QUIET.has(one.kind)).map((one) => html`<${Result} log=${log} event=${one} action=${action} id=${`${id}-${one.id}`} key=${one.id} />`)}
  </section>`;
}

/** Show what a call was given. */
function Given({ log, action, results, id }) {
  switch (action.kind) {
    case "action.finish": case "action.read": return null;
    case "action.task_tracking": return html`<${Nodes} make=${() => tasks(action.task_list || [])} of=${[action.id]} />`;
    case "action.delegate": return html`<${Markdown} text=${action.inputs?.task || ""} />`;
    case "action.run_ipython": return html`<${Code} text=${action.code} language="python" class="command" />`;
    case "action.browse": return null;
    case "action.browse_interactive": return html`<${Code} text=${action.browser_actions} language="python" class="command" />`;
    case "action.write": return html`<${Output} id=${id} text=${action.content} language=${languageOfPath(action.path)} loadWhole=${rest(log, action, "content")} />`;
    case "action.apply_patch": return html`<${Output} id=${id} text=${action.patch} language="diff" loadWhole=${rest(log, action, "patch")} />`;
    case "action.edit": {
      if (results.some((one) => one.diff || one.kind === "observation.edit")) return null;
      const text = [...(action.old_str || "").split("\n").map((line) => `-${line}`), ...(action.new_str || "").split("\n").map((line) => `+${line}`)];
      return action.old_str || action.new_str ? html`<${Diff} id=${id} path=${action.path} text=${`@@ -1,${(action.old_str || "").split("\n").length} +1,${(action.new_str || "").split("\n").length} @@\n${text.join("\n")}`} />`
        : html`<${Output} id=${id} text=${action.file_text || action.content || ""} language=${languageOfPath(action.path)} loadWhole=${rest(log, action, "file_text")} />`;
    }
    default: {
      const given = action.arguments ?? action.inputs;
      const text = given && typeof given === "object" ? JSON.stringify(given, null, 2) : action.command || action.code || action.content || action.query || action.pattern || "";
      return text ? html`<${Code} text=${String(text)} language=${given ? "json" : ""} class="command" />` : null;
    }
  }
}

/** Show a result. */
function Result({ log, event, action, id }) {
  const more = rest(log, event, "content");
  const body = () => {
    switch (event.kind) {
      case "observation.run": {
        const explanation = explanationOf(event);
        return html`<${Output} id=${id} text=${event.content} loadWhole=${more} />${explanation ? html`<p class="explanation bad">${explanation}</p>` : ""}`;
      }
      case "observation.edit": return event.diff ? html`<${Diff} id=${id} text=${event.diff} path=${event.path} />` : html`<${Output} id=${id} text=${event.content} loadWhole=${more} />`;
      case "observation.read": return html`<${Output} id=${id} text=${event.content} language=${languageOfPath(event.path)} loadWhole=${more} />`;
      case "observation.write": return null;
      case "observation.error": return html`<pre class="output problem">${event.content}</pre>`;
      case "observation.user_rejected": return html`<p class="explanation bad">${event.content || "A user rejected it."}</p>`;
      case "observation.delegate": return html`<${Markdown} text=${event.content} />`;
      case "observation.browse": return event.content ? html`<${Output} id=${id} text=${event.content} loadWhole=${more} />` : null;
      default: return event.content ? html`<${Output} id=${id} text=${event.content} loadWhole=${more} />` : null;
    }
  };
  return html`<div class="result">${body()}${event.conversation_id && event.kind === "observation.delegate" ? html`<p><a href=${`#/c/${event.conversation_id}`}>Open the delegate's conversation</a></p>` : ""}<${Pictures} log=${log} event=${event} /></div>`;
}

/** Show the events that a group consists of, each with all its fields. */
function Raw({ log, events }) {
  return html`<ol class="raw">${events.map((event) => html`<li key=${event.id}><${Fold} id=${`${log.id}-raw-${event.id}`} label=${html`<span class="at">${event.id}</span> ${nameOf(event)} <span class="dim">${event.kind}</span>`}>
    ${() => html`<${RawEvent} log=${log} event=${event} />`}<//><a class="dim" href=${`#/c/${log.id}@${event.id}`}>Link</a></li>`)}</ol>`;
}
function RawEvent({ log, event }) {
  const [shown, setShown] = useState(event);
  useEffect(() => { log.whole(event).then(setShown, () => {}); }, [event.id]);
  const { isCut, ...fields } = shown;
  return html`<${Output} id=${`${log.id}-json-${event.id}`} text=${JSON.stringify(fields, null, 2)} language="json" />`;
}

/** Show the conversation as it was after an event. */
function StateAt({ log, event }) {
  const [found, setFound] = useState(null), [problem, setProblem] = useState("");
  useEffect(() => { ask(`${place(log.id)}?at=${event}`, { signal: log.signal }).then(({ summary }) => setFound(summary), (error) => setProblem(error.message)); }, [event]);
  if (problem) return html`<p class="bad">${problem}</p>`;
  if (!found) return html`<p class="dim">Reading…</p>`;
  const tokens = found.prompt_tokens + found.completion_tokens;
  const facts = [["State", html`<span class=${`state ${found.state}`}>${found.state.replaceAll("_", " ")}</span>`], ["Title", found.title], ["Agent", found.agent], ["Model", found.model], ["Steps", found.iterations], ["Cost", costText(found.cost_usd, !found.has_unknown_cost)], ["Tokens", tokens.toLocaleString("en")],
    ["Time", duration(found.duration_seconds)], ["Workspace", found.workspace], ["Labels", Object.entries(found.labels).map(([name, value]) => `${name}=${value}`).join(" ")], ["Waits for the action", found.asked_id], ["Error", found.last_error], ["Last message", found.message]];
  return html`<dl class="state-at">${facts.filter(([, value]) => value || value === 0).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

/** Show the prompt of a model call, which the server makes again from the log. */
function Prompt({ log, event }) {
  const [found, setFound] = useState(null), [problem, setProblem] = useState("");
  useEffect(() => { ask(`${place(log.id)}/prompt?at=${event}`, { signal: log.signal }).then(setFound, (error) => setProblem(error.message)); }, [event]);
  if (problem) return html`<p class="bad">${problem}</p>`;
  if (!found) return html`<p class="dim">Making it again…</p>`;
  const messages = found.messages.map((one, number) => html`<li key=${number}><strong>${one.role}</strong> <span class="mono">${one.name}</span>
    ${one.content.map((text, part) => html`<${Output} id=${`${log.id}-prompt-${event}-${number}-${part}`} text=${text} />`)}
    ${one.tool_calls.map((call) => html`<${Code} text=${`${call.name} ${call.arguments}`} language="json" class="command" />`)}</li>`);
  return html`<p class="dim">${found.messages.length} messages for ${found.model || "the workers' model"}${found.tools.length ? `; tools: ${found.tools.join(", ")}` : ""}</p><ol class="prompt-at">${messages}</ol>`;
}

const numberOf = (log, item) => html`<a class="number" href=${`#/c/${log.id}@${item.first}`} title="Link to this place">${item.first === item.last ? item.first : `${item.first}–${item.last}`}</a>`;

function Costs({ reply }) {
  if (!reply) return null;
  const used = reply.usage || {}, parts = [];
  if (reply.model) parts.push(reply.model);
  parts.push(`${((used.prompt_tokens || 0) + (used.completion_tokens || 0)).toLocaleString("en")} tokens`);
  if (reply.cost_usd !== undefined && reply.cost_usd !== null) parts.push(usd(reply.cost_usd));
  if (reply.latency_seconds) parts.push(duration(reply.latency_seconds));
  return html`<span class="dim costs" title=${`${(used.prompt_tokens || 0).toLocaleString("en")} tokens in, ${(used.cache_read_tokens || 0).toLocaleString("en")} of them from the cache; ${(used.completion_tokens || 0).toLocaleString("en")} out`}>${parts.join(" · ")}</span>`;
}

const thinkingOf = (reply) => (reply?.thinking_blocks || []).map((one) => one.thinking || one.text || "").filter(Boolean).join("\n\n");

/** Show a group. `isOver` says that no result of it is to come; `onFork` and `onFiles` get the event to fork at, or to show the files of. */
export function Card({ log, item, isOver, isCurrent, isHit, onFork, onFiles }) {
  if (item.type === "writing") return html`<article class="item step writing" aria-label="The model writes"><header><span class="badge live">the model writes</span></header><pre class="output">${item.text}</pre></article>`;
  const attributes = { id: `i${item.first}`, tabindex: -1, "data-first": item.first, "data-last": item.last, "aria-label": `${item.type === "step" ? `Step ${item.number || ""}` : item.type}: ${lineOf(item)}` };
  const classes = `${item.isBad ? " bad" : ""}${isCurrent ? " current" : ""}${isHit ? " hit" : ""}`;
  const foot = html`<footer><${Fold} id=${`${log.id}-events-${item.key}`} label=${item.events.length === 1 ? "All fields" : `${item.events.length} events`}>${() => html`<${Raw} log=${log} events=${item.events} />`}<//>
    <${Fold} id=${`${log.id}-state-${item.key}`} label="State then">${() => html`<${StateAt} log=${log} event=${item.last} />`}<//>
    ${item.reply && item.first > 1 ? html`<${Fold} id=${`${log.id}-prompt-${item.key}`} label="Prompt">${() => html`<${Prompt} log=${log} event=${item.first - 1} />`}<//>` : ""}
    <span class="grow"></span>${item.parts?.length ? html`<button type="button" class="quiet" onClick=${() => onFiles(item.last)}>Files then</button>` : ""}<button type="button" class="quiet" onClick=${() => onFork(item.last)}>Fork here</button></footer>`;
  const event = item.events[0];
  switch (item.type) {
    case "user": return html`<article class=${`item user${classes}`} ...${attributes}><header>${numberOf(log, item)}<strong>You</strong><span class="grow"></span><${Time} at=${event.timestamp} /></header>
      <${Markdown} text=${event.content} /><${Pictures} log=${log} event=${event} />${foot}</article>`;
    case "quiet": return html`<article class=${`item quiet${classes}`} ...${attributes}><${Fold} id=${`${log.id}-quiet-${item.key}`} label=${html`<span class="number">${item.first === item.last ? item.first : `${item.first}–${item.last}`}</span> ${lineOf(item)}`}>${() => html`<${Raw} log=${log} events=${item.events} />`}<//></article>`;
    case "notice": return html`<article class=${`item notice-row${classes}`} ...${attributes}><header>${numberOf(log, item)}<strong>${noticeTitle(event)}</strong><span class="grow"></span><${Time} at=${event.timestamp} /></header><${Notice} log=${log} event=${event} />${foot}</article>`;
  }
  const calls = callsIn(item), said = saidIn(item), thinking = thinkingOf(item.reply), finish = item.parts.some(({ action }) => action.kind === "action.finish");
  return html`<article class=${`item step${classes}`} ...${attributes}>
    <header>${numberOf(log, item)}<strong>${finish ? "Finished" : item.number ? `Step ${item.number}` : "Step"}</strong><span class="grow"></span><${Costs} reply=${item.reply} /><${Time} at=${event.timestamp} /></header>
    ${thinking ? html`<${Fold} id=${`${log.id}-thinking-${item.key}`} class="thinking" label="Reasoning">${() => html`<${Markdown} text=${thinking} />`}<//>` : ""}
    ${said.map((one) => html`<${Markdown} text=${one.text} key=${one.event.id} />`)}
    ${said.map((one) => html`<${Pictures} log=${log} event=${one.event} key=${`p${one.event.id}`} />`)}
    ${calls.filter(({ action }) => action.kind !== "action.finish").map((part) => html`<${Call} log=${log} part=${part} isOver=${isOver} key=${part.action.id} />`)}
    ${item.parts.filter(({ action }) => action.kind === "action.finish").flatMap(({ results }) => results).filter((one) => !QUIET.has(one.kind)).map((one) => html`<${Result} log=${log} event=${one} id=${`${log.id}-${one.id}`} key=${one.id} />`)}
    ${!calls.length && !said.length && !item.parts.length ? html`<p class="dim none">${item.reply?.tool_calls?.length ? `calls ${item.reply.tool_calls.map((one) => one.name || one.function?.name || "a tool").join(", ")}` : "an empty reply"}</p>` : ""}
    ${foot}</article>`;
}

function noticeTitle(event) {
  if (event.kind === "observation.agent_state_changed") return clean(event.agent_state).replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());
  if (event.kind === "conversation.operator_acted") return `${event.author}: ${event.action}`;
  if (event.kind === "model.switched") return `The model is now ${event.model}`;
  return nameOf(event);
}

function Notice({ log, event }) {
  if (event.kind === "observation.agent_state_changed") return event.reason ? html`<p class=${event.agent_state === "error" ? "bad" : ""}>${reasonOf(event)}</p>` : null;
  if (event.kind === "conversation.delegate_ended") return html`<p><a href=${`#/c/${event.conversation_id}`}>${clean(event.agent_state).replaceAll("_", " ")}</a> <span class="dim">${usd(event.cost_usd)}</span></p><${Markdown} text=${event.content} />`;
  if (event.kind.startsWith("observation.") && !event.kind.startsWith("observation.error")) return html`${event.path || event.url ? html`<p class="mono">${event.path || event.url}</p>` : ""}<${Result} log=${log} event=${event} id=${`${log.id}-${event.id}`} />`;
  const text = event.reason || event.content || event.summary || "";
  return html`${event.path || event.url ? html`<p class="mono">${event.path || event.url}</p>` : ""}${event.retry_at ? html`<p class="dim">It is tried again at ${new Date(event.retry_at).toLocaleTimeString()}.</p>` : ""}
    ${text ? html`<${Output} id=${`${log.id}-${event.id}`} text=${text} loadWhole=${rest(log, event, "content")} />` : ""}<${Pictures} log=${log} event=${event} />`;
}
