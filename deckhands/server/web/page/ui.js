// Preact with htm, set up so that every text that the page shows is cleaned first. Import components' tools from here.

import { clean } from "./dom.js";
import { createElement, Fragment, options, render } from "./vendored/preact.js";
import { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendored/preact-hooks.js";
import htm from "./vendored/htm.js";

/** Attributes that users read or hear. */
const READ = ["aria-label", "title", "alt", "placeholder"];
const cleaned = (child) => typeof child === "string" ? clean(child) : Array.isArray(child) ? child.map(cleaned) : child;

const before = options.vnode;
options.vnode = (vnode) => {
  if (typeof vnode.type === "string") {
    const { props } = vnode;
    if (props.children !== undefined) props.children = cleaned(props.children);
    for (const name of READ) if (typeof props[name] === "string") props[name] = clean(props[name]);
    if ("dangerouslySetInnerHTML" in props) throw new Error("markup is shown by Nodes alone");
  }
  before?.(vnode);
};

export const html = htm.bind(createElement);
export { Fragment, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState };

/** Show DOM nodes that were made elsewhere: `make` returns them, and is called again when `of` changes. */
export function Nodes({ make, of = [], name = "div", ...attributes }) {
  const place = useRef(null);
  useLayoutEffect(() => { place.current.replaceChildren(...[make()].flat().filter(Boolean)); }, of);
  return html`<${name} ref=${place} ...${attributes}></${name}>`;
}

/** What is open in one conversation, kept while its cards come into sight and leave it. */
const opened = new Map();
export function useOpen(key, isOpen = false) {
  const [, again] = useReducer((count) => count + 1, 0);
  const set = (value) => { opened.set(key, value); again(); };
  return [opened.get(key) ?? isOpen, set];
}
export const forgetOpen = () => opened.clear();

/** Show a part that is folded until a user opens it. */
export function Fold({ id, label, children, isOpen = false, ...attributes }) {
  const [is, set] = useOpen(id, isOpen);
  return html`<details open=${is} ...${attributes} onToggle=${(event) => { if (event.target.open !== is) set(event.target.open); }}>
    <summary>${label}</summary>${is ? (typeof children === "function" ? children() : children) : ""}</details>`;
}
