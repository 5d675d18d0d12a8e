// Why a conversation makes no progress: the chain of links, delegates below their parents.

import { ask, place } from "./api.js";
import { ago, block, el, replace, time } from "./dom.js";

/** What changes a state, in the words of this page; the server names commands of a terminal. */
const HERE = {
  confirmation: "Confirm the action below the log, edit it, or reject it.", answer: "Write a message below the log.", paused: "Resume it, or write a message.",
  unclaimed: "Resume it if it stays so.", closed: "Fork it (More): the copy continues.", dead_letter: "Find the cause in the workers' logs. Then requeue it on the page of the cluster.",
};

export async function why(id, panel, signal) {
  const found = await ask(`${place(id)}/why`, { signal });
  replace(panel, el("h2", {}, "Why it is here"), chain(found.links, HERE));
}

/** Return a sentence with its commands, which are in backquotes, as code. */
function marked(text) {
  return text.split("`").map((part, at) => at % 2 ? el("code", {}, part) : part);
}

/** `words` are the remedies of this conversation; those of its delegates are the server's. */
function chain(links, words = {}) {
  return el("ol", { class: "why" }, links.map((link) => el("li", {},
    el("span", {}, link.text),
    el("div", { class: "dim" }, link.since ? el("span", {}, "since ", time(link.since), ` (${ago(link.since)}) `) : "",
      link.until ? el("span", {}, "until ", time(link.until)) : ""),
    link.remedy ? el("div", { class: "remedy" }, "What changes it: ", words[link.cause] ?? marked(link.remedy)) : "",
    link.lines.length ? block(link.lines.join("\n")) : "",
    link.details.conversation_id ? el("a", { href: `#/c/${link.details.conversation_id}` }, "Open the delegate") : "",
    link.links.length ? chain(link.links) : "")));
}
