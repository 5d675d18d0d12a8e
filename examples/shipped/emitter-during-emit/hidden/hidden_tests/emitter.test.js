"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { Emitter } = require("../emitter.js");

function made() {
  const calls = [];
  const note = (name) => (...values) => { calls.push([name, ...values].join(" ")); };
  return { emitter: new Emitter(), calls, note };
}

test("removal during emit", () => {
  const { emitter, calls, note } = made();
  const a = () => { calls.push("a"); emitter.off("x", a); };
  const c = note("c");
  emitter.on("x", a);
  emitter.on("x", () => { calls.push("b"); emitter.off("x", c); emitter.on("x", note("late")); });
  emitter.on("x", c);
  emitter.on("x", note("d"));
  emitter.emit("x");
  assert.deepStrictEqual(calls, ["a", "b", "d"]);
});
test("once", () => {
  const { emitter, calls, note } = made();
  emitter.once("x", note("a"));
  emitter.once("x", note("b"));
  emitter.on("x", note("c"));
  emitter.emit("x", 1, 2);
  emitter.emit("x", 3);
  assert.deepStrictEqual(calls, ["a 1 2", "b 1 2", "c 1 2", "c 3"]);
});
test("once that emits", () => {
  const { emitter, calls } = made();
  emitter.once("x", () => { calls.push("a"); if (calls.length < 5) emitter.emit("x"); });
  emitter.emit("x");
  assert.deepStrictEqual(calls, ["a"]);
});
test("once in a nested emit runs only once", () => {
  const { emitter, calls, note } = made();
  let nested = false;
  emitter.on("x", () => { if (!nested) { nested = true; emitter.emit("x"); } });
  emitter.once("x", note("once"));
  emitter.emit("x");
  assert.deepStrictEqual(calls, ["once"]);
});
test("off", () => {
  const { emitter, calls, note } = made();
  const a = note("a"), b = note("b");
  emitter.once("x", a);
  emitter.off("x", a);
  emitter.on("x", b);
  emitter.off("x", a);
  emitter.off("nothing", a);
  emitter.emit("x");
  assert.deepStrictEqual(calls, ["b"]);
});
test("twice", () => {
  const { emitter, calls, note } = made();
  const a = note("a");
  emitter.on("x", a);
  emitter.on("x", note("b"));
  emitter.on("x", a);
  emitter.off("x", a);
  emitter.emit("x");
  assert.deepStrictEqual(calls, ["a", "b"]);
});
test("the function that on returns", () => {
  const { emitter, calls, note } = made();
  const a = note("a");
  const remove = emitter.on("x", a);
  emitter.on("x", note("b"));
  emitter.on("x", a);
  remove();
  remove();
  emitter.once("y", a)();
  emitter.emit("x");
  emitter.emit("y");
  assert.deepStrictEqual(calls, ["b", "a"]);
});
test("errors", () => {
  const { emitter, calls, note } = made();
  const one = new Error("one"), two = new Error("two");
  emitter.once("x", () => { throw one; });
  emitter.on("x", note("a"));
  assert.throws(() => emitter.emit("x"), (error) => error === one);
  emitter.emit("x");
  emitter.on("x", () => { throw two; });
  emitter.on("*", () => { throw one; });
  assert.throws(() => emitter.emit("x"), (error) => error instanceof AggregateError && error.errors[0] === two && error.errors[1] === one);
  assert.deepStrictEqual(calls, ["a", "a", "a"]);
  emitter.on("u", () => { throw undefined; });
  assert.throws(() => emitter.emit("u"));
});
test("star and odd names", () => {
  const { emitter, calls, note } = made();
  assert.strictEqual(emitter.emit("constructor"), false);
  emitter.on("*", note("star"));
  emitter.on("constructor", note("a"));
  assert.strictEqual(emitter.emit("constructor", 1), true);
  assert.strictEqual(emitter.emit("other"), true);
  assert.strictEqual(emitter.emit("*"), true);
  emitter.on("__proto__", note("p"));
  emitter.emit("__proto__");
  assert.deepStrictEqual(calls, ["a 1", "star constructor 1", "star other", "star *", "p", "star __proto__"]);
});
