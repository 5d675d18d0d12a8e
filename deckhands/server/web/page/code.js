// Code with colours, long output that is folded and searched, and diffs side by side.

import { clean, el } from "./dom.js";
import { html, Nodes, useOpen, useState } from "./ui.js";
import DOMPurify from "./vendored/purify.js";

const LANGUAGES = ["bash", "c", "cpp", "css", "diff", "dockerfile", "go", "ini", "java", "javascript", "json", "makefile", "markdown", "python", "ruby",
  "rust", "sql", "typescript", "xml", "yaml"];
const ALIASES = { sh: "bash", shell: "bash", console: "bash", py: "python", js: "javascript", mjs: "javascript", jsx: "javascript", ts: "typescript", tsx: "typescript",
  html: "xml", svg: "xml", yml: "yaml", md: "markdown", rs: "rust", rb: "ruby", h: "c", cc: "cpp", hpp: "cpp", toml: "ini", cfg: "ini", jsonl: "json", patch: "diff" };
const MOST_COLOURED = 40_000, HEAD = 10, TAIL = 8, FOLDED = 26, SEARCHED = 40, MOST_LINES = 5_000, LINE_CHARS = 4_000;
let engine = null;

/** Load the highlighter and its languages, once. */
function load() {
  engine ??= (async () => {
    const core = (await import("./vendored/highlight.js")).default;
    const found = await Promise.all(LANGUAGES.map((name) => import(`./vendored/highlight-${name}.js`)));
    LANGUAGES.forEach((name, at) => core.registerLanguage(name, found[at].default));
    return core;
  })();
  return engine;
}

export const languageOf = (name) => {
  const wanted = String(name || "").toLowerCase();
  return ALIASES[wanted] || (LANGUAGES.includes(wanted) ? wanted : "");
};
export const languageOfPath = (path) => {
  const name = String(path || "").split("/").pop().toLowerCase();
  return languageOf(name === "dockerfile" || name === "makefile" ? name : name.includes(".") ? name.split(".").pop() : "");
};

