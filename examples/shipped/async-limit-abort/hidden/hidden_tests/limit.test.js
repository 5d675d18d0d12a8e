"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { mapLimit } = require("../limit.js");

setTimeout(() => process.exit(1), 8000).unref();
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const timed = { timeout: 3000 };

test("order and limit", timed, async () => {
  for (const limit of [1, 2, 3, Infinity]) {
    let running = 0, most = 0;
    const result = await mapLimit([5, 1, 4, 2, 3], limit, async (n, index) => {
      most = Math.max(most, ++running);
      await wait(n * 4);
      running--;
      return [n, index];
    });
    assert.deepStrictEqual(result, [[5, 0], [1, 1], [4, 2], [2, 3], [3, 4]]);
    assert.strictEqual(most, Math.min(limit, 5));
  }
});
test("empty, and plain values", timed, async () => {
  assert.deepStrictEqual(await mapLimit([], 2, async () => 1), []);
  assert.deepStrictEqual(await mapLimit("ab", 2, (c) => c + c), ["aa", "bb"]);
  assert.deepStrictEqual(await mapLimit([undefined, null], 1, async (c) => c), [undefined, null]);
});
test("taken late, one at a time", timed, async () => {
  let taken = 0, asking = 0, running = 0;
  const items = {
    [Symbol.asyncIterator]: () => ({
      async next() {
        assert.strictEqual(asking++, 0);
        assert.ok(running < 3);
        await wait(1);
        asking--;
        return taken < 12 ? { value: taken++, done: false } : { value: undefined, done: true };
      },
    }),
  };
  const result = await mapLimit(items, 3, async (n) => {
    running++;
    assert.ok(taken <= n + 4);
    await wait(n % 3 ? 2 : 9);
    running--;
    return n;
  });
  assert.deepStrictEqual(result, [...Array(12).keys()]);
});
function* endless(log) {
  try {
    for (let n = 0; ; n++) {
      log.push(n);
      yield n;
    }
  } finally {
    log.push("closed");
  }
}
test("failure", timed, async () => {
  const log = [], settled = [], signals = [];
  const bad = new Error("bad");
  await assert.rejects(mapLimit(endless(log), 3, async (n, index, signal) => {
    signals.push(signal);
    await wait(n === 1 ? 5 : 25);
    settled.push(n);
    if (n === 1) throw bad;
    throw new Error("later");
  }), (error) => error === bad);
  assert.deepStrictEqual(log, [0, 1, 2, "closed"]);
  assert.deepStrictEqual(settled.sort(), [0, 1, 2]);
  assert.ok(signals.every((signal) => signal.aborted));
});
test("work throws at once; closing fails", timed, async () => {
  const items = { [Symbol.iterator]: () => ({ next: () => ({ value: 1, done: false }), return() { throw new Error("closing"); } }) };
  await assert.rejects(mapLimit(items, 2, () => { throw new TypeError("now"); }), /now/);
  await assert.rejects(mapLimit([1], 2, () => Promise.reject(undefined)).catch((error) => { throw new Error(`got ${error}`); }), /got undefined/);
});
test("the iterator throws", timed, async () => {
  let done = false, closed = false, n = 0;
  const items = { [Symbol.iterator]: () => ({ next() { if (n++) throw new Error("source"); return { value: 1, done: false }; }, return() { closed = true; return {}; } }) };
  await assert.rejects(mapLimit(items, 2, async (_, __, signal) => { await wait(20); done = signal.aborted; }), /source/);
  assert.deepStrictEqual([done, closed], [true, false]);
});
test("abort", timed, async () => {
  const log = [], controller = new AbortController();
  let ended = 0;
  const counted = controller.signal;
  let listeners = 0;
  const add = counted.addEventListener.bind(counted), remove = counted.removeEventListener.bind(counted);
  counted.addEventListener = (...rest) => { listeners++; add(...rest); };
  counted.removeEventListener = (...rest) => { listeners--; remove(...rest); };
  await mapLimit([1, 2], 1, async (n) => n, { signal: counted });
  assert.strictEqual(listeners, 0);
  setTimeout(() => controller.abort(new Error("enough")), 10);
  await assert.rejects(mapLimit(endless(log), 2, async (n, index, signal) => {
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    await wait(10);
    ended++;
  }, { signal: counted }), /enough/);
  assert.strictEqual(ended, 2);
  assert.deepStrictEqual(log, [0, 1, "closed"]);
  const none = [];
  await assert.rejects(mapLimit(endless(none), 2, async () => 1, { signal: AbortSignal.abort(new Error("early")) }), /early/);
  assert.deepStrictEqual(none, []);
});
test("settle", timed, async () => {
  const bad = new Error("bad");
  const result = await mapLimit([1, 2, 3], 2, (n) => { if (n === 2) throw bad; return wait(n).then(() => n); }, { settle: true });
  assert.deepStrictEqual(result, [{ value: 1 }, { error: bad }, { value: 3 }]);
});
test("limits", timed, async () => {
  for (const limit of [0, -1, 1.5, NaN, "2", undefined]) await assert.rejects(mapLimit([1], limit, async () => 1), RangeError);
});
