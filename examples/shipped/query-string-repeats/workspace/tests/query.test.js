"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { parse, stringify } = require("../query.js");

test("plain fields", () => {
  assert.strictEqual(parse("a=1&b=%C3%A9").b, "é");
  assert.strictEqual(stringify({ a: 1, b: "é" }), "a=1&b=%C3%A9");
});
