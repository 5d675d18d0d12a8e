"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { parse, stringify } = require("../query.js");

const parsed = (text) => Object.fromEntries(Object.entries(parse(text)));

test("repeated keys", () => {
  assert.deepStrictEqual(parsed("tag=a&tag=b&tag=c&x=1"), { tag: ["a", "b", "c"], x: "1" });
});
test("plus and equals", () => {
  assert.deepStrictEqual(parsed("q=red+shoes&c%2B+=a%2Bb&eq=a=b="), { q: "red shoes", "c+ ": "a+b", eq: "a=b=" });
});
test("empty pieces", () => {
  assert.deepStrictEqual(parsed("?a=1&&b&"), { a: "1", b: "" });
  assert.deepStrictEqual(parsed(""), {});
  assert.deepStrictEqual(parsed("?"), {});
  assert.deepStrictEqual(parsed("a=?"), { a: "?" });
});
test("broken escapes", () => {
  assert.deepStrictEqual(parsed("p=100%&q=%zz&r=%C3%A9%&s=%41%"), { p: "100%", q: "%zz", r: "é%", s: "A%" });
  assert.deepStrictEqual(parsed("x=%FF%42"), { x: "%FFB" });
});
test("names of the prototype", () => {
  const fields = parse("toString=1&__proto__=2&constructor=3&constructor=4");
  assert.strictEqual(fields["toString"], "1");
  assert.strictEqual(fields["__proto__"], "2");
  assert.deepStrictEqual(fields["constructor"], ["3", "4"]);
});
test("stringify", () => {
  assert.strictEqual(stringify({ a: ["x", null, "y z"], b: undefined, c: null, d: "", e: 0, f: [] }), "a=x&a=y%20z&d=&e=0");
  assert.deepStrictEqual(parsed(stringify({ k: ["1+1", "ü&="] })), { k: ["1+1", "ü&="] });
});
