"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { Lines } = require("../lines.js");

function all(bytes, size, options) {
  const lines = new Lines(options);
  const result = [];
  for (let at = 0; at < bytes.length; at += size) result.push(...lines.push(new Uint8Array(bytes.subarray(at, at + size))));
  result.push(...lines.end());
  return result;
}

test("any pieces", () => {
  for (const [text, expected] of [
    ["grün\n日本\r\n😀 a\rb\n", ["grün", "日本", "😀 a\rb"]],
    ["a\n\n\r\nb", ["a", "", "", "b"]],
    ["a\r", ["a\r"]],
    ["", []],
    ["\n", [""]],
    ["a\r\r\nb", ["a\r", "b"]],
    ["\ufeffa\n\ufeffb", ["a", "\ufeffb"]],
  ]) {
    for (let size = 1; size <= 12; size++) assert.deepStrictEqual(all(Buffer.from(text), size), expected);
  }
});
test("incomplete at the end", () => {
  assert.deepStrictEqual(all(Buffer.from([0x61, 0xf0, 0x9f, 0x98]), 2), ["a\ufffd"]);
  assert.deepStrictEqual(all(Buffer.from([0xe2, 0x82]), 1), ["\ufffd"]);
});
test("no input", () => assert.deepStrictEqual(new Lines().end(), []));
test("again", () => {
  const lines = new Lines();
  lines.push(Buffer.from([0x61, 0xe2]));
  assert.deepStrictEqual(lines.end(), ["a\ufffd"]);
  assert.deepStrictEqual(lines.push(Buffer.from("\ufeffx\ny")), ["x"]);
  assert.deepStrictEqual(lines.end(), ["y"]);
  assert.deepStrictEqual(lines.end(), []);
});
test("limit", () => {
  for (let size = 1; size < 9; size++) {
    assert.deepStrictEqual(all(Buffer.from("abc\r\nabc\nabc"), size, { limit: 3 }), ["abc", "abc", "abc"]);
    assert.throws(() => all(Buffer.from("abc\nabcd\n"), size, { limit: 3 }), RangeError);
    assert.throws(() => all(Buffer.from("abc\r"), size, { limit: 3 }), RangeError);
    assert.throws(() => all(Buffer.from("abc\rd"), size, { limit: 3 }), RangeError);
  }
  const lines = new Lines({ limit: 3 });
  assert.throws(() => lines.push(Buffer.from("abcd")), RangeError);
  const long = new Lines({ limit: 3 });
  assert.throws(() => long.push(Buffer.from("abc\rd")), RangeError);
});
