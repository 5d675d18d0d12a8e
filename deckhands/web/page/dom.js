// Elements made from text. Nothing that was read is ever parsed as markup: texts become text nodes.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g;
export const MOST_CHARS = 20_000;

/** Spell out what a reader would not see or what would reorder a line: control, bidirectional and invisible characters. */
export function clean(text) {
  return String(text ?? "").replace(/\r\n/g, "\n").replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Make an element. Attributes that begin with `on` are listeners; children are nodes or texts. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return made;
}

/** Return a text as a block that keeps its lines; of a very long one the beginning, and a button for the rest. */
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

export function note(text, kind = "") {
  const made = el("p", { class: `notice ${kind}` }, text);
  document.getElementById("notices").append(made);
  setTimeout(() => made.remove(), kind === "bad" ? 12_000 : 5_000);
}

/** Ask for a line of text; null if nothing is to be done. */
export function askFor(title, label, { value = "", required = true, action = "OK" } = {}) {
  return new Promise((resolve) => {
    const input = el("input", { id: "asked", value, required, maxlength: 500, autocomplete: "off" });
    const dialog = el("dialog", { "aria-labelledby": "asked-title" },
      el("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); dialog.close("yes"); } },
        el("h2", { id: "asked-title" }, title),
        el("label", { for: "asked" }, label), input,
        el("div", { class: "row end" },
          el("button", { type: "button", class: "quiet", onclick: () => dialog.close("") }, "Cancel"),
          el("button", { class: "main" }, action))));
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes" ? input.value : null); });
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}
