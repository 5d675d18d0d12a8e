// A message to the agent, with pictures that are chosen, dropped or pasted. They are shrunk to fit into a request.

import { el, note, replace } from "./dom.js";

const MOST_IMAGES = 8, MOST_CHARS = 700_000, SIDES = [1568, 1024, 640, 400];

/** Return a picture as a data URL of limited length: PNG if it fits, else JPEG in a smaller size. */
async function shrunk(file, most) {
  const bitmap = await createImageBitmap(file);
  try {
    for (const side of SIDES) {
      const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
      const canvas = el("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
      canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      for (const url of [canvas.toDataURL("image/png"), canvas.toDataURL("image/jpeg", 0.85)]) if (url.length <= most) return url;
    }
  } finally {
    bitmap.close();
  }
  throw new Error(`${file.name} is too large.`);
}

/** Return a form; `send` gets the text and the pictures, and returns whether they were accepted. */
export function composer(send) {
  let images = [], isBusy = false;
  const text = el("textarea", { id: "message", rows: 2, required: true, placeholder: "The agent continues, whatever its state" });
  const file = el("input", { id: "pictures", type: "file", accept: "image/png,image/jpeg,image/gif,image/webp", multiple: true, class: "unseen", tabindex: -1, "aria-hidden": "true" });
  const chosen = el("ul", { class: "pictures", "aria-label": "Pictures of the message" });
  const add = el("button", { type: "button", onclick: () => file.click() }, "Add pictures");
  const form = el("form", { class: "card say" }, el("label", { for: "message" }, "Message"), text,
    el("div", { class: "row end" }, add, file, el("button", { class: "main" }, "Send")), chosen);

  function draw() {
    replace(chosen, images.map((one) => el("li", {}, el("img", { src: one.url, alt: one.name }),
      el("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.name}`, onclick: () => { images = images.filter((other) => other !== one); draw(); } }, "✕"))));
  }

  async function take(files) {
    for (const one of [...files].filter((each) => each.type.startsWith("image/"))) {
      if (images.length >= MOST_IMAGES) { note(`A message takes ${MOST_IMAGES} pictures.`, "bad"); break; }
      const left = MOST_CHARS - images.reduce((sum, each) => sum + each.url.length, 0);
      try { images.push({ name: one.name || "picture", url: await shrunk(one, left) }); } catch { note(`${one.name || "The picture"} cannot be used, or is too large beside the others.`, "bad"); }
    }
    draw();
  }

  file.addEventListener("change", () => { take(file.files); file.value = ""; });
  form.addEventListener("paste", (event) => { if (event.clipboardData?.files.length) take(event.clipboardData.files); });
  form.addEventListener("dragover", (event) => event.preventDefault());
  form.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (isBusy || !text.value.trim()) return;
    isBusy = true;
    try { if (await send(text.value, images.map((one) => one.url))) { text.value = ""; images = []; draw(); } } finally { isBusy = false; }
  });
  return form;
}
