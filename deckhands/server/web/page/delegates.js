// The delegates of a conversation as a tree, with their own delegates below them.

import { ask, place } from "./api.js";
import { el, replace } from "./dom.js";

const DEEPEST = 6, ID_CHARS = 24, LOOK_MS = 5_000, MOST_LOOKS = 20, TASK_CHARS = 120;
const KINDS = "kind=action.delegate&kind=conversation.delegate_ended&limit=200";

/** Return the conversation id of an action's delegate; empty if the browser cannot hash. */
async function idOf(parent, action) {
  if (!crypto.subtle) return ""; // not a secure context: the page was loaded neither over TLS nor from this machine
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(`${parent}:${action}`)));
  return `d${[...hash].map((byte) => byte.toString(16).padStart(2, "0")).join("").slice(0, ID_CHARS)}`;
}

/** Make a list: `take` adds the delegates in a conversation's events; `look` reads their own delegates. */
export function tree(id, signal, level = 1) {
  const node = el("ul", {}), branches = new Map(), ends = new Map();
  let soon = 0, isLooking = false;

  function begin(event) {
    if (branches.has(event.id)) return;
    const name = el("a", { href: `#/c/${id}@${event.id}` }, event.agent), state = el("span", { class: "state" }, "at work");
    const item = el("li", {}, name, ` ${(event.inputs?.task || "").slice(0, TASK_CHARS)} `, state);
    const branch = { item, name, state, id: "", below: null, isOver: false, isRead: false };
    branches.set(event.id, branch);
    node.append(item);
    branch.isKnown = idOf(id, event.id).then((found) => known(branch, found));
    if (ends.has(event.id)) end(ends.get(event.id));
  }

  function known(branch, found) {
    if (!found || branch.below) return;
    branch.id = found;
    branch.name.setAttribute("href", `#/c/${found}`);
    branch.below = tree(found, signal, level + 1);
    branch.item.append(branch.below.node);
  }

  function end(event) {
    const branch = branches.get(event.delegate_id);
    if (!branch) { ends.set(event.delegate_id, event); return; }  // the log is read from its end
    branch.isOver = true;
    replace(branch.state, document.createTextNode(event.agent_state));
    branch.state.className = `state ${event.agent_state}`;
    known(branch, event.conversation_id);
  }

  function take(event) {
    if (event.kind === "action.delegate") begin(event);
    else if (event.kind === "conversation.delegate_ended") end(event);
    else return;
    if (level === 1) { clearTimeout(soon); soon = setTimeout(lookOnce, 300); }
  }

  /** Read the delegates' own delegates, with a limited number of requests; ended ones are read once. */
  async function look(room) {
    if (level >= DEEPEST) return;
    await Promise.all([...branches.values()].map((one) => one.isKnown));
    for (const branch of branches.values()) {
      if (signal.aborted || room.left <= 0) return;
      if (!branch.below || branch.isRead) continue;
      room.left -= 1;
      const isLast = branch.isOver;
      try {
        for (const event of (await ask(`${place(branch.id)}/events?${KINDS}`, { signal })).events) branch.below.take(event);
        await branch.below.look(room);
        branch.isRead = isLast;
      } catch { branch.isRead = isLast; /* it has not started, was deleted, or may not be read with this key */ }
    }
  }

  async function lookOnce() {
    if (isLooking || signal.aborted) return;
    isLooking = true;
    try { await look({ left: MOST_LOOKS }); } finally { isLooking = false; }
  }

  if (level === 1) {
    const looking = setInterval(lookOnce, LOOK_MS);
    signal.addEventListener("abort", () => { clearInterval(looking); clearTimeout(soon); });
  }
  return { node, take, look, get size() { return branches.size; } };
}
