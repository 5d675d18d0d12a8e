// A live terminal in a conversation's workspace, for operators: xterm.js over a WebSocket.

import { ask, place } from "./api.js";
import { askFor } from "./dom.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const MOST_INPUT = 1_024;
const COLOURS = { background: "--code", foreground: "--text", cursor: "--link", selectionBackground: "--tint" };

/** Return whether this server opens terminals with this key; never throws. */
export const isOffered = (id, signal) => ask(`${place(id)}/terminal`, { signal }).then((offer) => offer.is_offered, () => false);

function colours() {
  const styles = getComputedStyle(document.documentElement);
  return Object.fromEntries(Object.entries(COLOURS).map(([name, variable]) => [name, styles.getPropertyValue(variable).trim()]).filter(([, value]) => value.startsWith("#")));
}

/** Show a terminal; it stays open while other views are shown. */
export function Terminal({ id, signal, isShown }) {
  const [state, setState] = useState("closed"), [says, setSays] = useState("");
  const screen = useRef(null), live = useRef({ socket: null, terminal: null, fit: null }).current;

  function end(text) {
    if (!live.socket) return;
    live.socket.onmessage = live.socket.onclose = null;
    live.socket.close();
    live.socket = null;
    setSays(text);
    setState("closed");
    if (live.terminal) live.terminal.options.disableStdin = true;
  }
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)"), recolour = () => { if (live.terminal) live.terminal.options.theme = colours(); };
    const refit = new ResizeObserver(() => { if (screen.current?.clientHeight) live.fit?.fit(); });
    refit.observe(screen.current);
    media.addEventListener("change", recolour);
    const leave = () => { end(""); live.terminal?.dispose(); live.terminal = null; media.removeEventListener("change", recolour); refit.disconnect(); };
    signal.addEventListener("abort", leave);
    return leave;
  }, []);
  useLayoutEffect(() => { if (isShown) { live.fit?.fit(); live.terminal?.focus(); } }, [isShown, state]);

  async function open() {
    const reason = await askFor("Open a terminal", "Reason (it is recorded, and so is what you type)", { action: "Open" });
    if (reason === null || signal.aborted) return;
    setState("opening");
    setSays("");
    try {
      const [{ Terminal: Screen }, { FitAddon }, { ticket }] = await Promise.all([import("./vendored/xterm.js"), import("./vendored/xterm-fit.js"), ask("/tickets", { method: "POST", body: { purpose: "terminal" }, signal })]);
      if (signal.aborted) return;
      live.terminal?.dispose();
      live.terminal = new Screen({ screenReaderMode: true, scrollback: 5_000, fontSize: 13, fontFamily: "ui-monospace, monospace", theme: colours(), linkHandler: { activate() {} } });
      live.fit = new FitAddon();
      live.terminal.loadAddon(live.fit);
      screen.current.replaceChildren();
      live.terminal.open(screen.current);
      live.fit.fit();
      connect(ticket, reason);
    } catch (error) { if (!signal.aborted) { setSays(error.message); setState("closed"); } }
  }
  function connect(ticket, reason) {
    const { terminal } = live, query = new URLSearchParams({ ticket, reason, columns: terminal.cols, rows: terminal.rows });
    const socket = live.socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${place(id)}/terminal?${query}`);
    socket.binaryType = "arraybuffer";
    const send = (bytes) => { for (let at = 0; at < bytes.length; at += MOST_INPUT) if (socket.readyState === WebSocket.OPEN) socket.send(bytes.slice(at, at + MOST_INPUT)); };
    terminal.onData((text) => send(new TextEncoder().encode(text)));
    terminal.onBinary((text) => send(Uint8Array.from(text, (char) => char.charCodeAt(0))));
    terminal.onResize(({ cols, rows }) => { if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ columns: cols, rows })); });
    socket.onmessage = ({ data }) => {
      if (typeof data !== "string") { terminal.write(new Uint8Array(data)); return; }
      const { type, content, exit_code: code } = JSON.parse(data);
      if (type === "opened") setState("open");
      else if (type === "ended") end(`The shell ended with exit code ${code}.`);
      else if (type === "problem") end(`${content.detail} ${content.remedy}`.trim());
    };
    socket.onclose = () => end("The connection was lost, and with it the shell.");
  }

  return html`<section class="terminal" hidden=${!isShown} aria-label="Terminal">
    <div class="bar">${state === "open" ? html`<span class="dim">A shell in the workspace, beside the agent. What you type is recorded.</span><span class="grow"></span><button type="button" onClick=${() => end("You have closed it.")}>Close the terminal</button>`
      : html`<button type="button" class="main" disabled=${state === "opening"} onClick=${open}>${state === "opening" ? "Opening…" : says ? "Open another terminal…" : "Open a terminal…"}</button>`}
      ${state === "closed" && says ? html`<span role="status" id="terminal-says">${says}</span>` : ""}</div>
    <div class="screen" ref=${screen}></div></section>`;
}
