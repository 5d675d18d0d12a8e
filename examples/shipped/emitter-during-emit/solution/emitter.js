"use strict";

class Emitter {
  constructor() {
    this.listeners = new Map();
  }

  add(name, listener, once) {
    const entry = { listener, once, live: true };
    if (!this.listeners.has(name)) this.listeners.set(name, []);
    this.listeners.get(name).push(entry);
    return () => this.remove(name, entry);
  }

  remove(name, entry) {
    entry.live = false;
    this.listeners.set(name, this.entries(name).filter((other) => other !== entry));
  }

  entries(name) {
    return this.listeners.get(name) || [];
  }

  on(name, listener) {
    return this.add(name, listener, false);
  }

  once(name, listener) {
    return this.add(name, listener, true);
  }

  off(name, listener) {
    const entry = this.entries(name).filter((other) => other.listener === listener).pop();
    if (entry) this.remove(name, entry);
  }

  emit(name, ...values) {
    const turns = name === "*" ? [] : this.entries(name).map((entry) => [entry, name, values]);
    for (const entry of this.entries("*")) turns.push([entry, "*", [name, ...values]]);
    const errors = [];
    for (const [entry, key, given] of turns) {
      if (!entry.live) continue;
      if (entry.once) this.remove(key, entry);
      try {
        entry.listener(...given);
      } catch (error) {
        errors.push(error);
      }
    }
    if (errors.length === 1) throw errors[0];
    if (errors.length) throw new AggregateError(errors, `listeners of ${String(name)} failed`);
    return turns.length > 0;
  }
}

module.exports = { Emitter };
