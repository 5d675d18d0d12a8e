// One task through the stream contract, with the npm package `redis`:
//   npm install redis && node inbox.mjs redis://127.0.0.1:6379/0 "List the files"
// docs/producing-work.md describes the contract.
import { randomUUID } from "node:crypto";
import { createClient } from "redis";

const [address, task] = process.argv.slice(2);
// `deckhands up` prints unix://:PASSWORD@/PATH, and the file of the password; other stores are redis://…
const local = /^unix:\/\/(?::(?<password>[^@]*)@)?(?<path>\/.*)$/.exec(address)?.groups;
const place = local ? { socket: { path: local.path }, password: local.password } : { url: address };
const store = await createClient(place).connect();
// The same id sent again is the same task.
const request = { id: randomUUID(), task, model: process.env.MODEL ?? null };
const name = `example-${request.id}`;
await store.xAdd("deck:inbox", "*", { v: "1", request: JSON.stringify(request), reply_to: name });

let after = "0-0";
let event = "";
while (!["settled", "rejected"].includes(event)) {
  const found = await store.xRead({ key: `deck:replies:${name}`, id: after }, { BLOCK: 2000 });
  for (const reply of found?.[0].messages ?? []) {
    after = reply.id;
    event = reply.message.event;
    const answer = JSON.parse(reply.message.json);
    console.log(event, answer.state ?? "", answer.message ?? "");
  }
}
await store.quit();
process.exit(event === "settled" ? 0 : 1);
