// The search in the texts of all conversations. The server searches in steps of two seconds; the page asks for the next.

import { ask } from "./api.js";
import { ago, el, named, note, replace } from "./dom.js";

/** After this many are found, the user is asked before the search continues. */
const MOST_FOUND = 50;

/** Return a text as nodes, with the words marked. */
function marked(text, words) {
  const lowered = text.toLowerCase(), parts = [];
  if (lowered.length !== text.length) return [text];  // a letter whose small form has another length
  let at = 0;
  while (at < text.length) {
    const next = words.map((word) => [lowered.indexOf(word, at), word]).filter(([start]) => start >= 0).sort((a, b) => a[0] - b[0] || b[1].length - a[1].length)[0];
    if (!next) break;
    parts.push(text.slice(at, next[0]), el("mark", {}, text.slice(next[0], next[0] + next[1].length)));
    at = next[0] + next[1].length;
  }
  return [...parts, text.slice(at)];
}

function item(found, words) {
  const { match } = found, id = encodeURIComponent(found.conversation_id);
  const labels = Object.entries(found.labels).map(([name, value]) => el("span", { class: "label" }, `${name}=${value}`));
  return el("li", { class: "card" },
    el("div", { class: "row" }, el("a", { href: `#/c/${id}${match.event_id ? `@${match.event_id}` : ""}` }, match.event_id ? found.title || found.conversation_id : marked(found.title || found.conversation_id, words)),
      el("span", { class: `state ${found.state}` }, found.state.replaceAll("_", " ")), found.is_archived ? el("span", { class: "label" }, "archived") : "", labels),
    match.event_id ? el("p", { class: "snippet" }, el("span", { class: "dim" }, `${match.event_id}: `), marked(match.snippet, words)) : "",
    el("div", { class: "dim mono" }, found.conversation_id, found.tenant ? ` · ${found.tenant}` : "", found.updated ? ` · ${ago(found.updated)}` : ""));
}

export function search({ main, signal, refused }, asked) {
  named(asked ? `${asked} · Search` : "Search");
  const words = asked.toLowerCase().split(/\s+/).filter(Boolean);
  const text = el("input", { id: "words", type: "search", maxlength: 300, required: true, value: asked, autocomplete: "off", placeholder: "up to ten words" });
  const list = el("ol", { class: "found", "aria-label": "Found conversations" }), status = el("p", { role: "status", class: "dim" });
  const further = el("button", { type: "button", hidden: true, onclick: () => { if (isBusy) isBusy = false; else go(); } });
  const seen = new Set();
  let cursor = "", searched = 0, unreadable = 0, isBusy = false;
  replace(main,
    el("div", { class: "bar" }, el("h1", {}, "Search"), el("span", { class: "grow" }), el("a", { href: "#/" }, "Conversations")),
    el("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); const wanted = text.value.trim(); if (wanted === asked) { if (cursor !== null && !isBusy) go(); } else location.hash = `#/search/${encodeURIComponent(wanted)}`; } },
      el("label", { for: "words" }, "Words"), text, el("button", { class: "main" }, "Search"),
      el("span", { class: "dim" }, "in titles, tasks, messages, commands and outputs, archived ones too")),
    list, el("div", { class: "bar" }, status, further));

  function say(page) {
    const at = page?.reached ? `, back to ${page.reached.slice(0, 16).replace("T", " ")} UTC` : "";
    const what = isBusy ? page?.place === "listing" ? "Listing the archive…" : `Searching${page?.place === "archive" ? " the archive" : ""}…` : cursor === null ? "That is all." : "Stopped.";
    const bad = unreadable ? ` ${unreadable.toLocaleString("en")} could not be read.` : "";
    status.textContent = `${what} ${seen.size.toLocaleString("en")} found, ${searched.toLocaleString("en")} searched${at}.${bad}`;
    further.hidden = cursor === null;
    further.textContent = isBusy ? "Stop" : "Search on";
  }

  async function go() {
    isBusy = true;
    say();
    const most = seen.size + MOST_FOUND;
    while (isBusy && cursor !== null && seen.size < most && !signal.aborted) {
      let page;
      try { page = await ask(`/search?${new URLSearchParams({ text: asked, cursor })}`, { signal }); } catch (error) {
        if (signal.aborted) return;
        isBusy = false;
        say();
        refused(error);
        return;
      }
      if (signal.aborted) return;
      cursor = page.next_cursor;
      searched += page.searched;
      unreadable += page.unreadable;
      for (const found of page.conversations) {
        if (seen.has(found.conversation_id)) continue;  // it was archived during the search
        seen.add(found.conversation_id);
        list.append(item(found, words));
      }
      say(page);
    }
    isBusy = false;
    say();
    if (cursor === null && !seen.size) note("No conversation has these words.");
  }

  if (words.length) go(); else text.focus();
}
