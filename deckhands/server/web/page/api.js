// The server's API, with the reader's key; and event streams that resume after their last event.

const KEY = "deckhands.key", MOST_WAIT_SECONDS = 60;

export class Problem extends Error {
  constructor(status, found) {
    super([found.detail || found.title || `The server answered ${status}.`, found.remedy].filter(Boolean).join(" "));
    this.status = status;
    this.code = found.code || "";
  }
}

export const key = () => sessionStorage.getItem(KEY) || "";
export const keep = (text) => text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY);

function headers(more = {}) {
  return { ...(key() ? { Authorization: `Bearer ${key()}` } : {}), ...more };
}

function unique() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function problem(answer) {
  let found = {};
  try { found = await answer.json(); } catch { /* it is no problem of ours */ }
  return new Problem(answer.status, found);
}

export async function ask(path, { method = "GET", body, signal, match, tries = 3 } = {}) {
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  if (match) more["If-Match"] = match;
  if (method === "POST") more["Idempotency-Key"] = unique();
  const answer = await fetch(path, {
    method, signal, headers: headers(more), credentials: "omit", body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const wait = Number(answer.headers.get("Retry-After"));
    if (method === "GET" && tries > 0 && [429, 503].includes(answer.status) && wait > 0 && wait <= MOST_WAIT_SECONDS) {
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
      signal?.throwIfAborted();
      return ask(path, { signal, tries: tries - 1 });
    }
    throw await problem(answer);
  }
  return answer.status === 204 ? null : answer.json();
}

/** Change a thing as it is now: if it was changed since, the server refuses. `then` is behind its path. */
export async function revise(path, then, { method, body }) {
  return ask(path + then, { method, body, match: (await read(path)).tag });
}

/** Return a thing, its ETag for a change of it as it is shown, and of a list the value of `after` for what follows. */
export async function read(path) {
  const known = await got(path);
  return { value: await known.json(), tag: known.headers.get("ETag"), next: known.headers.get("Next-After") };
}

async function got(path) {
  const answer = await fetch(path, { headers: headers(), credentials: "omit" });
  if (!answer.ok) throw await problem(answer);
  return answer;
}

export const download = async (path) => (await got(path)).blob();
export const text = async (path) => (await got(path)).text();

export const place = (id) => `/conversations/${encodeURIComponent(id)}`;

/**
 * Follow a conversation until `signal` is aborted: each event once and in order, across restarts of servers and connections.
 * `after` is the last event that the caller has. `on` has the callbacks event, delta, state ("live", "away", "over") and problem.
 */
export async function follow(id, on, signal, after = 0) {
  let seen = after, pause = 500;
  while (!signal.aborted) {
    try {
      const answer = await fetch(`${place(id)}/stream?deltas=true`, {
        headers: headers(seen ? { "Last-Event-ID": String(seen) } : {}), credentials: "omit", signal,
      });
      if (!answer.ok) throw await problem(answer);
      on.state("live");
      for await (const message of messages(answer.body)) {
        const content = JSON.parse(message.data);
        if (message.kind === "event") {
          if (content.id <= seen) continue;
          if (content.id !== seen + 1) throw new Error("an event is missing");
          seen = content.id;
          on.event(content);
        } else if (message.kind === "delta") on.delta(content);
        else if (message.kind === "end") { on.state("over"); return; }
        else if (message.kind === "problem" && !content.retryable) throw new Problem(content.status || 400, content);
        pause = 500;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status < 500 && error.status !== 408 && error.status !== 429) {
        on.problem(error);
        return;
      }
    }
    on.state("away");
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 8_000);
  }
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  let kind = "event", data = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      if (!value.includes("\n")) { rest.push(value); continue; }
      const lines = (rest.join("") + value).split("\n");
      rest = [lines.pop()];
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { kind, data: data.join("\n") };
          kind = "event"; data = [];
        } else if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
