// The files of a conversation's workspace as they are now or as a checkpoint has them, and all its changes.

import { ask, download, place } from "./api.js";
import { Code, Diff, languageOfPath } from "./code.js";
import { save } from "./dom.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const MOST_BYTES = 400_000, MOST_FILES = 2_000;
const PICTURES = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp" };

/** `since` is the event whose files are wanted, or 0: those of the last checkpoint at or before it are shown. */
export function Files({ id, signal, since }) {
  const [saved, setSaved] = useState([]), [at, setAt] = useState(since || 0);
  const [files, setFiles] = useState(null), [problem, setProblem] = useState(""), [shown, setShown] = useState(null), [wanted, setWanted] = useState(""), [folder, setFolder] = useState("");
  const asked = useRef(0);
  const then = at ? `at=${at}` : "", kept = saved.filter((event) => event <= at).at(-1);
  useEffect(() => { ask(`${place(id)}/checkpoints`, { signal }).then(setSaved, () => setSaved([])); }, [id]);
  useEffect(() => { if (at) { shower()(null); setFolder(""); } else changes(); }, [id, at]);
  useEffect(() => {
    let isOld = false;
    setFiles(null);
    setProblem("");
    ask(`${place(id)}/files?path=${encodeURIComponent(folder || ".")}&${then}`, { signal }).then((found) => isOld || setFiles(found), (error) => isOld || setProblem(error.message));
    return () => { isOld = true; };
  }, [id, folder, at]);

  /** Show a file, or what was read of it, unless another was chosen meanwhile. */
  function shower() { const number = asked.current += 1; return (found) => { if (number === asked.current) setShown(found); }; }
  async function changes() {
    const show = shower();
    try { show({ name: "", patch: await (await download(`${place(id)}/patch`)).text() }); } catch (error) { show({ name: "", problem: error.message }); }
  }
  async function open(one) {
    const name = folder + one.name;
    if (one.kind === "directory") { setFolder(`${name}/`); setWanted(""); return; }
    const show = shower();
    show({ name, isLoading: true });
    try {
      const blob = await download(`${place(id)}/files/${name.split("/").map(encodeURIComponent).join("/")}?${then}`), kind = PICTURES[name.split(".").pop().toLowerCase()];
      const url = kind ? await urlOf(new Blob([blob], { type: kind })) : "";
      const text = kind || blob.size > MOST_BYTES ? "" : await blob.text();
      show({ name, blob, url, text, isBinary: text.includes("\u0000") });
    } catch (error) { show({ name, problem: error.message }); }
  }
  const found = (files || []).filter((one) => one.name.toLowerCase().includes(wanted.toLowerCase()));
  return html`<div class="files"><nav class="card" aria-label="Files">${saved.length || at ? html`<select aria-label="Files as of" value=${String(kept || at)} onChange=${(event) => setAt(Number(event.target.value))}>
        <option value="0">Now</option>${at && !kept ? html`<option value=${String(at)}>At event ${at}</option>` : ""}${saved.toReversed().map((event) => html`<option value=${String(event)}>After event ${event}</option>`)}</select>` : ""}
      ${at ? "" : html`<button type="button" class=${`quiet file${shown && !shown.name ? " chosen" : ""}`} onClick=${changes}>All changes</button>`}
      <input type="search" aria-label="Find a file" placeholder="Find a file" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
      ${folder ? html`<p class="bar"><button type="button" class="quiet" aria-label="The folder above" onClick=${() => setFolder(folder.replace(/[^/]+\/$/, ""))}>↑</button><span class="mono">${folder}</span></p>` : ""}
      ${problem ? html`<p class="dim">${problem}</p>` : files === null ? html`<p class="dim">Reading the files…</p>` : !found.length ? html`<p class="dim">${files.length ? "No file has such a name." : folder ? "The folder is empty." : "The workspace has no files."}</p>` : ""}
      <ul>${found.slice(0, MOST_FILES).map((one) => html`<li key=${one.name}><button type="button" class=${`quiet file mono${shown?.name === folder + one.name ? " chosen" : ""}`} onClick=${() => open(one)}>${one.name}${one.kind === "directory" ? "/" : ""}</button></li>`)}</ul></nav>
    <section class="card shown" aria-live="polite" tabindex="0" aria-label="The chosen file">${!shown ? html`<p class="dim">${at ? "Choose a file." : "Reading…"}</p>` : html`
      <div class="bar"><h2 class=${shown.name ? "mono" : ""}>${shown.name || "All changes"}</h2><span class="grow"></span>${shown.blob || shown.patch ? html`<button type="button" onClick=${() => save(shown.blob || new Blob([shown.patch]), shown.name ? shown.name.split("/").pop() : `${id}.patch`)}>Save</button>` : ""}</div>
      ${shown.problem ? html`<p class="dim">${shown.problem}</p>` : shown.isLoading ? html`<p class="dim">Reading…</p>` : !shown.name ? (shown.patch ? html`<${Diff} id=${`${id}-patch`} text=${shown.patch} />` : html`<p class="dim">Nothing has changed.</p>`)
        : shown.url ? html`<img src=${shown.url} alt=${shown.name} />` : shown.isBinary || (!shown.text && shown.blob.size) ? html`<p class="dim">It is binary or too long to be shown (${shown.blob.size.toLocaleString("en")} bytes). Save it to look at it.</p>`
        : html`<${Code} text=${shown.text} language=${languageOfPath(shown.name)} class="output tall" />`}`}</section></div>`;
}

function urlOf(blob) {
  return new Promise((resolve, reject) => { const reader = new FileReader(); reader.onload = () => resolve(reader.result); reader.onerror = () => reject(reader.error); reader.readAsDataURL(blob); });
}
