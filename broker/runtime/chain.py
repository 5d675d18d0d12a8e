"""Middleware: a chain of steps around one call.

A step gets the call and the rest of the chain. It passes the call on, returns another outcome instead, or changes the
outcome of the rest.

Holds: steps run in the order of their list and return in the opposite order. Exceptions and cancellation pass through
them as through nested calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Call = TypeVar("Call")
Outcome = TypeVar("Outcome")

Rest = Callable[[Call], Awaitable[Outcome]]
Step = Callable[[Call, Rest[Call, Outcome]], Awaitable[Outcome]]


def make_chain(steps: Sequence[Step[Call, Outcome] | None], last: Rest[Call, Outcome]) -> Rest[Call, Outcome]:
    """Return a function that passes a call through the steps to the last one. Steps that are None are left out."""
    rest = last
    for step in reversed(steps):
        if step is not None:
            rest = _bind(step, rest)
    return rest


def _bind(step: Step[Call, Outcome], rest: Rest[Call, Outcome]) -> Rest[Call, Outcome]:
    return lambda call: step(call, rest)
