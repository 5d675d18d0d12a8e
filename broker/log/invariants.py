"""Checks the invariants of a log. They hold after any crash; the fault tests and the demo use these checks.

Holds: pure functions of a log's events. A complete log gives no violations.
Does not: read the store, the workspaces or the workers. Their facts are passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from broker.contract import (
    Action,
    AgentDelegateAction,
    AgentState,
    AgentStateChangedObservation,
    ConfirmationStatus,
    ConversationCreated,
    Event,
    Observation,
)
from broker.log.status import Status, fold_status

TERMINAL = "I1"
GAPLESS = "I2"
DURABLE = "I3"
ONE_OBSERVATION = "I4"

_STATES_WITH_UNFINISHED_ACTIONS = frozenset({AgentState.PAUSED, AgentState.AWAITING_USER_CONFIRMATION})


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant.

    Attributes:
        invariant: its id: I1 (terminal or waiting), I2 (gapless), I3 (durable), I4 (one observation per action).
        event_id: the event that shows it, 0 for the log as a whole.
    """

    invariant: str
    event_id: int
    text: str


def find_violations(
    events: Sequence[Event],
    *,
    conversation_id: str,
    last_event_id: int | None = None,
    seen: Sequence[Event] = (),
    is_over: bool = True,
) -> list[Violation]:
    """Check a log.

    Args:
        events: the whole log in order.
        last_event_id: the last id in the index; None skips this check.
        seen: events that a writer had acknowledged, or that a reader has read.
        is_over: the conversation should have ended; False for a log that is still being written.
    """
    stands = fold_status(events)
    found = [*_check_gapless(events, conversation_id, last_event_id), *_check_durable(events, seen)]
    found += _check_one_observation(
        events, must_be_settled=is_over and stands.state not in _STATES_WITH_UNFINISHED_ACTIONS
    )
    if is_over:
        found += _check_terminal(stands)
    return found


def count_duplicate_observations(events: Sequence[Event]) -> int:
    """Return the number of observations beyond the first of each action."""
    return sum(count - 1 for count in _count_observations_by_cause(events).values())


def count_lost_events(events: Sequence[Event], seen: Sequence[Event]) -> int:
    """Return how many ids are missing below the last one, and how many seen events are not in the log."""
    ids = {event.id for event in events}
    return max(ids, default=0) - len(ids) + sum(1 for _ in _check_durable(events, seen))


def _check_gapless(events: Sequence[Event], conversation_id: str, last_event_id: int | None) -> Iterator[Violation]:
    for expected, event in enumerate(events, 1):
        if event.id != expected:
            yield Violation(GAPLESS, event.id, f"event {event.id} is where event {expected} belongs")
            return
    first = events[0] if events else None
    if not isinstance(first, ConversationCreated) or first.conversation_id != conversation_id:
        yield Violation(GAPLESS, 1, f"the log does not begin with the creation of {conversation_id}")
    for event in events[1:]:
        if isinstance(event, ConversationCreated):
            yield Violation(GAPLESS, event.id, "the conversation is created a second time")
    if last_event_id is not None and last_event_id != len(events):
        yield Violation(GAPLESS, 0, f"the log has {len(events)} events, the index says {last_event_id}")


def _check_durable(events: Sequence[Event], seen: Sequence[Event]) -> Iterator[Violation]:
    there = {event.id: event for event in events}
    for event in seen:
        if event.id not in there:
            yield Violation(DURABLE, event.id, f"event {event.id} ({event.kind}) was seen and is missing")
        elif there[event.id] != event:
            yield Violation(DURABLE, event.id, f"event {event.id} has changed since it was seen")


def _check_one_observation(events: Sequence[Event], *, must_be_settled: bool) -> Iterator[Violation]:
    actions = {event.id: event for event in events if isinstance(event, Action)}
    counts = _count_observations_by_cause(events)
    for event in events:
        cause = event.cause
        if isinstance(event, Observation) and cause and (cause not in actions or cause > event.id):
            yield Violation(ONE_OBSERVATION, event.id, f"event {event.id} answers {cause}, not an earlier action")
    for action_id, count in counts.items():
        if count > 1:
            yield Violation(ONE_OBSERVATION, action_id, f"action {action_id} has {count} observations")
    if must_be_settled:
        for action in actions.values():
            if _needs_observation(action) and action.id not in counts:
                yield Violation(ONE_OBSERVATION, action.id, f"action {action.id} ({action.kind}) has no observation")


def _count_observations_by_cause(events: Sequence[Event]) -> Counter[int]:
    return Counter(
        event.cause
        for event in events
        if isinstance(event, Observation) and event.cause and not isinstance(event, AgentStateChangedObservation)
    )


def _needs_observation(action: Action) -> bool:
    status = getattr(action, "confirmation_state", ConfirmationStatus.CONFIRMED)
    # After a confirmation is given or refused, the action is written again with another id.
    waits = status == ConfirmationStatus.AWAITING_CONFIRMATION
    return isinstance(action, AgentDelegateAction) or (action.runnable and not waits)


def _check_terminal(stands: Status) -> Iterator[Violation]:
    if stands.is_unanswered:
        yield Violation(TERMINAL, 0, f"a message or request got no answer (the agent is {stands.state})")
    elif not stands.is_settled and stands.state != AgentState.RATE_LIMITED:
        yield Violation(TERMINAL, 0, f"the conversation ended in the state {stands.state}")
