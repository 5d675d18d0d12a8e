// Small SVG charts: a line over time, bars, a share. Each has a text alternative.

import { clean } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 64;

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

function titled(name, attributes, text) {
  const title = shape("title", {});
  title.textContent = clean(text);
  return shape(name, attributes, title);
}

function picture(words, attributes, ...children) {
  return shape("svg", { role: "img", "aria-label": clean(words), preserveAspectRatio: "none", ...attributes }, ...children);
}

/** Draw values over time: `points` are [milliseconds, value], in order; a gap of more than `gapMs` breaks the line. */
export function line(words, points, { gapMs = 20_000 } = {}) {
  const from = points[0]?.[0] ?? 0, span = Math.max(1, (points.at(-1)?.[0] ?? 1) - from);
  const most = Math.max(...points.map(([, value]) => value), 0) || 1;
  const at = ([when, value]) => [(WIDTH * (when - from)) / span, HEIGHT - 2 - ((HEIGHT - 6) * value) / most];
  const runs = [];
  points.forEach((point, number) => {
    if (!number || point[0] - points[number - 1][0] > gapMs) runs.push([]);
    runs.at(-1).push(at(point).map((each) => each.toFixed(1)));
  });
  const made = picture(words, { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, shape("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }));
  for (const run of runs) {
    if (run.length < 2) continue;
    const path = run.map((point) => point.join(",")).join(" ");
    made.append(shape("polygon", { class: "area", points: `${run[0][0]},${HEIGHT - 1} ${path} ${run.at(-1)[0]},${HEIGHT - 1}` }),
      shape("polyline", { class: "line", points: path }));
  }
  return made;
}

/** Draw a histogram: `counts` in bins from 0 to `most`; `show` formats a value. */
export function histogram(words, counts, most, tallest, show) {
  const width = 100 / counts.length;
  return picture(words, { class: "histogram", viewBox: "0 0 100 100" }, ...counts.map((count, number) => {
    const height = count ? Math.max(2, (100 * count) / Math.max(1, tallest)) : 0;
    return titled("rect", { x: number * width + width * 0.06, y: 100 - height, width: width * 0.88, height },
      `${show((most * number) / counts.length)} to ${show((most * (number + 1)) / counts.length)}: ${count}`);
  }));
}

/** Draw the parts of a whole as a stacked bar: `parts` are [class, number, name]. */
export function stacked(words, parts) {
  const sum = parts.reduce((total, [, value]) => total + value, 0) || 1;
  let from = 0;
  return picture(words, { class: "stacked", viewBox: "0 0 100 10" }, ...parts.filter(([, value]) => value).map(([kind, value, name]) => {
    const made = titled("rect", { class: kind, x: from, y: 0, width: (100 * value) / sum, height: 10 }, `${name}: ${value}`);
    from += (100 * value) / sum;
    return made;
  }));
}

/** Draw a share, with its interval if known. */
export function share(words, value, interval) {
  const made = picture(words, { class: "share", viewBox: "0 0 100 10" }, shape("rect", { class: "back", x: 0, y: 4, width: 100, height: 2 }));
  if (interval) made.append(shape("rect", { class: "interval", x: 100 * interval[0], y: 2.5, width: Math.max(1, 100 * (interval[1] - interval[0])), height: 5 }));
  if (value !== null) made.append(shape("rect", { class: "point", x: Math.min(98, 100 * value), y: 0, width: 2, height: 10 }));
  return made;
}

/** Draw the used part of a limit. */
export function meter(words, used) {
  const part = Math.max(0, Math.min(1, used));
  return picture(words, { class: part > 0.9 ? "meter full" : "meter", viewBox: "0 0 100 10" },
    shape("rect", { class: "back", x: 0, y: 0, width: 100, height: 10 }), shape("rect", { class: "used", x: 0, y: 0, width: 100 * part, height: 10 }));
}
