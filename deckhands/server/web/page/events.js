// One event as a card of the timeline.

import { block, clean, el, time, usd } from "./dom.js";
import { explanationOf, reasonOf } from "./errors.js";

const NAMES = {
  "action.message": "Message", "action.run": "Command", "observation.run": "Output", "action.think": "Thought",
  "action.finish": "Finished", "action.reject": "Refused", "action.edit": "Edit", "observation.edit": "Edited",
  "action.read": "Read", "observation.read": "File", "action.write": "Write", "action.delegate": "Delegate",
  "observation.delegate": "Delegate's result", "model.reply": "Reply", "model.failed": "Model call failed",
  "model.deferred": "Model call waits", "observation.agent_state_changed": "State", "observation.error": "Error",
  "action.task_tracking": "Task list", "observation.task_tracking": "Task list", "action.condensation": "Condensation",
  "conversation.created": "Created", "conversation.operator_acted": "Operator", "observation.browse": "Browser",
};
const QUIET = new Set(["model.admitted", "action.system", "action.recall", "observation.recall", "observation.null",
  "conversation.begun", "action.survey", "observation.survey", "action.change_agent_state",
  "action.save_progress", "action.digest_workspace", "observation.workspace_digest"]);
const MOST_IMAGES = 8;
const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

/** Return the card of an event. */
export function card(event, conversationId) {
  const name = NAMES[event.kind] || event.kind.replace(/^(action|observation)\./, "").replaceAll("_", " ");
  const side = event.kind === "action.message" ? event.source : event.kind.split(".")[0];
  const isBad = event.kind === "observation.error" || event.kind === "model.failed" || (event.metadata?.exit_code ?? 0) > 0 || (event.kind === "observation.run" && explanationOf(event));
  const anchor = `#/c/${conversationId}@${event.id}`;
  const answers = event.cause_id ? el("a", { class: "dim", href: `#/c/${conversationId}@${event.cause_id}` }, ` to ${event.cause_id}`) : "";
  return el("article", { id: `e${event.id}`, class: `event ${side}${isBad ? " bad" : ""}${QUIET.has(event.kind) || (event.kind === "model.reply" && !event.content) ? " minor" : ""}`, tabindex: -1, "aria-label": `Event ${event.id}, ${name}` },
    el("header", {}, el("a", { class: "number", href: anchor, title: "Link to this event" }, event.id), el("strong", {}, name), answers,
      el("span", { class: "grow" }), costs(event), event.confirmation_state === "awaiting_confirmation" ? el("span", { class: "label" }, "asks") : "", time(event.timestamp)),
    ...contents(event),
    el("details", { ontoggle: (toggled) => fill(toggled.target, event) }, el("summary", {}, "All fields")));
}

function fill(details, event) {
  if (details.open && details.children.length === 1) details.append(block(JSON.stringify(event, null, 2)));
}

function costs(event) {
  if (event.kind !== "model.reply") return "";
  const used = event.usage || {};
  const parts = [`${(used.prompt_tokens || 0).toLocaleString("en")} + ${(used.completion_tokens || 0).toLocaleString("en")} tokens`];
  if (event.cost_usd !== undefined && event.cost_usd !== null) parts.push(usd(event.cost_usd));
  if (event.latency_seconds) parts.push(`${event.latency_seconds.toFixed(1)} s`);
  return el("span", { class: "dim" }, parts.join(" · "));
}

function* contents(event) {
  if (event.thought) yield el("p", { class: "said" }, event.thought);
  switch (event.kind) {
    case "action.message": case "action.think": yield el("p", { class: "said" }, event.content || ""); break;
    case "action.finish": yield el("p", { class: "said" }, event.final_thought || "All done."); break;
    case "action.run": yield block(`$ ${event.command}`, { class: "command" }); break;
    case "observation.run": yield block(event.content || "(no output)"); yield* ending(event); break;
    case "observation.edit": yield el("p", { class: "mono" }, event.path); yield diff(event.diff || event.content); break;
    case "observation.agent_state_changed": yield el("p", {}, el("span", { class: `state ${event.agent_state}` }, event.agent_state.replaceAll("_", " ")), event.reason ? ` ${reasonOf(event)}` : ""); break;
    case "action.task_tracking": case "observation.task_tracking": yield tasks(event.task_list || []); break;
    case "action.delegate": yield el("p", {}, el("strong", {}, event.agent), " ", event.inputs?.task || ""); break;
    case "conversation.created": yield el("p", { class: "dim" }, [event.agent?.name, event.agent?.llm?.model].filter(Boolean).join(" · ")); break;
    case "conversation.operator_acted": yield el("p", {}, `${event.author}: ${event.action}${event.reason ? ` (${event.reason})` : ""}`); break;
    case "model.reply": if (event.content) yield el("p", { class: "said" }, event.content); break;
    default: {
      if (event.path || event.url) yield el("p", { class: "mono" }, event.path || event.url);
      const text = event.command || event.code || event.content || event.summary;
      if (typeof text === "string" && text) yield block(text);
    }
  }
  yield* images(event);
}

/** The end of a command; the exit code -1 stands for none. */
function* ending(event) {
  const explanation = explanationOf(event), code = event.metadata?.exit_code ?? "unknown";
  if (explanation) yield el("p", { class: "explanation bad" }, explanation);
  if (code !== -1 || !explanation) yield el("p", { class: "dim" }, code === -1 ? "no exit code" : `exit code ${code}`);
}

function* images(event) {
  const found = [...(event.image_urls || []), event.set_of_marks || event.screenshot || ""].filter(Boolean);
  for (const source of found.slice(0, MOST_IMAGES)) {
    // Only pictures that are in the log: fetching an address would reveal the reader to its server.
    if (IMAGE.test(source)) yield picture(source, event.url ? `The page ${event.url}` : `A picture in event ${event.id}`);
    else yield el("p", { class: "dim mono" }, `picture: ${source.slice(0, 200)}`);
  }
}

/** Return a picture that opens in full size. */
export function picture(source, alt) {
  return el("button", { type: "button", class: "picture", title: "Show it in its whole size", onclick: () => {
    const dialog = el("dialog", { class: "broad", "aria-label": alt }, el("form", { method: "dialog", class: "row end" }, el("button", { class: "quiet" }, "Close")), el("img", { src: source, alt }));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  } }, el("img", { src: source, alt, loading: "lazy" }));
}

/** Return a patch whose lines are distinguished by colour and by their marks. */
export function diff(text) {
  if (!/^(@@|---|\+\+\+|[+-])/m.test(text || "")) return block(text);
  const lines = String(text).replace(/\n+$/, "").split("\n", 2_000);
  const made = el("pre", { class: "diff", tabindex: lines.length > 20 ? 0 : undefined });
  for (const line of lines) {
    const kind = line.startsWith("@@") ? "hunk" : /^(\+\+\+|---)/.test(line) ? "file" : line[0] === "+" ? "plus" : line[0] === "-" ? "minus" : "";
    made.append(el("span", { class: kind }, `${line.slice(0, 5_000)}\n`));
  }
  return made;
}

export function tasks(list) {
  const marks = { done: "✓", in_progress: "▸" };
  return el("ul", { class: "tasks" }, list.slice(0, 200).map((one) =>
    el("li", { class: clean(one.status) === "done" ? "dim" : "" }, `${marks[one.status] || "○"} ${one.title} `, one.status === "in_progress" ? el("span", { class: "label" }, "now") : "")));
}
