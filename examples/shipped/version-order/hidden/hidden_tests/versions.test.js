"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { compare, newest } = require("../versions.js");

test("order", () => {
  const sorted = ["0.9.9", "1.0.0-1", "1.0.0-2", "1.0.0-10", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta.2",
    "1.0.0-beta.11", "1.0.0-rc", "1.0.0-rc-1", "1.0.0", "1.9.0", "1.10.0", "10.0.0", "99999999999999999999.0.0", "99999999999999999999.0.1"];
  sorted.forEach((a, i) => sorted.forEach((b, k) => assert.strictEqual(compare(a, b), Math.sign(i - k), `${a} ${b}`)));
  assert.strictEqual(compare("v1.0.0+5", "1.0.0+6"), 0);
  assert.strictEqual(compare("1.0.0-a+b-c", "1.0.0-a"), 0);
});
test("refused", () => {
  for (const text of ["1.0", "1.02.3", "1.0.0-01", "1.0.0-", "1.0.0-a..b", "x", "", "1.0.0.0", "1.0.0+", " 1.0.0"]) assert.throws(() => compare(text, "1.0.0"), TypeError, text);
  assert.strictEqual(compare("1.0.0-0a", "1.0.0-0a"), 0);
});
test("ranges", () => {
  const list = ["v0.0.3", "0.0.4", "0.2.3", "0.2.9", "0.3.0", "1.2.3-rc.1", "1.2.3-rc.2", "1.2.2", "1.2.4-rc.1", "1.9.0", "1.10.0", "junk", "2.0.0-beta", "2.0.0", "2.0.1-a", "3"];
  for (const [range, expected] of [
    ["*", "2.0.0"], ["^1.2.3", "1.10.0"], ["^0.2.3", "0.2.9"], ["^0.0.3", "v0.0.3"], ["~1.2.0", "1.2.2"], ["~0.2.3", "0.2.9"],
    [">=1.2.0 <2.0.0", "1.10.0"], [">1.10.0 <2.0.0", null], ["<=1.9.0", "1.9.0"], ["=1.2.2", "1.2.2"], ["1.2.2", "1.2.2"], ["<0.2.0 || ^0.3.0", "0.3.0"],
    ["^1.2.3-rc.1 <1.9.0", "1.2.3-rc.2"], ["^2.0.0-beta", "2.0.0"], [">2.0.0-alpha <2.0.0", "2.0.0-beta"], [">2.0.0", null], ["~1.2.3-rc.1", "1.2.3-rc.2"],
    ["1.2.3-rc.1", "1.2.3-rc.1"], ["<1.0.0 || >=2.0.0-alpha <=2.0.0-beta", "2.0.0-beta"], [">=1.2.4-a <1.9.0 || 0.2.3", "1.2.4-rc.1"],
  ]) assert.strictEqual(newest(list, range), expected, range);
});
