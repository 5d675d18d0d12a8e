"""Check the invariants of a log that hold after any crash, whatever the agent does.

This module takes decoded events. `specification` checks these and all other rules of a log.

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
    AgentStateChangedObservation,
    Event,
    Observation,
)
from broker.log.specification import LogViolation, check_log

TERMINAL = "I1"
GAPLESS = "I2"
DURABLE = "I3"
ONE_OBSERVATION = "I4"

INVARIANTS = {"end": TERMINAL, "append": GAPLESS, "observation": ONE_OBSERVATION, "settled": ONE_OBSERVATION}
"""The rules of the specification that are invariants."""
ALWAYS = frozenset(("append", "observation"))
"""Those that a log meets while it is being written."""


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
    is_strict: bool = False,
) -> list[Violation]:
    """Check a log.

    Args:
        events: the whole log in order.
        last_event_id: the last id in the index; None skips this check.
        seen: events that a writer had acknowledged, or that a reader has read.
        is_over: whether the conversation should have ended; False for a log that is still being written.
        is_strict: also return violations of the other rules of the specification; their `invariant` is the name of the
            rule.
    """
    found = check_log(
        [event.export() for event in events],
        conversation_id=conversation_id,
        index={"last_event_id": last_event_id},
        must_be_over=is_over,
    )
    broken = [
        Violation(INVARIANTS.get(one.rule, one.rule), one.event_id, one.text)
        for one in found
        if is_strict or (one.rule in (INVARIANTS if is_over else ALWAYS) and _concerns_a_tool(one, events))
    ]
    return [*broken, *_check_durable(events, seen)]


def _concerns_a_tool(found: LogViolation, events: Sequence[Event]) -> bool:
    """Return whether a violation about actions and observations is one of I4.

    An imported log may lack some parts, which is no violation: its observations may answer no action, and only actions
    of tools and delegates need one.
    """
    event = events[found.event_id - 1] if 0 < found.event_id <= len(events) else None
    if isinstance(event, Action) and found.rule == "settled":
        return event.runnable or isinstance(event, AgentDelegateAction)
    return not (isinstance(event, Observation) and found.rule == "observation" and not event.cause)


def count_duplicate_observations(events: Sequence[Event]) -> int:
    """Return the number of observations beyond the first of each action."""
    counts = Counter(
        event.cause
        for event in events
        if isinstance(event, Observation) and event.cause and not isinstance(event, AgentStateChangedObservation)
    )
    return sum(count - 1 for count in counts.values())


def count_lost_events(events: Sequence[Event], seen: Sequence[Event]) -> int:
    """Return how many ids are missing below the last one, and how many seen events are not in the log."""
    ids = {event.id for event in events}
    return max(ids, default=0) - len(ids) + sum(1 for _ in _check_durable(events, seen))


def _check_durable(events: Sequence[Event], seen: Sequence[Event]) -> Iterator[Violation]:
    there = {event.id: event for event in events}
    for event in seen:
        if event.id not in there:
            yield Violation(DURABLE, event.id, f"event {event.id} ({event.kind}) was seen and is missing")
        elif there[event.id] != event:
            yield Violation(DURABLE, event.id, f"event {event.id} has changed since it was seen")
