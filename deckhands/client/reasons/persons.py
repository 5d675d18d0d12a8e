"""Explain waits for a user, and how conversations end. Facts in, links out."""

from __future__ import annotations

from broker.contract import AgentState
from deckhands.client.reading.summary import REMEDIES
from deckhands.client.reasons.facts import Facts
from deckhands.client.reasons.link import Cause, Link

QUESTION_CHARS = 1_000


def confirmation(facts: Facts) -> list[Link]:
    """Explain a pending confirmation."""
    history, name = facts.history, facts.conversation_id
    asked_id = history.status.asked_id
    action = history.asked.get(asked_id) if asked_id is not None else None
    question = f": {action.sentence[:QUESTION_CHARS]}" if action is not None else "."
    link = Link(
        Cause.CONFIRMATION,
        f"It waits for a user to confirm or reject action {asked_id}{question}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands confirm {name}`, or `deckhands reject {name} --reason …`.",
        details={"action_id": asked_id},
    )
    return [link]


def answer(facts: Facts) -> list[Link]:
    """Explain a wait for an answer to the agent's question."""
    history = facts.history
    said = f" It said last: {history.message[:QUESTION_CHARS]}" if history.message else ""
    link = Link(
        Cause.ANSWER,
        f"It waits for a message from a user.{said}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands message {facts.conversation_id} TEXT`.",
    )
    return [link]


def paused(facts: Facts) -> list[Link]:
    """Explain a pause, and name its author."""
    history, operator = facts.history, facts.history.operator
    who = ""
    if operator is not None and operator.action in ("pause", "interrupt"):
        who = f" by {operator.author}" + (f": {operator.reason}" if operator.reason else "")
    link = Link(
        Cause.PAUSED,
        f"It was paused{who or '.'}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands resume {facts.conversation_id}`, or a message.",
        details={"author": operator.author, "reason": operator.reason} if who and operator else {},
    )
    return [link]


def loop(facts: Facts) -> list[Link]:
    """Explain a stop by the policy for loops."""
    changed = facts.history.changed
    reason = f": {changed.reason}" if changed is not None and changed.reason else "."
    link = Link(
        Cause.LOOP,
        f"The agent repeated itself, and the policy for loops keeps it from continuing{reason}",
        changed.timestamp if changed else None,
        remedy=f"`deckhands recover {facts.conversation_id} wait|go-on|stop`, or a message.",
        details={"code": changed.code} if changed is not None and changed.code else {},
    )
    return [link]


def dead_letter(facts: Facts) -> list[Link]:
    """Explain a dead letter: the workers that died with it, with the last lines of their logs."""
    workers = [death.from_worker for death in facts.deaths[-3:]]
    who = f" ({', '.join(workers)})" if workers and facts.shows_workers else ""
    last = facts.row.fields.get("last_error", "") if facts.row is not None else ""
    link = Link(
        Cause.DEAD_LETTER,
        f"Three workers in a row died while they worked on it{who}, and none takes it any more."
        + (f" Its last error: {last}" if last else ""),
        facts.died,
        remedy=f"Find the cause in the workers' logs; then `deckhands dead requeue {facts.conversation_id}`.",
        details={"workers": workers} if facts.shows_workers else {},
        lines=(*facts.history.lines, *(facts.worker_lines if facts.shows_workers else ())),
    )
    return [link]


def end(facts: Facts) -> list[Link]:
    """Explain the end, and how to continue."""
    history, name = facts.history, facts.conversation_id
    changed, state = history.changed, history.status.state
    code = changed.code if changed is not None else ""
    reason = changed.reason if changed is not None else ""
    text = {
        AgentState.FINISHED: "The agent has finished.",
        AgentState.REJECTED: "The agent refused the task, or could not do it.",
        AgentState.STOPPED: "It was stopped.",
    }.get(state, f"It ended in an error{f' ({code})' if code else ''}: {reason or 'no reason is known'}")
    remedy = "A message continues it."
    if state in (AgentState.ERROR, AgentState.STOPPED):
        remedy = f"{REMEDIES.get(code, '')} `deckhands resume {name}` continues it.".strip()
    when = changed.timestamp if changed else None
    return [Link(Cause.ENDED, text, when, remedy=remedy, details={"code": code} if code else {})]
