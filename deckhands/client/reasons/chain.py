"""The chain from a conversation's state to the cause: facts in, links out.

Holds: pure; every reason in `WaitReason` is explained here. A link states only facts: an unknown time, place or name is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.contract import TERMINAL_STATES, AgentState
from broker.log import WaitReason
from broker.runtime import counted
from deckhands.client.reasons.facts import Facts
from deckhands.client.reasons.link import Cause, Link, Why
from deckhands.client.reasons.model_waits import batch, budget, model_call
from deckhands.client.reasons.persons import answer, confirmation, dead_letter, end, loop, paused
from deckhands.client.reasons.work_waits import delegates, held, tools

Explanation = Callable[[Facts], list[Link]]


def why_of(facts: Facts) -> Why:
    """Return the chain of reasons for a conversation's current state."""
    state, waits_for = facts.history.status.state, facts.wait_reason
    links = [_seen(facts), *_causes(facts)]
    return Why(facts.conversation_id, state.value, waits_for, facts.now, tuple(links))


def _seen(facts: Facts) -> Link:
    state, changed = facts.history.status.state, facts.history.changed
    since = changed.timestamp if changed is not None else None
    if since is None and facts.history.created is not None:
        since = facts.history.created.timestamp
    return Link(
        Cause.STATE, f"The conversation is {state.value.replace('_', ' ')}.", since, details={"state": state.value}
    )


def _causes(facts: Facts) -> list[Link]:
    status = facts.history.status
    if facts.row is None:
        return [*_at_rest(facts), _away(facts)]
    if facts.row.is_closed:
        text = "It was closed and takes no more events."
        return [*_at_rest(facts), Link(Cause.CLOSED, text, remedy=f"`deckhands fork {facts.conversation_id}`")]
    if facts.died is not None:
        return dead_letter(facts)
    if status.is_settled:
        return _at_rest(facts)
    found = _unread(facts)
    explanation = EXPLANATIONS.get(facts.wait_reason)
    if explanation is not None:
        found += explanation(facts)
    is_enough = explanation is not None and facts.owner is None and facts.place is None
    return found if is_enough and found else [*found, *held(facts, is_waiting=explanation is not None)]


def _away(facts: Facts) -> Link:
    if facts.is_run:
        text, remedy = (
            "It belongs to a run that is not in progress.",
            f"`deckhands run --resume {facts.conversation_id}`",
        )
    else:
        text, remedy = "It has left the store and rests in the archive.", f"`deckhands restore {facts.conversation_id}`"
    return Link(Cause.ARCHIVED, text, facts.history.updated, remedy=remedy)


def _at_rest(facts: Facts) -> list[Link]:
    status = facts.history.status
    if status.is_in_loop:
        return loop(facts)
    if status.state is AgentState.AWAITING_USER_CONFIRMATION:
        return confirmation(facts)
    if status.state is AgentState.AWAITING_USER_INPUT:
        return answer(facts)
    if status.state is AgentState.PAUSED:
        return paused(facts)
    return end(facts) if status.state in TERMINAL_STATES else []


def _unread(facts: Facts) -> list[Link]:
    """Explain a message or request that the agent has not noticed yet."""
    unread = facts.history.unread
    if unread is None:
        return []
    what = "A message" if facts.history.status.has_unread_message else "A request"
    text = f"{what} (event {unread.id}) waits for the agent to notice it."
    return [Link(Cause.MESSAGE, text, unread.timestamp, details={"event_id": unread.id})]


def _scheduled(facts: Facts) -> list[Link]:
    """Explain a scheduled start."""
    begins = facts.row.not_before if facts.row is not None else None
    begins = begins or (facts.history.created.not_before if facts.history.created else None)
    since = facts.history.created.timestamp if facts.history.created else None
    expires = f" It expires if it has not started by {facts.expires:%Y-%m-%d %H:%M:%S} UTC." if facts.expires else ""
    link = Link(
        Cause.SCHEDULED,
        f"It was submitted to start later.{expires}",
        since,
        begins,
        f"`deckhands resume {facts.conversation_id}` starts it at once.",
        {"expires": facts.expires.isoformat()} if facts.expires else {},
    )
    return [link]


def _newer_worker(facts: Facts) -> list[Link]:
    """Explain that only a newer worker can read the log."""
    running = f"{counted(facts.controllers, 'controller worker')} run, of which none has taken it so far."
    link = Link(
        Cause.NEWER_WORKER,
        f"A newer version of Deckhands has written to its log, and older workers cannot continue it. {running}",
        facts.history.updated,
        facts.parked_until,
        "Start a controller worker of the newer version; it takes the conversation within seconds.",
        {"controllers": facts.controllers},
    )
    return [link]


EXPLANATIONS: Mapping[str, Explanation] = {
    WaitReason.SCHEDULED: _scheduled,
    WaitReason.TOOL: tools,
    WaitReason.DELEGATE: delegates,
    WaitReason.RATE_LIMIT: model_call,
    WaitReason.BUDGET: budget,
    WaitReason.BATCH: batch,
    WaitReason.NEWER_WORKER: _newer_worker,
    WaitReason.SERVICE_UNAVAILABLE: model_call,
    WaitReason.INTERNAL: model_call,
    WaitReason.TIMEOUT: model_call,
    WaitReason.MALFORMED_REPLY: model_call,
    WaitReason.NO_RESPONSE: model_call,
}
"""The function that explains each reason of the index."""
