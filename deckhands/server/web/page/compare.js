// Two conversations side by side, such as two forks of one: their common events, and those of each after that.

import { ask, download, place } from "./api.js";
import { block, costText, duration, el, grid, named, replace } from "./dom.js";
import { card, diff } from "./events.js";
import { usage } from "./usage.js";

const PAGE = 50, MOST = 2_000, DRAWN = 500;

/** Read a conversation's events in full, up to a limit. */
async function events(id, signal) {
  const found = [];
  for (let after = 0; after !== null && found.length < MOST;) {
    const page = await ask(`${place(id)}/events?whole=true&limit=${PAGE}&after=${after}`, { signal });
    found.push(...page.events);
    after = page.next_after;
  }
  return found;
}

/** Return the fields of an event that are equal in copies of it. */
function essence(event) {
  const { timestamp, conversation_id, title, forked_from, labels, traceparent, ...rest } = event;
  return JSON.stringify(event.kind === "conversation.created" ? { kind: rest.kind } : rest);
}

/** Return the card of an event without its element id, which would not be unique here. */
function unnamed(event, id) {
  const made = card(event, id);
  made.removeAttribute("id");
  return made;
}

function shared(first, second) {
  const most = Math.min(first.length, second.length);
  let at = 0;
  while (at < most && essence(first[at]) === essence(second[at])) at += 1;
  return at;
}

function figures(found) {
  const replies = found.filter((event) => event.kind === "model.reply"), used = usage();
  found.forEach(used.take);
  const states = found.filter((event) => event.kind === "observation.agent_state_changed"), all = found.map((event) => Date.parse(event.timestamp)).filter(Number.isFinite), times = all.filter((at) => at >= all[0]); // what a fork shares with its origin is older than it
  return {
    state: states.at(-1)?.agent_state || "loading",
    models: [...new Set(replies.map((event) => event.model).filter(Boolean))].join(", "),
    steps: used.steps,
    cost: costText(used.cost, used.isWhole),
    tokens: used.tokens.toLocaleString("en"),
    seconds: times.length ? duration((Math.max(...times) - Math.min(...times)) / 1000) : "",
  };
}

export async function compare({ main, signal, refused }, first, second) {
  named("Compare");
  const ids = [first, second];
  replace(main, el("div", { class: "bar" }, el("h1", {}, "Two conversations")), el("p", { class: "dim", role: "status" }, "Reading…"));
  try {
    const found = await Promise.all(ids.map((id) => events(id, signal)));
    if (signal.aborted) return;
    const common = shared(...found), titles = found.map((each, at) => each[0]?.title || ids[at]);
    const own = found.map((each) => figures(each.slice(common)));
    const state = (name) => el("span", { class: `state ${name}` }, name.replaceAll("_", " "));
    const rows = [["State", ...own.map((one) => state(one.state))], ["Models", ...own.map((one) => one.models)], ["Steps", ...own.map((one) => String(one.steps))],
      ["Cost", ...own.map((one) => one.cost)], ["Tokens", ...own.map((one) => one.tokens)], ["Time", ...own.map((one) => one.seconds)]];
    const column = (each, at) => el("section", { class: "side", "aria-label": titles[at] },
      el("h2", {}, el("a", { href: `#/c/${ids[at]}` }, titles[at])), el("div", { class: "dim mono" }, ids[at]),
      each.length - common > DRAWN ? el("p", { class: "dim" }, `The first ${DRAWN} of ${each.length - common} events.`) : "",
      each.slice(common, common + DRAWN).map((event) => unnamed(event, ids[at])),
      each.length === common ? el("p", { class: "dim" }, "Nothing more.") : "", patch(ids[at]));
    replace(main, el("div", { class: "bar" }, el("h1", {}, "Two conversations")),
      el("section", { class: "card" }, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures" }, grid(["From where they differ", ...titles], rows))),
      el("details", { class: "card" }, el("summary", {}, common ? `They share their first ${common.toLocaleString("en")} events` : "They share no event"), found[0].slice(0, Math.min(common, DRAWN)).map((event) => unnamed(event, first))),
      el("div", { class: "sides" }, found.map(column)));
  } catch (error) { if (!signal.aborted) refused(error); }

  function patch(id) {
    const shown = el("div", {});
    const button = el("button", { type: "button", onclick: async () => {
      try {
        const text = await (await download(`${place(id)}/patch`)).text();
        replace(shown, text ? diff(text) : el("p", { class: "dim" }, "Nothing was changed in the workspace."));
        button.remove();
      } catch (error) { replace(shown, block(error.message)); }
    } }, "Show its patch");
    return el("div", {}, button, shown);
  }
}
