// Routing: the address after # names the page; each page stops its work when the user leaves it.

import { begin } from "./begin.js";
import { ask, keep, key, Problem } from "./api.js";
import { compare } from "./compare.js";
import { cluster } from "./cluster.js";
import { conversation } from "./conversation.js";
import { conversations } from "./conversations.js";
import { evaluation, evaluations } from "./evaluations.js";
import { listen } from "./keys.js";
import { el, note, replace } from "./dom.js";
import { search } from "./search.js";

const main = document.getElementById("main");
let leaving = new AbortController(), here = { id: "", aim: () => {} };

/** Exchange a one-time link for its key, and remove it from the address at once. */
async function enter(ticket) {
  history.replaceState(null, "", "#/");
  try { keep((await ask("/entries", { method: "POST", body: { ticket } })).token); } catch (error) { note(error.message, "bad"); }
  show();
}

/** Return the place that an address names; one that cannot be decoded is none. */
function placeOf(hash) {
  try { return decodeURIComponent(hash.slice(1)) || "/"; } catch { return "/"; }
}

function show() {
  const where = placeOf(location.hash);
  const found = /^\/c\/([^@/]+)(?:@(\d+))?$/.exec(where);
  if (found && found[1] === here.id && !leaving.signal.aborted) { if (found[2]) here.aim(Number(found[2])); return; }
  leaving.abort();
  leaving = new AbortController();
  here.id = "";
  document.getElementById("leave").hidden = !key();
  document.getElementById("connection").textContent = "";
  const entry = /^\/enter\/([\w-]{20,100})$/.exec(where);
  if (entry) { enter(entry[1]); return; }
  const searched = /^\/search(?:\/([^]*))?$/.exec(where);
  const created = /^\/new(?:\/([^@/]+))?$/.exec(where);
  const evaluated = /^\/e\/([\w-]{1,64})$/.exec(where), compared = /^\/compare\/([^@/]+)\/([^@/]+)$/.exec(where);
  const place = where === "/cluster" ? "cluster" : evaluated || where === "/evaluations" ? "evaluations" : "conversations";
  for (const name of ["conversations", "evaluations", "cluster"]) {
    const isHere = name === place;
    const link = document.getElementById(`nav-${name}`);
    if (isHere) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const context = { main, signal: leaving.signal, refused };
  if (found) here = Object.assign(conversation(context, found[1], Number(found[2] || 0)), { id: found[1] });
  else if (searched) search(context, searched[1] || "");
  else if (created) begin(context, created[1] || "");
  else if (evaluated) evaluation(context, evaluated[1]);
  else if (compared) compare(context, compared[1], compared[2]);
  else if (where === "/evaluations") evaluations(context);
  else if (where === "/cluster") cluster(context);
  else conversations(context);
}

/** Show the error of a page; without a valid key, ask for one. */
function refused(error) {
  if (leaving.signal.aborted) return;
  if (error instanceof Problem && error.status === 401) askForKey(error);
  else note(error.message, "bad");
}

function askForKey(error) {
  leaving.abort();
  leaving = new AbortController();
  here.id = "";
  document.title = "Deckhands";
  const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  replace(main, el("form", { class: "card narrow", onsubmit: async (event) => {
    event.preventDefault();
    keep(input.value.trim());
    try { await ask("/conversations?limit=1"); show(); } catch (again) { keep(""); note(again.message, "bad"); }
  } },
  el("h1", {}, "API key"),
  el("p", {}, key() ? error.message : "This server asks for a key. ", el("code", {}, "deckhands key add"), " creates one."),
  el("label", { for: "key" }, "Key"), input,
  el("p", { class: "dim" }, "It is kept until this tab is closed."),
  el("button", { class: "main" }, "Enter")));
  input.focus();
}

document.getElementById("leave").addEventListener("click", () => { keep(""); location.reload(); });
addEventListener("hashchange", () => { const before = leaving; show(); if (before !== leaving && !main.contains(document.activeElement)) main.focus(); });
listen();
show();
