// Elements made from text. Text that was read is never parsed as markup: it becomes text nodes.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g;
/** Attributes that users read or hear. */
const READ = new Set(["aria-label", "title", "alt", "placeholder"]);
export const MOST_CHARS = 20_000;

/** Escape characters that are invisible or would reorder a line: control, bidirectional and invisible characters. */
export function clean(text) {
  return String(text ?? "").replace(/\r\n/g, "\n").replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Name the page in the browser's tab. */
export function named(text) {
  document.title = `${clean(text).slice(0, 200)} · Deckhands`;
}

/** Make an element. Attributes that start with `on` are listeners; children are nodes or texts. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : READ.has(key) ? clean(value) : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return made;
}

/** Return a text as a block that keeps its lines; a very long one is cut, with a button for the rest. */
export function block(text, attributes = {}) {
  const whole = String(text ?? "");
  const made = el("pre", { tabindex: whole.split("\n", 30).length >= 20 || whole.length > 2000 ? 0 : undefined, ...attributes });
  made.append(document.createTextNode(clean(whole.slice(0, MOST_CHARS))));
  if (whole.length <= MOST_CHARS) return made;
  const more = el("button", { type: "button", class: "quiet", onclick: () => {
    made.append(document.createTextNode(clean(whole.slice(MOST_CHARS, MOST_CHARS + 500_000))));
    more.remove();
  } }, `Show ${(whole.length - MOST_CHARS).toLocaleString("en")} more characters`);
  return el("div", {}, made, more);
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
}

export function time(text) {
  const at = new Date(text);
  if (!text || Number.isNaN(at.getTime())) return "";
  const shown = at.toISOString();
  return el("time", { datetime: shown, title: `${shown.slice(0, 19).replace("T", " ")} UTC` }, at.toLocaleTimeString());
}

export function ago(text) {
  const seconds = Math.max(0, (Date.now() - new Date(text).getTime()) / 1000);
  if (!text || Number.isNaN(seconds)) return "";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return `${Math.floor(seconds)} s ago`;
}

export function usd(value) {
  const number = Number(value);
  return Number.isFinite(number) ? `$${number.toFixed(number && number < 1 ? 4 : 2)}` : "";
}

/** Return a cost as the command line does: a lower bound is marked if a price is not known. */
export function costText(value, isWhole) {
  if (isWhole) return usd(value);
  return Number(value) ? `at least ${usd(value)}` : "unknown";
}

export function note(text, kind = "") {
  const made = el("p", { class: `notice ${kind}` }, text);
  document.getElementById("notices").append(made);
  setTimeout(() => made.remove(), kind === "bad" ? 12_000 : 5_000);
}

/** Return a table; on a narrow screen, each cell is in a line with its column's name. A column whose name starts with # has numbers; a cell is a text, a node or several of them. */
export function grid(head, rows) {
  const kinds = head.map((name) => name.startsWith("#") ? "number" : undefined);
  return el("table", { class: "labelled" }, el("thead", {}, el("tr", {}, head.map((name, at) => el("th", { scope: "col", class: kinds[at] }, name.replace(/^#/, ""))))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", { class: kinds[at], "data-label": head[at].replace(/^#/, "") }, cell))))));
}

export function duration(seconds) {
  const whole = Math.max(0, Number(seconds) || 0);
  if (whole < 10) return `${whole.toFixed(1)} s`;
  if (whole < 60) return `${Math.round(whole)} s`;
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${Math.floor(whole % 60)} s` : `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Save a blob as a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Ask for some texts: `fields` are {name, label, value, required, isLong}. Returns their values by name; null if the user cancels. */
export function askForAll(title, fields, { action = "OK", says = "" } = {}) {
  return new Promise((resolve) => {
    const inputs = fields.map((one) => el(one.isLong ? "textarea" : "input", { id: `asked-${one.name}`, required: one.required, maxlength: one.isLong ? 200_000 : 500, autocomplete: "off",
      spellcheck: one.isLong ? "false" : undefined, class: one.isLong ? "mono" : undefined, rows: one.isLong ? Math.min(14, Math.max(2, String(one.value || "").split("\n").length)) : undefined }));
    inputs.forEach((input, at) => { input.value = fields[at].value || ""; });
    const dialog = el("dialog", { "aria-labelledby": "asked-title", class: fields.some((one) => one.isLong) ? "broad" : undefined },
      el("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); dialog.close("yes"); } },
        el("h2", { id: "asked-title" }, title), says ? el("p", { class: "dim" }, says) : "",
        fields.map((one, at) => [el("label", { for: inputs[at].id }, one.label), inputs[at]]),
        el("div", { class: "row end" },
          el("button", { type: "button", class: "quiet", onclick: () => dialog.close("") }, "Cancel"),
          el("button", { class: "main" }, action))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? Object.fromEntries(fields.map((one, at) => [one.name, inputs[at].value])) : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    inputs[0].focus();
  });
}

/** Ask for a line of text; null if the user cancels. */
export async function askFor(title, label, { value = "", required = true, action = "OK" } = {}) {
  const found = await askForAll(title, [{ name: "text", label, value, required }], { action });
  return found && found.text;
}
