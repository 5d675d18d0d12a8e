"use strict";

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function fits(version, range) {
  if (range === "*") return true;
  if (range[0] === "^") return version.split(".")[0] === range.slice(1).split(".")[0] && compare(version, range.slice(1)) >= 0;
  if (range.startsWith(">=")) return compare(version, range.slice(2)) >= 0;
  return version === range;
}

function newest(list, range) {
  const fitting = list.filter((version) => fits(version, range)).sort(compare);
  return fitting.length ? fitting[fitting.length - 1] : null;
}

module.exports = { compare, newest };
