// Runs the tests of a file of node:test with the code under test, and reports those that have passed; see guarded.py.
//
// Holds: before the code under test runs, the token is read into memory that no other object shares, and the language
// (`--frozen-intrinsics`), the globals and node:assert are frozen. The code under test gets no module by which it could
// reach files, processes, the debugger or the test framework. From then on, nothing here looks up what it could change.
// Does not: keep it from searching the memory of its process in ways that are not known here.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const Module = require("node:module");
const assert = require("node:assert");

const descriptor = Number(process.env.DECKHANDS_REPORT_FD);
delete process.env.DECKHANDS_REPORT_FD;
const token = Buffer.alloc(64); // not of the pool that other buffers are parts of
const input = Buffer.alloc(4 * 1024 * 1024);
let size = 0;
for (let count; (count = fs.readSync(0, input, size, input.length - size)) > 0; ) size += count;
input.copy(token, 0, 0, 64);
const texts = JSON.parse(input.toString("utf8", 64, size));
input.fill(0);

const { writeSync } = fs;
const { stringify } = JSON;
const { resolve } = path;
const files = { __proto__: null, list: Object.keys(texts), count: Object.keys(texts).length };
const HARMLESS = Object.assign(Object.create(null), Object.fromEntries([
  ...["util", "events", "buffer", "string_decoder", "timers", "timers/promises", "url", "querystring", "path", "punycode"],
  ...["async_hooks", "stream", "stream/promises", "perf_hooks", "assert", "assert/strict"],
].flatMap((name) => [[name, true], [`node:${name}`, true]])));
const passed = Object.create(null);
let last = null; // of the tests of a file, each with the one before it
let hasFailed = false;
let isOpen = true; // the tests load their own modules first

function test(name, options, body) {
  const hasOptions = typeof options !== "function";
  last = { __proto__: null, name, run: hasOptions ? body : options, limit: hasOptions ? options.timeout : 0, before: last };
}
test.test = test.it = test;

const { isBuiltin } = Module;
const load = Module._load.bind(Module);
Module._load = (request, parent, isMain) => {
  if (isBuiltin(request)) {
    if (isOpen && request === "node:test") return test;
    if (!isOpen && HARMLESS[request] !== true) throw new Error(`${request} cannot be used by code under test`);
  } else {
    isOpen = false;
  }
  return load(request, parent, isMain);
};
for (const name of ["binding", "_linkedBinding", "dlopen", "getBuiltinModule", "report", "mainModule", "reallyExit", "kill"]) {
  delete process[name];
}
process.on("unhandledRejection", () => { hasFailed = true; });
process.on("uncaughtException", () => { hasFailed = true; });
const frozen = [test, assert, assert.strict, assert.AssertionError, assert.AssertionError.prototype, Buffer, Buffer.prototype];
for (const one of frozen) Object.freeze(one);
for (const [name, about] of Object.entries(Object.getOwnPropertyDescriptors(globalThis))) {
  if (!about.configurable) continue;
  const value = globalThis[name];
  Object.defineProperty(globalThis, name, { value, writable: false, configurable: false, enumerable: about.enumerable });
}
const { setTimeout, clearTimeout } = globalThis;

async function limited(run, limit) {
  if (!(limit > 0)) return run();
  return new Promise((done, fail) => {
    const timer = setTimeout(() => fail(new Error(`it took longer than ${limit} ms`)), limit);
    (async () => {
      try {
        done(await run());
      } catch (error) {
        fail(error);
      }
      clearTimeout(timer);
    })();
  });
}

(async () => {
  for (let number = 0; number < files.count; number++) {
    const file = files.list[number];
    last = null;
    isOpen = true;
    const tests = new Module(resolve(file), null);
    tests.filename = resolve(file);
    tests.paths = [];
    tests._compile(texts[file], tests.filename);
    for (let one = last; one !== null; one = one.before) {
      hasFailed = false;
      try {
        await limited(one.run, one.limit);
        if (!hasFailed) passed[`${file}::${one.name}`] = "passed";
      } catch (error) {
        console.log(`${one.name}: ${(error && error.stack) || error}`);
      }
    }
  }
  writeSync(descriptor, token, 0, 64);
  writeSync(descriptor, `\n${stringify(passed)}`);
  process.exit(0);
})();
