"""A commit: events that belong together, and all events that the core decides to append because of them.

Holds: a commit is an immutable value. After a whole commit the core has nothing more to append at once, unless the
commit is partial.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from broker.contract import Action, Event, is_settled, with_fields
from broker.log import WaitReason
from controller_worker.core.concerns.double_texting import is_at_rest
from controller_worker.core.concerns.start import is_waiting
from controller_worker.core.controller import apply, find_decision_name, next_effect
from controller_worker.core.effects import Append, AwaitTools, Effect
from controller_worker.core.state import State

MAX_ROUNDS = 16
"""A settled log needs one or two: a concern returns all its due events at once, or fills an append and ends the commit.
More means that the core decides the same thing again and again.
"""


@dataclass(frozen=True, slots=True)
class Commit:
    """The content of one append.

    Attributes:
        events: numbered and stamped, in order.
        answers: position → the runnable action that this observation settles.
        cancels: running actions to stop; 0 stops everything that runs in the workspace.
        dispatch: positions of the actions that go to a tool worker at once.
        state: the state after all events.
        is_partial: the append is full; the next commit takes the remaining events.
        effect: the core's decision about `state`; None if it is partial.
    """

    events: list[Event]
    answers: dict[int, int]
    cancels: list[int]
    dispatch: list[int]
    state: State
    is_partial: bool = False
    effect: Effect | None = None


def settle(state: State, wanted: Append, now: datetime, *, traceparent: str | None = None) -> Commit:
    """Add all events that the core appends as a consequence of the given ones.

    Args:
        traceparent: set on actions for tool workers that have none.
    """
    events: list[Event] = []
    answers: dict[int, int] = {}
    cancels: list[int] = []
    effect: Effect = wanted
    for _ in range(MAX_ROUNDS):
        if not isinstance(effect, Append):
            break
        answers |= {len(events) + position: action_id for position, action_id in effect.answers}
        cancels += effect.cancels
        for event in effect.events:
            added: dict[str, Any] = {} if event.timestamp is not None else {"timestamp": now}
            if traceparent is not None and isinstance(event, Action) and event.runnable and event.traceparent is None:
                added["traceparent"] = traceparent
            numbered = with_fields(event, id=state.version + 1, **added)
            events.append(numbered)
            state = apply(state, numbered)
        if effect.is_partial:
            return Commit(events, answers, cancels, [], state, is_partial=True)
        effect = next_effect(state, now)
    assert not isinstance(effect, Append), (
        f"endless loop of the decision {find_decision_name(state, now)} at version {state.version}"
    )
    in_flight = effect.action_ids if isinstance(effect, AwaitTools) else ()
    dispatch = [position for position, event in enumerate(events) if event.id in in_flight]
    return Commit(events, answers, cancels, dispatch, state, effect=effect)


def to_index_fields(state: State) -> dict[str, str | int | float]:
    """Return the fields that the index of conversations shows for this state."""
    planned = {"planned": state.start.standing} if state.start.standing else {}
    return planned | {
        "state": state.lifecycle.agent_state.value,
        "busy": "" if is_at_rest(state) else "1",
        "wait_reason": _find_wait_reason(state),
        "last_error": state.lifecycle.last_error,
        "error_code": state.lifecycle.error_code,
        "iterations": state.usage.iteration,
        "cost_usd": round(state.usage.cost_usd, 8),
        "has_unknown_cost": int(state.usage.has_unknown_cost),
        "prompt_tokens": state.usage.prompt_tokens,
        "completion_tokens": state.usage.completion_tokens,
    }


def _find_wait_reason(state: State) -> str:
    if is_settled(state.lifecycle.agent_state):
        return ""
    if is_waiting(state.start):
        return WaitReason.SCHEDULED.value if state.start.has_time else ""
    if state.tools.pending:
        return WaitReason.TOOL.value
    if any(not delegate.is_answered for delegate in state.delegation.delegates):
        return WaitReason.DELEGATE.value
    if state.calls.deferral is not None:
        return state.calls.deferral.reason
    return state.calls.wait.reason if state.calls.wait is not None else ""
