"use strict";
const test = require("node:test");
const assert = require("node:assert");
const { mapLimit } = require("../limit.js");

test("doubles", async () => {
  assert.deepStrictEqual(await mapLimit([1, 2, 3], 5, async (n) => n * 2), [2, 4, 6]);
});
