// The usage in the events of a conversation: of its model calls, and of its delegates that have ended.

/** Return sums that grow with each event; a delegate's report counts once, as in the summaries of the server. */
export function usage() {
  const ended = new Set();
  const sums = { steps: 0, cost: 0, tokens: 0, isWhole: true, take };
  function take(event) {
    if (event.kind === "model.reply") {
      if ((event.service || "agent") === "agent") sums.steps += 1;
      const isPriced = event.cost_usd !== undefined && event.cost_usd !== null;
      add(isPriced ? event.cost_usd : 0, event.usage, isPriced);
    } else if (event.kind === "conversation.delegate_ended" && !ended.has(event.delegate_id)) {
      ended.add(event.delegate_id);
      add(event.cost_usd, event, !event.has_unknown_cost);
    }
  }
  function add(cost, tokens, isPriced) {
    sums.cost += cost || 0;
    sums.tokens += (tokens?.prompt_tokens || 0) + (tokens?.completion_tokens || 0);
    sums.isWhole &&= isPriced;
  }
  return sums;
}
