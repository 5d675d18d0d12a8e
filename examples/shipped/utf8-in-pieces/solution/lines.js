"use strict";

class Lines {
  constructor(options = {}) {
    this.limit = options.limit ?? Infinity;
    this.reset();
  }

  reset() {
    this.decoder = new TextDecoder("utf-8");
    this.rest = "";
  }

  check(line) {
    if (line.length > this.limit) throw new RangeError(`a line has more than ${this.limit} characters`);
    return line;
  }

  push(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const lines = this.rest.split("\n");
    this.rest = lines.pop();
    // a line feed may follow the last carriage return
    this.check(this.rest.replace(/\r$/, ""));
    return lines.map((line) => this.check(line.replace(/\r$/, "")));
  }

  end() {
    const rest = this.rest + this.decoder.decode();
    this.reset();
    return rest ? [this.check(rest)] : [];
  }
}

module.exports = { Lines };
