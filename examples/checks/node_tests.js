// Runs the tests of a file of node:test with the code under test, and reports those that have passed; see guarded.py.
//
// Holds: the token is read, and node:assert frozen, before the code under test runs. That code gets no module by which
// it could reach files, processes, the debugger or the test framework.
// Does not: keep it from patching what the tests themselves use of the language.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const Module = require("node:module");

const descriptor = Number(process.env.DECKHANDS_REPORT_FD);
delete process.env.DECKHANDS_REPORT_FD;
const input = fs.readFileSync(0);
const token = Buffer.from(input.subarray(0, 64)); // outside of the heap, so that no snapshot has it
const texts = JSON.parse(input.subarray(64).toString());
const { writeSync } = fs;
const { stringify } = JSON;
const { exit } = process;
const timers = { set: setTimeout, clear: clearTimeout };

const assert = require("node:assert");
for (const one of [assert, assert.strict, assert.AssertionError, assert.AssertionError.prototype]) Object.freeze(one);

const HARMLESS = new Set(["util", "events", "buffer", "string_decoder", "timers", "timers/promises", "url", "querystring",
  "path", "punycode", "async_hooks", "stream", "stream/promises", "perf_hooks", "assert", "assert/strict"]);
const cases = [];
const passed = {};
let hasFailed = false;

function test(name, options, body) {
  const run = typeof options === "function" ? options : body;
  const limit = typeof options === "function" ? undefined : options && options.timeout;
  cases[cases.length] = { name, run, limit };
}
test.test = test.it = test;
Object.freeze(test);

const load = Module._load;
let isOpen = true; // the tests themselves come first
Module._load = function (request, parent, isMain) {
  const name = String(request).replace(/^node:/, "");
  if (Module.isBuiltin(request)) {
    if (name === "test" && isOpen) return test;
    if (!isOpen && !HARMLESS.has(name)) throw new Error(`${request} cannot be used by code under test`);
  } else {
    isOpen = false;
  }
  return load.call(Module, request, parent, isMain);
};
for (const name of ["binding", "_linkedBinding", "dlopen", "getBuiltinModule", "report", "mainModule", "reallyExit", "kill"]) {
  try {
    delete process[name];
  } catch {}
}
process.on("unhandledRejection", () => { hasFailed = true; });
process.on("uncaughtException", () => { hasFailed = true; });

function limited(run, limit) {
  return new Promise((resolve, reject) => {
    const timer = limit && timers.set(() => reject(new Error(`it took longer than ${limit} ms`)), limit);
    new Promise((done) => done(run())).then(resolve, reject).finally(() => timer && timers.clear(timer));
  });
}

(async () => {
  for (const file of Object.keys(texts)) {
    cases.length = 0;
    isOpen = true;
    const module_ = new Module(path.resolve(file), null);
    module_.filename = path.resolve(file);
    module_.paths = [];
    module_._compile(texts[file], module_.filename);
    for (let number = 0; number < cases.length; number++) {
      const { name, run, limit } = cases[number];
      hasFailed = false;
      try {
        await limited(run, limit);
        if (!hasFailed) passed[`${file}::${name}`] = "passed";
      } catch (error) {
        console.log(`${name}: ${(error && error.stack) || error}`);
      }
    }
  }
  writeSync(descriptor, Buffer.concat([token, Buffer.from("\n" + stringify(passed))]));
  exit.call(process, 0);
})();
