"use strict";

async function mapLimit(items, limit, work, options = {}) {
  if (limit !== Infinity && !(Number.isInteger(limit) && limit >= 1)) throw new RangeError(`not a limit: ${limit}`);
  const outer = options.signal;
  if (outer?.aborted) throw outer.reason;

  const results = [];
  const running = new Set();
  const inner = new AbortController();
  let failure = null;
  let wake = () => {};

  function fail(error) {
    if (!failure) {
      failure = { error };
      inner.abort(error);
    }
    wake();
  }

  async function run(item, index) {
    try {
      const value = await work(item, index, inner.signal);
      results[index] = options.settle ? { value } : value;
    } catch (error) {
      if (options.settle) results[index] = { error };
      else fail(error);
    }
  }

  const onAbort = () => fail(outer.reason);
  outer?.addEventListener("abort", onAbort);
  try {
    const iterator = items[Symbol.asyncIterator] ? items[Symbol.asyncIterator]() : items[Symbol.iterator]();
    let open = true;
    for (let index = 0; !failure; index++) {
      let next;
      try {
        next = await iterator.next();
      } catch (error) {
        open = false;
        fail(error);
        break;
      }
      if (next.done) {
        open = false;
        break;
      }
      if (failure) break;
      const call = run(next.value, index).finally(() => {
        running.delete(call);
        wake();
      });
      running.add(call);
      await null;
      while (running.size >= limit && !failure) await new Promise((resolve) => { wake = resolve; });
    }
    await Promise.all(running);
    if (failure && open) {
      try {
        await iterator.return?.();
      } catch {
        // the first error is the one to tell
      }
    }
  } finally {
    outer?.removeEventListener("abort", onAbort);
  }
  if (failure) throw failure.error;
  return results;
}

module.exports = { mapLimit };