/** Colour the text of an element, as soon as the highlighter is there. */
export function highlightIn(node, name) {
  const language = languageOf(name), text = node.textContent;
  if (!language || text.length > MOST_COLOURED) return;
  load().then((core) => {
    const { value } = core.highlight(text, { language, ignoreIllegals: true });
    node.replaceChildren(DOMPurify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
  }).catch(() => { /* it stays without colours */ });
}

/** Show code. */
export function Code({ text, language = "", ...attributes }) {
  return html`<${Nodes} name="pre" tabindex=${0} of=${[text, language]} make=${() => {
    const code = el("code", {}, text);
    highlightIn(code, language);
    return code;
  }} ...${attributes} />`;
}

/** Show output: a long one has its head and its tail, and can be opened and searched. `loadWhole` returns a text that was cut. */
export function Output({ id, text, loadWhole = null, language = "" }) {
  const [isOpen, setOpen] = useOpen(`${id}-output`);
  const [whole, setWhole] = useState(null);
  const [wanted, setWanted] = useState("");
  const content = whole ?? String(text ?? "");
  const lines = content.replace(/\n$/, "").split("\n", MOST_LINES + 1).map((line) => line.length > LINE_CHARS ? `${line.slice(0, LINE_CHARS)} … (${(line.length - LINE_CHARS).toLocaleString("en")} more characters)` : line);
  const isLong = lines.length > FOLDED || loadWhole !== null;
  if (!content) return html`<p class="dim none">no output</p>`;
  if (!isLong) return language ? html`<${Code} text=${content} language=${language} class="output" />` : html`<pre class="output" tabindex=${lines.length > 15 ? 0 : undefined}>${lines.join("\n")}</pre>`;
  const open = async () => {
    if (loadWhole && whole === null) setWhole(await loadWhole() ?? content);
    setOpen(true);
  };
  if (!isOpen) {
    const hidden = lines.length - HEAD - TAIL;
    const head = hidden > 0 ? lines.slice(0, HEAD).join("\n") : lines.join("\n");
    return html`<div class="folded"><pre class="output">${head}</pre>
      <button type="button" class="quiet more" onClick=${open}>${hidden > 0 ? `Show all ${loadWhole ? "" : `${lines.length.toLocaleString("en")} `}lines` : "Show the whole text"}</button>
      ${hidden > 0 ? html`<pre class="output">${lines.slice(-TAIL).join("\n")}</pre>` : ""}</div>`;
  }
  const sought = wanted.toLowerCase();
  const found = sought ? lines.map((line, at) => [line, at]).filter(([line]) => line.toLowerCase().includes(sought)) : lines.map((line, at) => [line, at]);
  return html`<div class="unfolded"><div class="row tools">
      ${lines.length > SEARCHED ? html`<input type="search" aria-label="Search in this output" placeholder="Search in this output" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />` : ""}
      ${sought ? html`<span class="dim" role="status">${found.length.toLocaleString("en")} of ${lines.length.toLocaleString("en")} lines</span>` : ""}
      <span class="grow"></span><button type="button" class="quiet" onClick=${() => navigator.clipboard?.writeText(content)}>Copy</button>
      <button type="button" class="quiet" onClick=${() => setOpen(false)}>Fold</button></div>
    <pre class="output tall numbered" tabindex="0">${found.slice(0, MOST_LINES).map(([line, at]) => html`<span class="line"><span class="at">${at + 1}</span>${sought ? marked(line, sought) : line}${"\n"}</span>`)}</pre></div>`;
}

function marked(line, sought) {
  const parts = [];
  let from = 0;
  for (let at = line.toLowerCase().indexOf(sought); at >= 0 && parts.length < 40; at = line.toLowerCase().indexOf(sought, from)) {
    parts.push(line.slice(from, at), html`<mark>${line.slice(at, at + sought.length)}</mark>`);
    from = at + sought.length;
  }
  return [...parts, line.slice(from)];
}

/** Return the files of a unified diff: their names, and rows of an old and a new line; a gap between hunks has neither. */
export function filesOf(patch) {
  const files = [];
  let file = null, old = 0, now = 0, removed = [], added = [], oldLeft = 0, nowLeft = 0;
  const flush = () => {
    for (let at = 0; at < Math.max(removed.length, added.length); at += 1) file.rows.push({ old: removed[at] || null, now: added[at] || null, isChange: true });
    removed = []; added = [];
  };
  const start = (name) => { if (file) flush(); file = { name, rows: [], plus: 0, minus: 0 }; files.push(file); };
  for (const line of String(patch || "").replace(/\n$/, "").split("\n")) {
    const hunk = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)/.exec(line);
    if (hunk && oldLeft <= 0 && nowLeft <= 0) {
      if (!file) start("");
      flush();
      [old, now] = [Number(hunk[1]), Number(hunk[3])];
      [oldLeft, nowLeft] = [Number(hunk[2] ?? 1), Number(hunk[4] ?? 1)];
      file.rows.push({ gap: hunk[5].trim() });
    } else if (oldLeft > 0 || nowLeft > 0) {
      if (line[0] === "-") { removed.push([old, line.slice(1)]); old += 1; oldLeft -= 1; file.minus += 1; } else if (line[0] === "+") { added.push([now, line.slice(1)]); now += 1; nowLeft -= 1; file.plus += 1; } else if (line[0] !== "\\") {
        flush();
        file.rows.push({ old: [old, line.slice(1)], now: [now, line.slice(1)] });
        old += 1; now += 1; oldLeft -= 1; nowLeft -= 1;
      }
    } else if (/^--- /.test(line)) start(line.slice(4).replace(/^a\//, "").split("\t")[0]);
    else if (/^\+\+\+ /.test(line) && file) { const name = line.slice(4).replace(/^b\//, "").split("\t")[0]; if (name !== "/dev/null") file.name = name; }
  }
  if (file) flush();
  return files.filter((one) => one.rows.length);
}

/** Show a unified diff side by side; on a narrow screen, one below the other. A text that is none is shown as it is. */
export function Diff({ id, text, path = "" }) {
  const files = filesOf(text);
  if (!files.length) return html`<${Output} id=${id} text=${text} />`;
  return html`<div class="diffs">${files.map((file, at) => html`<${FileDiff} id=${`${id}-${at}`} file=${file} name=${file.name || path} key=${at} />`)}</div>`;
}

const ROWS = 60;
function FileDiff({ id, file, name }) {
  const [isOpen, setOpen] = useOpen(`${id}-diff`);
  const rows = isOpen ? file.rows.slice(0, MOST_LINES) : file.rows.slice(0, ROWS);
  const cell = (one, kind, side) => html`<td class="at">${one ? one[0] : ""}</td><td class=${`${side} ${one && kind}`}>${one ? clean(one[1].slice(0, LINE_CHARS)) : ""}</td>`;
  return html`<figure class="diff2"><figcaption><span class="mono">${name}</span> <span class="good">+${file.plus}</span> <span class="bad">−${file.minus}</span></figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label=${`Changes of ${name}`}><table><colgroup><col class="at" /><col /><col class="at" /><col /></colgroup><tbody>${rows.map((row) => row.gap !== undefined
      ? html`<tr class="gap"><td colspan="4">${row.gap || "⋯"}</td></tr>`
      : html`<tr class=${row.isChange ? "change" : ""}>${cell(row.old, row.isChange ? "minus" : "", "old")}${cell(row.now, row.isChange ? "plus" : "", "new")}</tr>`)}</tbody></table></div>
    ${rows.length < file.rows.length ? html`<button type="button" class="quiet more" onClick=${() => setOpen(true)}>Show all ${file.rows.length.toLocaleString("en")} lines</button>` : ""}</figure>`;
}
