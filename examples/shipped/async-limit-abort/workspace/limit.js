"use strict";

async function mapLimit(items, limit, work, options = {}) {
  const results = [];
  let running = 0;
  for (const [index, item] of [...items].entries()) {
    while (running > limit) await null;
    running++;
    work(item, index).then((value) => {
      running--;
      results.push(value);
    });
  }
  while (running > 0) await new Promise((resolve) => setTimeout(resolve, 1));
  return results;
}

module.exports = { mapLimit };
