"""What an append to a log has come to, as types.

Does not: know the third thing, a lost reply; `event_log` repeats the call until it has an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.errors import StoreError


@dataclass(frozen=True, slots=True)
class Appended:
    """Written, under the ids first to last."""

    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Written by an earlier call with the same key, under the ids first to last."""

    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """Refused: another worker has taken over."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Refused: the log has grown since the decision was made; read on from there and decide again."""

    last_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Refused: the conversation takes no more events."""


Outcome = Appended | Duplicate | Fenced | Conflict | Closed


def outcome_of(reply: Any) -> Outcome:
    """Return what a reply of the function `append` says.

    Raises:
        StoreError: nothing that it ever says.
    """
    match reply:
        case ["appended", first, last]:
            return Appended(first, last)
        case ["duplicate", first, last]:
            return Duplicate(first, last)
        case ["fenced"]:
            return Fenced()
        case ["conflict", last]:
            return Conflict(last)
        case ["closed"]:
            return Closed()
    raise StoreError(f"The function append answered {reply!r}.")
