// Style sheets of libraries that would make `<style>` elements, which the page's policy forbids.

/** Return what takes the place of a `<style>` element: its text becomes a style sheet of the document. */
export function makeStyle() {
  const sheet = new CSSStyleSheet(), node = document.createElement("span");
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  node.hidden = true;
  Object.defineProperty(node, "textContent", { get: () => "", set: (text) => sheet.replaceSync(text) });
  node.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== sheet);
    Element.prototype.remove.call(node);
  };
  return node;
}
