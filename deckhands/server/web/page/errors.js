// What the events of a log say to users: the error keys of OpenHands' GUI, and the shell's notes about a command.

const TRY_AGAIN = "Send a message, or resume the conversation, to try again.";
const CHECK_SERVER = "Check LLM_BASE_URL and the network; NO_PROXY lists servers that are reached without a proxy.";
/** The sentences that `broker/contract/error_texts.py` has for the keys, with their remedies. */
const SENTENCES = {
  "STATUS$ERROR_LLM_AUTHENTICATION": ["The model's provider refused the API key", "Check LLM_API_KEY."],
  "STATUS$ERROR_LLM_SERVICE_UNAVAILABLE": ["The model's provider is not available", CHECK_SERVER],
  "STATUS$ERROR_LLM_INTERNAL_SERVER_ERROR": ["The model's provider failed", "Try again later, or use another model."],
  "STATUS$ERROR_LLM_OUT_OF_CREDITS": ["The account at the model's provider is used up", "Top up the account that LLM_API_KEY belongs to."],
  "STATUS$ERROR_LLM_CONTENT_POLICY_VIOLATION": ["The content policy of the model's provider refused the call", "Change the task, or use another model."],
  "CHAT_INTERFACE$AGENT_RATE_LIMITED_STOPPED_MESSAGE": ["The model's provider limits the rate of calls", "Try again later, or use another key or model."],
  "STATUS$ERROR_RUNTIME_DISCONNECTED": ["The connection to the workspace was lost", TRY_AGAIN],
  "STATUS$ERROR_MEMORY": ["The agent's memory failed", TRY_AGAIN],
  "STATUS$GIT_PROVIDER_AUTHENTICATION_ERROR": ["The Git provider refused the credentials", TRY_AGAIN],
  "STATUS$ERROR": ["The agent stopped with an error", TRY_AGAIN],
};
const KEY = /^[A-Z][A-Z_]*\$([A-Z0-9_]+)$/;
const NORMAL_NOTE = /^(The command completed with exit code|The command runs in the background|Terminal: |The (whole output|first \d+ bytes of the output) \()/;

/** Return the reason of an error: a sentence with a remedy in place of a key, any other text unchanged. */
export function reasonOf(event) {
  const reason = event.reason || "", key = KEY.exec(reason);
  if (!key) return reason;
  const [sentence, remedy] = Object.hasOwn(SENTENCES, reason) ? SENTENCES[reason]
    : [`The agent stopped with an error (${key[1].replaceAll("_", " ").toLowerCase()})`, TRY_AGAIN];
  return `${sentence}. ${remedy}`;
}

/** Return why a command did not simply run to its end; empty if it did. The same as `explanation` in Python. */
export function explanationOf(event) {
  const notes = (event.metadata?.suffix || "").trim().replace(/^\[/, "").replace(/\]$/, "").split("]\n[");
  return notes.filter((note) => note && !NORMAL_NOTE.test(note))
    .map((note) => note.replace(/ You may wait longer to see .*/s, "").replace(/^Your /, "The ")).join("\n");
}
