// Assigns an id (the attribute `bid`) to every element of a frame and returns the visible elements with their positions.
//
// Runs in each frame before each observation. An element keeps its id for its lifetime. The id of an element is `prefix`
// and a number; the id of a nested frame is `prefix` and a letter, and is also the prefix of its elements.
(prefix) => {
  const LETTERS = "abcdefghijklmnopqrstuvwxyz";
  const INTERACTIVE = new Set(["BUTTON", "INPUT", "SELECT", "TEXTAREA", "OPTION", "SUMMARY", "LABEL", "VIDEO", "AUDIO"]);
  const ROLES = new Set(["button", "link", "checkbox", "radio", "tab", "menuitem", "menuitemcheckbox", "menuitemradio",
    "option", "switch", "combobox", "textbox", "searchbox", "slider", "spinbutton", "treeitem", "gridcell"]);
  const MAX_ELEMENTS = 50000;
  const elements = [];
  const collect = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (elements.length >= MAX_ELEMENTS) return;
      elements.push(element);
      if (element.shadowRoot) collect(element.shadowRoot);
    }
  };
  collect(document);

  const isFrame = (element) => element.tagName === "IFRAME" || element.tagName === "FRAME";
  const own = new RegExp(`^${prefix}(\\d{1,9}|[A-Z]*[a-z])$`);
  const taken = new Set();
  let last = 0;
  for (const element of elements) {
    const bid = element.getAttribute("bid");
    if (bid !== null && own.test(bid) && /\d$/.test(bid)) last = Math.max(last, Number(bid.slice(prefix.length)));
  }
  const letters = (index) => {
    // Upper-case letters first and one lower-case letter last: no prefix of a frame is the start of another one.
    let text = LETTERS[index % 26];
    for (let rest = Math.floor(index / 26); rest > 0; rest = Math.floor((rest - 1) / 26)) {
      text = LETTERS[(rest - 1) % 26].toUpperCase() + text;
    }
    return text;
  };
  for (const element of elements) {
    const bid = element.getAttribute("bid");
    const fits = bid !== null && own.test(bid) && isFrame(element) !== /\d$/.test(bid);
    if (fits && !taken.has(bid)) taken.add(bid);  // a cloned element has the same bid; the first one keeps it
    else element.removeAttribute("bid");
  }
  let frames = 0;
  for (const element of elements) {
    if (element.hasAttribute("bid")) continue;
    let bid;
    if (isFrame(element)) do bid = prefix + letters(frames++); while (taken.has(bid));
    else bid = prefix + ++last;
    taken.add(bid);
    element.setAttribute("bid", bid);
  }

  const isClickable = (element, style) => {
    if (element.disabled) return false;
    if (element.tagName === "A") return element.hasAttribute("href");
    if (INTERACTIVE.has(element.tagName) || element.isContentEditable) return true;
    if (typeof element.onclick === "function") return true;
    if (ROLES.has(element.getAttribute("role"))) return true;
    const parent = element.parentElement;
    return style.cursor === "pointer" && !(parent && getComputedStyle(parent).cursor === "pointer");
  };
  const isOnTop = (element, x, y) => {
    const hit = element.getRootNode().elementFromPoint(x, y);
    return hit !== null && (hit === element || element.contains(hit) || hit.contains(element));
  };
  const visible = [];
  const windows = [];
  for (const element of elements) {
    const box = element.getBoundingClientRect();
    const left = Math.max(box.left, 0), top = Math.max(box.top, 0);
    const right = Math.min(box.right, innerWidth), bottom = Math.min(box.bottom, innerHeight);
    if (right - left < 1 || bottom - top < 1) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const bid = element.getAttribute("bid");
    const clickable = isClickable(element, getComputedStyle(element));
    const marked = clickable && isOnTop(element, (left + right) / 2, (top + bottom) / 2);
    visible.push([bid, Math.round(left), Math.round(top), Math.round(right), Math.round(bottom), clickable, marked]);
    if (isFrame(element)) windows.push([bid, box.left + element.clientLeft, box.top + element.clientTop]);
  }
  let focused = document.activeElement;
  while (focused && focused.shadowRoot && focused.shadowRoot.activeElement) focused = focused.shadowRoot.activeElement;
  const isFocused = focused && focused !== document.body && focused !== document.documentElement;
  return { count: elements.length, visible, windows, focused: isFocused ? focused.getAttribute("bid") : "" };
}
