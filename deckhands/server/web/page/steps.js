// Events in the groups that a reader thinks in: a step has the model's reply, its calls and their results.

import { explanationOf, reasonOf } from "./errors.js";

export const QUIET = new Set(["model.admitted", "action.system", "action.recall", "observation.recall", "observation.null", "observation.think", "conversation.begun",
  "conversation.created", "action.survey", "observation.survey", "action.change_agent_state", "action.save_progress", "observation.save_progress",
  "action.digest_workspace", "observation.workspace_digest", "action.open_workspace", "observation.workspace_opened", "action.null", "observation.success",
  "observation.task_tracking", "conversation.confirmation_reminder"]);
const AT_REST = new Set(["error", "stopped", "paused", "rejected"]);
const BAD = new Set(["observation.error", "model.failed", "observation.workspace_failed", "observation.outcome_unknown", "observation.events_lost"]);
const ANSWERED = /run|edit|read|write|browse|patch|tool|search|execute|acp/;
const SPOKEN = new Set(["action.message", "action.think"]);

export const NAMES = {
  "action.message": "Message", "action.run": "Command", "observation.run": "Output", "action.think": "Thought", "action.finish": "Finished", "action.reject": "Refused",
  "action.edit": "Edit", "observation.edit": "Edited", "action.read": "Read", "observation.read": "File", "action.write": "Write", "action.delegate": "Delegate",
  "observation.delegate": "Delegate's result", "model.reply": "Reply", "model.failed": "The model call failed", "model.deferred": "The model call waits",
  "observation.agent_state_changed": "State", "observation.error": "Error", "action.task_tracking": "Task list", "observation.task_tracking": "Task list",
  "action.condensation": "Condensation", "conversation.created": "Created", "conversation.operator_acted": "Operator", "observation.browse": "Browser",
  "action.browse": "Browser", "action.browse_interactive": "Browser", "action.run_ipython": "Python", "observation.run_ipython": "Python", "action.search_code": "Search",
  "action.apply_patch": "Patch", "action.call_tool": "Tool", "action.call_tool_mcp": "Tool", "action.system": "System prompt", "observation.outcome_unknown": "Outcome unknown",
  "conversation.delegate_ended": "A delegate ended", "observation.user_rejected": "Rejected", "model.switched": "Another model", "model.admitted": "Model call admitted",
  "observation.workspace_failed": "The workspace failed", "observation.interrupted": "Interrupted", "observation.rolled_back": "Rolled back",
};
export const nameOf = (event) => NAMES[event.kind] || event.kind.replace(/^(action|observation|conversation|model)\./, "").replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());

/** Return how a call ended: its class and its words; `isOver` says that the conversation has continued or rests. */
export function outcomeOf(part, isOver) {
  const { action, results } = part, last = results.findLast((one) => one.kind === "observation.run") || results.at(-1);
  if (results.some((one) => one.kind === "observation.user_rejected") || action.confirmation_state === "rejected") return ["bad", "rejected, not run"];
  if (!last && !ANSWERED.test(action.kind)) return ["", ""];  // delegates are listed with their state
  if (!last) return action.confirmation_state === "awaiting_confirmation" ? ["warm", "waits for confirmation"] : isOver ? ["bad", "no result, not run to its end"] : ["live", "running"];
  if (last.kind === "observation.outcome_unknown") return ["bad", "outcome unknown"];
  if (last.kind === "observation.error") return ["bad", "error"];
  if (last.kind !== "observation.run") return last.kind === "observation.finish_refused" ? ["bad", "refused"] : ["", ""];
  const why = explanationOf(last), code = last.metadata?.exit_code ?? -1;
  if (/not executed|not run/i.test(why)) return ["bad", "not run"];
  if (/timed out|no new output/i.test(why)) return ["bad", "timed out"];
  if (/cancel|interrupt/i.test(why)) return ["bad", "cancelled"];
  if (why) return ["warm", "did not simply end"];
  if (code === -1) return ["warm", "no exit code"];
  return code ? ["bad", `exit code ${code}`] : ["good", "exit code 0"];
}

