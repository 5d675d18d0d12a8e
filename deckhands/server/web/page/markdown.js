// Markdown of an agent or a user. It is hostile: tags in it stay text, `marked` makes markup of the rest, and DOMPurify
// keeps a short list of elements. Nothing is loaded: pictures of other servers are shown as their addresses, links open only when a user follows them.

import { highlightIn } from "./code.js";
import { clean, el } from "./dom.js";
import { Marked } from "./vendored/marked.js";
import DOMPurify from "./vendored/purify.js";

const MOST_CHARS = 60_000;
const RULES = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd", "li", "ol", "p", "pre",
    "s", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "alt", "class", "href", "src", "start", "title"],
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const PICTURE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;
const LINK = /^(https?:|mailto:)/i;
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (found) => ESCAPES[found]);
const parser = new Marked({ gfm: true, breaks: true, renderer: { html: ({ text, block }) => block ? `<p>${escaped(text)}</p>` : escaped(text) } });
const LANGUAGE = /^language-([\w+#-]{1,20})$/;

/** Give a link its host as text if its own text is not an address there, and keep it from learning where it was followed. */
function guard(link) {
  const address = link.getAttribute("href") || "";
  if (!LINK.test(address)) { link.replaceWith(...link.childNodes); return; }
  let target;
  try { target = new URL(address); } catch { link.replaceWith(...link.childNodes); return; }
  for (const { name } of [...link.attributes]) if (name !== "href") link.removeAttribute(name);
  link.setAttribute("rel", "noopener noreferrer nofollow");
  link.setAttribute("target", "_blank");
  link.setAttribute("title", clean(target.href.slice(0, 300)));
  const place = target.host || target.pathname, text = link.textContent.trim();
  const isShown = text === place || (target.host && text.startsWith(target.origin) && /^([/?#]|$)/.test(text.slice(target.origin.length)));
  if (!isShown) link.after(el("span", { class: "host" }, ` (${place})`));
}

/** Return the nodes of a Markdown text. */
export function nodesOf(text) {
  const whole = String(text ?? ""), shown = clean(whole.slice(0, MOST_CHARS));
  const made = DOMPurify.sanitize(parser.parse(shown, { async: false }), RULES);
  // `marked` and DOMPurify have decoded entities.
  for (const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT); walker.nextNode();) walker.currentNode.data = clean(walker.currentNode.data);
  for (const one of made.querySelectorAll("[class]")) {
    const language = one.localName === "code" && one.parentNode.localName === "pre" ? LANGUAGE.exec(one.className)?.[1] : "";
    one.removeAttribute("class");
    if (language) highlightIn(one, language);
  }
  for (const picture of made.querySelectorAll("img")) {
    const source = picture.getAttribute("src") || "";
    if (PICTURE.test(source)) { const alt = picture.getAttribute("alt") || "A picture"; picture.replaceWith(el("img", { src: source, alt })); } else picture.replaceWith(el("span", { class: "dim mono" }, `picture: ${source.slice(0, 200)}`));
  }
  for (const link of made.querySelectorAll("a")) guard(link);
  for (const one of made.querySelectorAll("pre")) one.tabIndex = 0;
  for (const one of made.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    // The headings of a message are none of the page's own.
    one.replaceWith(el("p", { class: `heading ${one.localName}` }, [...one.childNodes]));
  }
  for (const one of made.querySelectorAll("table")) { const place = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }); one.replaceWith(place); place.append(one); }
  if (whole.length > MOST_CHARS) made.append(el("p", { class: "dim" }, `${(whole.length - MOST_CHARS).toLocaleString("en")} more characters are in “All fields”.`));
  return [...made.childNodes];
}
