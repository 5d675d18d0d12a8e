// Conversations through AG-UI's own client: each line of the input is one, and each line of the output its record.
// The client checks each event against its schema and its state machine; a violation is in `problems`.
import { HttpAgent } from "@ag-ui/client";
import { createInterface } from "node:readline";
import { isDeepStrictEqual } from "node:util";
import { resumingFetch } from "./resuming.mjs";

const [url, key, workers] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${key}` };
const MAX_CUTS = 8;
const RUN_MS = 240_000; // a run that takes longer is a problem of its thread, and the others continue

// A repeatable stream of numbers from 0 to 1 (mulberry32).
function numbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// A fetch whose connections break after a random number of bytes.
function cutting(random, record) {
  return async (address, init) => {
    const aborting = new AbortController();
    const answer = await fetch(address, { ...init, signal: AbortSignal.any([init.signal, aborting.signal]) });
    if (record.cuts >= MAX_CUTS || !answer.ok) return answer;
    let room = Math.floor(random() ** 2 * 4000);
    const body = answer.body.pipeThrough(
      new TransformStream({
        transform(chunk, out) {
          if (chunk.length < room) {
            room -= chunk.length;
            out.enqueue(chunk);
            return;
          }
          out.enqueue(chunk.slice(0, room));
          record.cuts += 1;
          aborting.abort();
          out.error(new Error("cut"));
        },
      }),
    );
    return new Response(body, { status: answer.status, headers: answer.headers });
  };
}

const bare = ({ id, role, content, toolCalls, toolCallId }) =>
  JSON.parse(JSON.stringify({ id, role, content, toolCalls, toolCallId }));

// What a run says, independent of the pieces of its texts and of when it reports its state.
function outline(events) {
  const texts = new Map();
  const order = [];
  const states = [];
  for (const event of events) {
    if (event.type === "TEXT_MESSAGE_CONTENT") {
      texts.set(event.messageId, (texts.get(event.messageId) ?? "") + event.delta);
    } else if (event.type === "STATE_DELTA") states.push(event.delta);
    else order.push(event);
  }
  return { order, states, texts: [...texts] };
}

async function replayed(job, runId) {
  const query = new URLSearchParams({ threadId: job.thread, runId });
  const answer = await resumingFetch(`${url}?${query}`, { headers, signal: AbortSignal.timeout(RUN_MS) });
  if (!answer.ok) throw new Error(`${runId} cannot be read again: ${answer.status} ${await answer.text()}`);
  const frames = (await answer.text()).split("\n\n");
  return frames.filter((each) => each.includes("data: ")).map((each) => JSON.parse(each.slice(each.indexOf("data: ") + 6)));
}

async function converse(job) {
  const record = { thread: job.thread, cuts: 0, runs: [], problems: [] };
  const random = numbers(job.seed);
  const send = job.cut ? cutting(random, record) : fetch;
  const agent = new HttpAgent({
    url: `${url}?${new URLSearchParams({ model: job.model })}`,
    headers,
    threadId: job.thread,
    fetch: (address, init) => {
      const ends = [AbortSignal.timeout(RUN_MS), ...(init.signal ? [init.signal] : [])];
      return resumingFetch(address, { ...init, signal: AbortSignal.any(ends) }, send);
    },
  });
  const said = [...job.said];
  let number = 0;
  while (said.length || agent.pendingInterrupts.length) {
    const parameters = { runId: `run-${(number += 1)}`, forwardedProps: { deckhands: job.fields ?? {} } };
    if (agent.pendingInterrupts.length) {
      parameters.resume = agent.pendingInterrupts.map(({ id }) => {
        const approved = random() < 0.7;
        return { interruptId: id, status: "resolved", payload: approved ? { approved } : { approved, reason: "not so" } };
      });
    } else agent.addMessage({ id: `u-${number}`, role: "user", content: said.shift() });
    const events = [];
    let last = null;
    const watching = {
      onEvent: ({ event }) => void events.push(event),
      onMessagesSnapshotEvent: ({ event, messages }) => {
        last = [messages.map(bare), event.messages.map(bare)];
      },
      onRunFailed: ({ error }) => void record.problems.push(String(error)),
    };
    try {
      await agent.runAgent(parameters, watching);
      if (record.problems.length) break;
      const end = events.at(-1);
      const again = outline(await replayed(job, parameters.runId));
      if (!isDeepStrictEqual(outline(events), again)) {
        record.problems.push(`${parameters.runId} differs: ${JSON.stringify([outline(events), again])}`);
      }
      if (last === null) record.problems.push(`${parameters.runId} has no snapshot: ${JSON.stringify(events)}`);
      else if (!isDeepStrictEqual(last[0], last[1])) record.problems.push(`the snapshot differs: ${JSON.stringify(last)}`);
      record.runs.push({ end: end?.type, outcome: end?.outcome?.type, code: end?.code, events: events.length });
    } catch (error) {
      record.problems.push(String(error));
    }
    if (record.problems.length) break;
  }
  record.messages = agent.messages.map(bare);
  return record;
}

const waiting = [];
for await (const line of createInterface({ input: process.stdin })) waiting.push(JSON.parse(line));
await Promise.all(
  Array.from({ length: Number(workers) }, async () => {
    for (let job = waiting.shift(); job; job = waiting.shift()) console.log(JSON.stringify(await converse(job)));
  }),
);
