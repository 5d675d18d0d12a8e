// The keyboard: which keys do what, and where they do nothing because the user is typing.

import { el } from "./dom.js";

const GROUPS = [
  ["Everywhere", [["?", "this list"], ["l", "all conversations"], ["s", "search the texts of all conversations"], ["b", "a new conversation"]]],
  ["In a conversation", [["j  k", "next and previous step"], ["g  G", "first step; the end, which is followed"], ["/", "search; Enter and Shift+Enter lead on"], ["n  N", "next and previous match"],
    ["e", "next error"], ["1 … 6", "Log, Timeline, Usage, Files, About, Terminal"], ["m", "write a message; Ctrl+Enter sends it"], ["c  v  x", "confirm, edit or reject the action that waits"],
    ["p  i  r", "pause, interrupt, resume"], ["f", "fork at the step"], ["a", "repeat: a new conversation with the same task"]]],
];

/** Return whether a key belongs to a field or a dialog, or is a command of the browser. */
export function isTyping(event) {
  return event.ctrlKey || event.metaKey || event.altKey || Boolean(event.target.closest?.("input, textarea, select, dialog")) || Boolean(document.querySelector("dialog[open]"));
}

/** Show the keys. */
export function help() {
  const dialog = el("dialog", { "aria-labelledby": "keys-title", class: "keys" }, el("h2", { id: "keys-title" }, "Keys"),
    GROUPS.map(([name, keys]) => [el("h3", {}, name), el("dl", {}, keys.map(([key, does]) => [el("dt", {}, key.split("  ").map((one) => [el("kbd", {}, one), " "])), el("dd", {}, does)]))]),
    el("form", { method: "dialog", class: "row end" }, el("button", {}, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Listen for the keys that work on every page. */
export function listen() {
  const found = { "?": help, l: () => { location.hash = "#/"; }, s: () => { location.hash = "#/search"; }, b: () => { location.hash = "#/new"; } };
  addEventListener("keydown", (event) => {
    if (isTyping(event) || !Object.hasOwn(found, event.key)) return;
    event.preventDefault();
    found[event.key]();
  });
}
