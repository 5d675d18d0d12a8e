"use strict";

function parse(text) {
  const result = {};
  for (const piece of text.split("&")) {
    const [key, value] = piece.split("=");
    result[decodeURIComponent(key)] = decodeURIComponent(value || "");
  }
  return result;
}

function stringify(fields) {
  return Object.keys(fields)
    .map((key) => encodeURIComponent(key) + "=" + encodeURIComponent(fields[key]))
    .join("&");
}

module.exports = { parse, stringify };
