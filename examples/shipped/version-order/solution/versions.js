"use strict";

const NUMBER = "(?:0|[1-9][0-9]*)";
const PART = `(?:${NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)`;
const VERSION = new RegExp(`^v?(${NUMBER})\\.(${NUMBER})\\.(${NUMBER})(?:-(${PART}(?:\\.${PART})*))?(?:\\+[0-9A-Za-z-]+(?:\\.[0-9A-Za-z-]+)*)?$`);

function parse(text) {
  const found = VERSION.exec(text);
  if (!found) throw new TypeError(`not a version: ${text}`);
  return { numbers: found.slice(1, 4).map(BigInt), pre: found[4] ? found[4].split(".") : [] };
}

const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

function comparePart(a, b) {
  const digits = [a, b].map((part) => /^[0-9]+$/.test(part));
  if (digits[0] && digits[1]) return order(BigInt(a), BigInt(b));
  return digits[0] ? -1 : digits[1] ? 1 : order(a, b);
}

function compareParsed(a, b) {
  for (let at = 0; at < 3; at++) {
    if (a.numbers[at] !== b.numbers[at]) return order(a.numbers[at], b.numbers[at]);
  }
  if (!a.pre.length || !b.pre.length) return order(b.pre.length, a.pre.length) && (a.pre.length ? -1 : 1);
  for (let at = 0; at < Math.min(a.pre.length, b.pre.length); at++) {
    const found = comparePart(a.pre[at], b.pre[at]);
    if (found) return found;
  }
  return order(a.pre.length, b.pre.length);
}

function compare(a, b) {
  return compareParsed(parse(a), parse(b));
}

function comparison(text) {
  const [, operator, rest] = /^(\^|~|>=|<=|>|<|=)?(.*)$/.exec(text);
  const base = parse(rest);
  const tests = {
    ">=": (c) => c >= 0, "<=": (c) => c <= 0, ">": (c) => c > 0, "<": (c) => c < 0, "=": (c) => c === 0,
  };
  if (operator !== "^" && operator !== "~") return { base, test: (v) => tests[operator || "="](compareParsed(v, base)) };
  let fixed = 2;
  if (operator === "^") {
    fixed = base.numbers.findIndex((number) => number !== 0n) + 1;
    if (fixed === 0) fixed = 3;
  }
  const same = (v) => base.numbers.slice(0, fixed).every((number, at) => v.numbers[at] === number);
  return { base, test: (v) => same(v) && compareParsed(v, base) >= 0 };
}

function fitsAll(version, text) {
  const comparisons = text.trim().split(/\s+/).filter((part) => part && part !== "*").map(comparison);
  if (version.pre.length) {
    const named = comparisons.some(({ base }) => base.pre.length && base.numbers.every((number, at) => number === version.numbers[at]));
    if (!named) return false;
  }
  return comparisons.every(({ test }) => test(version));
}

function newest(list, range) {
  let best = null;
  for (const text of list) {
    if (!VERSION.test(text)) continue;
    const version = parse(text);
    if (!range.split("||").some((part) => fitsAll(version, part))) continue;
    if (best === null || compare(text, best) > 0) best = text;
  }
  return best;
}

module.exports = { compare, newest };
