// The question of an agent: its action, to be confirmed as it is or with other values, or rejected with a reason.

import { askFor, askForAll, block, el, replace } from "./dom.js";

/** The descriptive fields of an action, in reading order. */
const FIELDS = ["path", "command", "code", "content", "patch", "file_text", "old_str", "new_str", "url", "browser_actions", "arguments", "insert_line", "cwd"];
const NAMES = { old_str: "Text to replace", new_str: "New text", file_text: "Content", cwd: "Directory", browser_actions: "Browser actions", insert_line: "Line to insert behind" };
const RISKS = ["low", "medium", "high"];
const title = (name) => NAMES[name] || name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

/** Return the editable fields, with their values as text. */
function editable(action) {
  return FIELDS.filter((name) => action[name] !== undefined && action[name] !== null && action[name] !== "").map((name) => {
    const value = action[name], isText = typeof value === "string";
    return { name, label: isText ? title(name) : `${title(name)} (JSON)`, value: isText ? value : JSON.stringify(value, null, 2), isText, isLong: true };
  });
}

/** Ask for other values, and return those that differ; null if the user cancels. */
async function edited(asked, action, refused) {
  const fields = editable(action), given = await askForAll(`Edit action ${asked}`, fields, { action: "Run it so", says: "The agent reads what ran instead." });
  if (given === null) return null;
  try {
    return Object.fromEntries(fields.filter((one) => given[one.name] !== one.value).map((one) => [one.name, one.isText ? given[one.name] : JSON.parse(given[one.name])]));
  } catch (error) {
    refused(error);
    return null;
  }
}

/** Ask for the values of an MCP server's fields, and return the edit with them; null if the user cancels. */
async function answered(asked, action, refused) {
  const fields = (action.questions || []).flatMap((one) => Object.entries((one.fields || {}).properties || {}))
    .map(([name, field]) => ({ name, label: name, value: "", isText: (field || {}).type === "string" }));
  const given = fields.length ? await askForAll(`Answer question ${asked}`, fields, { action: "Send", says: "Text as it is, other values as JSON; empty ones are left out." }) : {};
  if (given === null) return null;
  try {
    return { answers: Object.fromEntries(fields.filter((one) => given[one.name] !== "").map((one) => [one.name, one.isText ? given[one.name] : JSON.parse(given[one.name])])) };
  } catch (error) {
    refused(error);
    return null;
  }
}

/** Show the question in `panel`; `answer` sends the command with its body. */
export function ask(panel, asked, action, answer, refused) {
  const id = { action_id: asked };
  replace(panel, el("h2", {}, `Run action ${asked}?`), action.path ? el("p", { class: "mono" }, action.path) : "",
    block(action.command && action.kind === "action.run" ? `$ ${action.command}` : action.code || action.content || action.file_text || action.patch || JSON.stringify(action, null, 2)),
    RISKS[action.security_risk] ? el("p", { class: action.security_risk === 2 ? "bad" : "dim" }, `Risk: ${RISKS[action.security_risk]}`) : "",
    el("div", { class: "row" },
      el("button", { type: "button", class: "main", id: "confirm", onclick: async () => {
        const answers = action.asks ? await answered(asked, action, refused) : {};
        if (answers !== null) answer("confirm", action.asks ? { ...id, edited: answers } : id);
      } }, action.asks ? "Answer…" : "Confirm"),
      editable(action).length && !action.asks ? el("button", { type: "button", id: "edit", onclick: async () => {
        const changes = await edited(asked, action, refused);
        if (changes !== null) answer("confirm", { ...id, edited: changes });
      } }, "Edit…") : "",
      el("button", { type: "button", class: "danger", id: "reject", onclick: async () => {
        const reason = await askFor(`Reject action ${asked}`, "Reason (the agent reads it and continues; empty: it waits)", { required: false, action: "Reject" });
        if (reason !== null) answer("reject", { ...id, reason });
      } }, "Reject…")));
}
