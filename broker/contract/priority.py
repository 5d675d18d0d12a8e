"""Who goes first where something is scarce: ready conversations, steps, actions, model calls."""

from __future__ import annotations

from enum import StrEnum

from broker.contract.specs import Tenancy


class Priority(StrEnum):
    """Who goes first, in this order."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 goes first; the store's functions know priorities by this number."""
        return tuple(Priority).index(self)


def priority_of(tenancy: Tenancy | None, *, is_headless: bool) -> Priority:
    """Return the priority of a conversation: as asked for, else by whether a person is there."""
    if tenancy is not None and tenancy.priority is not None:
        return Priority(tenancy.priority)
    return Priority.BATCH if is_headless else Priority.INTERACTIVE
