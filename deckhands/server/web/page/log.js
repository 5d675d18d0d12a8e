// The events of one conversation in the browser: its end first, then what is older, and what happens from now on.
// Long texts stay at the server until they are looked at, so that 20,000 events need little memory.

import { ask, follow, place } from "./api.js";

const TAIL = 200, PAGE = 500, MOST_CHARS = 8_000, KEPT_WHOLE = 20;

/** Cut the long texts of an event in place, at any depth; return whether there was one. */
function cut(value) {
  let isCut = false;
  for (const [name, one] of Object.entries(value)) {
    if (typeof one === "string" && one.length > MOST_CHARS) {
      value[name] = one.startsWith("data:") ? "data:cut" : one.slice(0, MOST_CHARS);
      isCut = true;
    } else if (one && typeof one === "object" && cut(one)) isCut = true;
  }
  return isCut;
}

function light(event) {
  const isShort = event.blobs && Object.keys(event.blobs).length > 0;
  if (cut(event) || isShort) event.isCut = true;
  return event;
}

export class Log {
  /** Make the log of a conversation. `on` has changed(), delta(), state() and problem(). */
  constructor(id, on, signal) {
    Object.assign(this, { id, on, signal, events: [], row: null, isWhole: false, wholes: new Map() });
  }

  /** Read the last events, follow the log, and read what is older meanwhile. */
  async open() {
    const { id, signal } = this;
    const found = await ask(`/conversations?id=${encodeURIComponent(id)}`, { signal });
    this.row = found.conversations[0] || null;
    if (!this.row) await ask(place(id), { signal });  // it is archived, or there is none
    const last = this.row?.version || 0, from = Math.max(0, last - TAIL);
    await this.read(from, last || Infinity, (events) => this.events.push(...events));
    this.on.changed();
    const after = this.events.at(-1)?.id || 0;
    const following = follow(id, {
      event: (event) => { if (event.id > (this.events.at(-1)?.id || 0)) { this.events.push(light(event)); this.on.changed(event); } },
      delta: this.on.delta, state: this.on.state, problem: this.on.problem,
    }, signal, after);
    for (let first = this.events[0]?.id || 1; first > 1 && !signal.aborted; first = this.events[0].id) {
      const earlier = [];
      await this.read(Math.max(0, first - 1 - PAGE), first - 1, (events) => earlier.push(...events));
      if (!earlier.length) break;
      this.events = earlier.concat(this.events);
      this.on.changed();
    }
    this.isWhole = true;
    this.on.changed();
    return following;
  }

  /** Read the events above `after`, up to `until`. */
  async read(after, until, take) {
    for (let at = after; at !== null && at < until && !this.signal.aborted;) {
      const page = await ask(`${place(this.id)}/events?after=${at}&limit=${Math.min(PAGE, until - at)}`, { signal: this.signal });
      take(page.events.filter((event) => event.id <= until).map(light));
      at = page.next_after ?? (page.events.length && Number.isFinite(until) ? page.events.at(-1).id : null);
    }
  }

  /** Return the event with its full texts; the last few are kept. */
  whole(event) {
    if (!event.isCut) return Promise.resolve(event);
    const found = this.wholes.get(event.id) || ask(`${place(this.id)}/events/${event.id}`, { signal: this.signal });
    this.wholes.delete(event.id);
    this.wholes.set(event.id, found);
    found.catch(() => this.wholes.delete(event.id));
    if (this.wholes.size > KEPT_WHOLE) this.wholes.delete(this.wholes.keys().next().value);
    return found;
  }
}
