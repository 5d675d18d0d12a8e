"use strict";

class Lines {
  constructor(options = {}) {
    this.limit = options.limit;
    this.rest = "";
  }

  push(bytes) {
    this.rest += Buffer.from(bytes).toString("utf8");
    const lines = this.rest.split("\n");
    this.rest = lines.pop();
    return lines;
  }

  end() {
    return [this.rest];
  }
}

module.exports = { Lines };