/** Return the groups of events, in order. Each has `key`, `type`, `first`, `last` and `events`. */
export function group(events) {
  const items = [], parts = new Map();
  let open = null, number = 0;
  const push = (type, event, more = {}) => { const made = { type, key: `${type}-${event.id}`, first: event.id, last: event.id, events: [event], isBad: false, ...more }; items.push(made); return made; };
  const grow = (item, event) => { item.events.push(event); if (event.id > item.last) item.last = event.id; };
  for (const event of events) {
    const { kind } = event, cause = parts.get(event.cause_id);
    if (cause && kind.startsWith("observation.")) cause.results.push(event);
    if (kind === "model.reply" && (event.service || "agent") === "agent") {
      number += 1;
      open = push("step", event, { reply: event, parts: [], number: event.iteration || number });
    } else if (kind === "action.message" && event.source === "user") {
      open = null;
      push("user", event);
    } else if (kind === "observation.agent_state_changed" && (event.reason || AT_REST.has(event.agent_state))) {
      push("notice", event, { isBad: event.agent_state === "error" });
    } else if (kind === "conversation.operator_acted" && open && ["confirm", "reject"].includes(event.action)) grow(open, event);
    else if (QUIET.has(kind) || kind === "observation.agent_state_changed" || kind === "model.reply") {
      const target = cause?.item || open || (items.at(-1)?.type === "quiet" ? items.at(-1) : null);
      if (target) grow(target, event); else push("quiet", event);
    } else if (kind.startsWith("action.")) {
      open ??= push("step", event, { reply: null, parts: [], number: 0 });
      if (open.first !== event.id || open.reply) grow(open, event);
      // A confirmed action is in the log again, as it runs; the card shows it once.
      let part = open.parts.find((one) => one.action.kind === kind && one.action.confirmation_state === "awaiting_confirmation" && !one.results.length);
      if (part) part.action = event;
      else { part = { action: event, results: [], item: open }; open.parts.push(part); }
      parts.set(event.id, part);
    } else if (cause) {
      grow(cause.item, event);
      if (outcomeOf(cause, false)[0] === "bad") cause.item.isBad = true;
    } else push("notice", event, { isBad: BAD.has(kind) || (kind === "observation.run" && outcomeOf({ action: event, results: [event] }, true)[0] === "bad") });
  }
  return items;
}

const flat = (text) => String(text || "").replace(/\s+/g, " ").trim();

/** Return what the agent says in a step, each text once: replies, thoughts and messages repeat one another. */
export function saidIn(step) {
  const said = [];
  const say = (text, event) => {
    const words = flat(text);
    if (!words || said.some((one) => one.words.includes(words))) return;
    const longer = said.findIndex((one) => words.includes(one.words));
    if (longer >= 0) said.splice(longer, 1);
    said.push({ words, text, event });
  };
  if (step.reply) say(step.reply.content, step.reply);
  for (const { action } of step.parts) {
    say(action.thought, action);
    if (SPOKEN.has(action.kind)) say(action.content, action);
    if (action.kind === "action.finish") say(action.final_thought, action);
  }
  return said;
}

/** Return the calls that a step shows; messages and thoughts are what it says. */
export const callsIn = (step) => step.parts.filter(({ action }) => !SPOKEN.has(action.kind));

/** Return the one line that names a group. */
export function lineOf(item) {
  const event = item.events[0];
  if (item.type === "user") return flat(event.content).slice(0, 160);
  if (item.type === "notice") return event.kind === "observation.agent_state_changed" ? flat(`${event.agent_state.replaceAll("_", " ")}${event.reason ? `: ${reasonOf(event)}` : ""}`) : `${nameOf(event)}${event.content ? `: ${flat(event.content).slice(0, 140)}` : ""}`;
  if (item.type === "quiet") return [...new Set(item.events.map(nameOf))].join(", ");
  const calls = callsIn(item), call = (item.isBad && calls.find((part) => outcomeOf(part, true)[0] === "bad")) || calls[0];
  if (call) return lineOfCall(call.action);
  return saidIn(item)[0]?.words.slice(0, 160) || "Reply";
}

export function lineOfCall(action) {
  switch (action.kind) {
    case "action.run": return `$ ${flat(action.command).slice(0, 160)}`;
    case "action.finish": return "Finished";
    case "action.edit": case "action.write": case "action.read": return `${nameOf(action)} ${action.path}`;
    case "action.delegate": return `Delegate to ${action.agent}`;
    case "action.browse": return `Browse ${action.url}`;
    case "action.call_tool": case "action.call_tool_mcp": return `Tool ${action.tool || action.name || action.function_name || ""}`.trim();
    default: return `${nameOf(action)} ${flat(action.path || action.command || action.query || action.pattern || "")}`.trim();
  }
}

/** Return the class of a group for the filter: what it mainly is. */
export function classOf(item) {
  if (item.type !== "step") return item.type === "user" ? "messages" : "others";
  const kinds = item.parts.map(({ action }) => action.kind);
  if (kinds.some((kind) => /edit|write|patch/.test(kind))) return "changes";
  if (kinds.some((kind) => /run/.test(kind))) return "commands";
  return kinds.every((kind) => SPOKEN.has(kind) || kind === "action.finish") ? "messages" : "others";
}

/** Return whether a group has a text, which is in lower case. */
export function has(item, text) {
  return item.events.some((event) => hasText(event, text));
}
function hasText(value, text) {
  if (typeof value === "string") return value.toLowerCase().includes(text);
  return value && typeof value === "object" ? Object.values(value).some((one) => hasText(one, text)) : false;
}
