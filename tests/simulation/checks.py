"""Invariants of every simulation, under any faults."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from broker.contract.actions import MessageAction
from broker.contract.events import EventSource, ModelCallFailed, ModelReply
from broker.contract.observations import EventsLostObservation
from broker.log.invariants import find_violations
from controller_worker.core.controller import fold
from controller_worker.core.state import State, parse_snapshot
from tests.simulation.canonical import CID, MESSAGES, Outcome
from tests.simulation.faults import Fault
from tests.simulation.recovery import longest_allowed, waits

CRASHES_THAT_PARK = 3
LATE = "late"
"""What a conversation that waits for longer than a recovery takes breaks."""


def broken(outcome: Outcome) -> list[str]:
    """Return the violations of the canonical conversation, each with the id of its invariant if it has one."""
    found = always_broken(outcome)
    return found if outcome.failure else [*found, *_said_once(outcome), *_recovered_in_time(outcome)]


def _recovered_in_time(outcome: Outcome) -> Iterator[str]:
    cluster = outcome.cluster
    most = longest_allowed([fault for _, fault, _, _ in cluster.wire.struck])
    for wait in waits(cluster.server.written, {CID: outcome.events}):
        if wait.seconds > most:
            yield f"{LATE}: event {wait.event_id} was followed by the next after {wait.seconds:.1f} s, not {most:.1f} s"


def always_broken(outcome: Outcome) -> list[str]:
    """Return the violations of general invariants, for any conversation."""
    if outcome.failure:
        return [f"I1: {outcome.failure}; {_where(outcome)}"]
    assert outcome.row is not None
    found = find_violations(
        outcome.events,
        conversation_id=CID,
        last_event_id=outcome.row.last_event_id,
        seen=() if outcome.has_lost else outcome.seen,
        is_strict=True,
    )
    return [
        *(f"{violation.invariant}: {violation.text}" for violation in found),
        *_ending(outcome),
        *_paid_once(outcome),
        *_ran_once(outcome),
        *_fenced(outcome),
        *_snapshot(outcome),
        *(f"I13: left over: {name}: {left}" for name, left in outcome.leftovers.items()),
    ]


def _ending(outcome: Outcome) -> Iterator[str]:
    assert outcome.row is not None
    if outcome.row.state != "finished" and not is_given_up(outcome):
        yield f"I1: it ended as {outcome.row.state}: {outcome.row.fields.get('last_error')}"


def is_given_up(outcome: Outcome) -> bool:
    """Return whether the conversation failed with good reason.

    It was running when too many workers died, or the models of so many refused once: a script counts that in the
    worker's memory.
    """
    assert outcome.row is not None
    error = outcome.row.fields.get("last_error", "")
    if "crashed its worker" in error:
        return has_lost_too_many(outcome)
    refused = sum(isinstance(event, ModelCallFailed) for event in outcome.events)
    return "RATE_LIMITED" in error and refused <= _controllers_ended(outcome) + outcome.plan.controllers


def has_lost_too_many(outcome: Outcome) -> bool:
    """Return whether so many controllers died that work which ran each time fails."""
    return _controllers_ended(outcome) >= CRASHES_THAT_PARK


def _controllers_ended(outcome: Outcome) -> int:
    """Return how many controllers were killed, or stopped until they were taken for dead."""
    wire = outcome.cluster.wire
    ended = Counter(name for _, fault, name, _ in wire.struck if fault is Fault.KILL) + wire.lapsed
    return sum(times for name, times in ended.items() if name.startswith("controller"))


def _said_once(outcome: Outcome) -> Iterator[str]:
    said = Counter(
        event.content
        for event in outcome.events
        if isinstance(event, MessageAction) and event.source is EventSource.USER
    )
    if outcome.has_lost and any(isinstance(event, EventsLostObservation) for event in outcome.events):
        return
    if said != Counter(MESSAGES) and not (is_given_up(outcome) and said < Counter(MESSAGES)):
        yield f"I3: the person's messages are in the log as {dict(said)}"


def _paid_once(outcome: Outcome) -> Iterator[str]:
    replies = [event for event in outcome.events if isinstance(event, ModelReply)]
    numbers = [reply.iteration for reply in replies if reply.service == "agent"]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"I9: the replies are those of the steps {numbers}"


def _ran_once(outcome: Outcome) -> Iterator[str]:
    logs = {CID: outcome.events, **outcome.others}
    actions = {(cid, event.id) for cid, log in logs.items() for event in log if event.runnable}
    for action, times in Counter(outcome.cluster.node.executions).items():
        if times > 1:
            yield f"I5: action {action} was executed {times} times"
        if action not in actions and not outcome.has_lost:
            yield f"I5: action {action} was executed and is not an action of its log"


def _fenced(outcome: Outcome) -> Iterator[str]:
    tokens = outcome.cluster.server.tokens.get(CID, [])
    if any(later < earlier for (earlier, _), (later, _) in pairwise(tokens)):
        yield f"I6: the owners' appends have the tokens {tokens}"
    if len({token for token, _ in tokens}) < len(set(tokens)):
        yield f"I6: two owners had the same token: {tokens}"


def _snapshot(outcome: Outcome) -> Iterator[str]:
    whole = fold(State(), outcome.events)
    assert outcome.row is not None
    if outcome.row.state != whole.lifecycle.agent_state:
        yield f"I7: the index says {outcome.row.state}, the log {whole.lifecycle.agent_state}"
    kept = parse_snapshot(outcome.snapshot)
    if kept is not None and fold(kept, outcome.events[kept.version :]) != whole:
        yield f"I7: the snapshot at {kept.version} and what follows do not give the state"


def _where(outcome: Outcome) -> str:
    return f"the log has {len(outcome.events)} events" + (
        f", the last {outcome.events[-1]!r}" if outcome.events else ""
    )
