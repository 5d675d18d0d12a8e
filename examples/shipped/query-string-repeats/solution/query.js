"use strict";

function decode(text) {
  return text.replace(/\+/g, " ").replace(/(?:%[0-9a-f]{2})+/gi, (run) => {
    try {
      return decodeURIComponent(run);
    } catch {
      return run.replace(/%[0-7][0-9a-f]/gi, decodeURIComponent);
    }
  });
}

function parse(text) {
  const result = Object.create(null);
  for (const piece of text.replace(/^\?/, "").split("&")) {
    if (!piece) continue;
    const at = piece.indexOf("=");
    const key = decode(at < 0 ? piece : piece.slice(0, at));
    const value = at < 0 ? "" : decode(piece.slice(at + 1));
    if (!(key in result)) result[key] = value;
    else if (Array.isArray(result[key])) result[key].push(value);
    else result[key] = [result[key], value];
  }
  return result;
}

function stringify(fields) {
  const pieces = [];
  for (const key of Object.keys(fields)) {
    for (const value of [].concat(fields[key])) {
      if (value === null || value === undefined) continue;
      pieces.push(encodeURIComponent(key) + "=" + encodeURIComponent(value));
    }
  }
  return pieces.join("&");
}

module.exports = { parse, stringify };
