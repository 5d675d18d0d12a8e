"use strict";

class Emitter {
  constructor() {
    this.listeners = {};
  }

  on(name, listener) {
    (this.listeners[name] = this.listeners[name] || []).push(listener);
  }

  once(name, listener) {
    const wrapped = (...values) => {
      listener(...values);
      this.off(name, wrapped);
    };
    this.on(name, wrapped);
  }

  off(name, listener) {
    const list = this.listeners[name] || [];
    const at = list.indexOf(listener);
    list.splice(at, 1);
  }

  emit(name, ...values) {
    const list = this.listeners[name] || [];
    for (let at = 0; at < list.length; at++) list[at](...values);
  }
}

module.exports = { Emitter };
