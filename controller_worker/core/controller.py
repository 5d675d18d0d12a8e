"""The controller: folds a log into a state, and decides the next effect.

`apply` folds an event into the state: each concern with a handler for the event returns its part. `next_effect` asks
the decisions in their order (`order`) and returns the first effect. Neither does I/O, draws a random number or reads a
clock (the time is a parameter), so the same log leads to the same decision on every machine.

Holds: a refused step consumes nothing. `apply` never fails on an event of the log.
Does not: know agents, tools or models; the loop (`loop.performer`) performs the effects.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import fields
from datetime import datetime
from functools import cache
from typing import cast

from broker.contract import Event, RolledBackObservation
from controller_worker.core.concern import OWNERS, Handler, evolve, make_from
from controller_worker.core.concerns import double_texting
from controller_worker.core.effects import Effect, SideEffect
from controller_worker.core.order import ORDER, SIDE_EFFECTS
from controller_worker.core.state import State

CONCERNS = tuple(OWNERS[part.name] for part in fields(State) if part.name not in ("version", "before"))
"""The owner of each part of the state. They read the state before an event, so their order has no effect."""


def fold(state: State, events: Iterable[Event]) -> State:
    """Apply events in order."""
    for event in events:
        state = apply(state, event)
    return state


def apply(state: State, event: Event) -> State:
    """Return the state after one more event.

    Args:
        event: the event with the id `state.version + 1`.
    """
    assert event.id == state.version + 1, f"event {event.id} after version {state.version}"
    event_class = type(event)
    if event_class is RolledBackObservation:
        return double_texting.roll_back(state, cast(RolledBackObservation, event))
    before = state.__dict__  # a fold of a long log spends its time here
    parts = before.copy()
    parts["version"] = event.id
    if double_texting.should_remember(state, event):
        parts["before"] = evolve(state, before=None)
    for name, handler in _find_handlers(event_class):
        parts[name] = handler(before[name], event, state)
    return make_from(state, parts)


def next_effect(
    state: State, now: datetime, done: Container[SideEffect] | None = None, *, decided: Effect | None = None
) -> Effect:
    """Return the next effect.

    Args:
        now: aware UTC; only compared with the end of a wait and of the allowed time.
        done: the side effects that the conversation's owner has run. None to leave side effects out, which the log does
            not need.
        decided: the decision about this state, if already made.
    """
    if done is not None:
        for side_effects in SIDE_EFFECTS:
            for side_effect in side_effects(state):
                if side_effect not in done:
                    return side_effect
    if decided is not None:
        return decided
    for rule in ORDER:
        effect = rule(state, now)
        if effect is not None:
            return effect
    raise AssertionError("the last decision of the order returns an effect for every state")


def find_decision_name(state: State, now: datetime) -> str:
    """Return the name of the decision that applies, for an error about it."""
    rule = next(rule for rule in ORDER if rule(state, now) is not None)
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


@cache
def _find_handlers(event_class: type[Event]) -> tuple[tuple[str, Handler], ...]:
    """Return the handlers of an event class, by part."""
    found = ((concern.name, concern.find_handler(event_class)) for concern in CONCERNS)
    return tuple((name, handler) for name, handler in found if handler is not None)
