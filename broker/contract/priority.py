"""Priorities for scarce resources: ready conversations, steps, actions, model calls."""

from __future__ import annotations

from enum import StrEnum

from broker.contract.specs import Tenancy


class Priority(StrEnum):
    """Priorities, the highest first."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """The number that the store's functions use; 0 is the highest priority."""
        return tuple(Priority).index(self)


def priority_of(tenancy: Tenancy | None, *, is_headless: bool) -> Priority:
    """Return a conversation's priority: the requested one, else interactive or batch by whether a user is present."""
    if tenancy is not None and tenancy.priority is not None:
        return Priority(tenancy.priority)
    return Priority.BATCH if is_headless else Priority.INTERACTIVE
