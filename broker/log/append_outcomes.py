"""The outcomes of an append to a log, as types.

Does not: include a lost reply. `event_log` repeats the call until it has an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.runtime import ConversationBusy, StoreError, UnknownConversation
from broker.store import Store


@dataclass(frozen=True, slots=True)
class Appended:
    """The events were written with ids first to last. `checksum` is that of the last one, see `codec.checksum_of`."""

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An earlier call with the same key wrote the events, with ids first to last."""

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Fenced:
    """Refused: another worker owns the conversation."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Refused: the log has grown since the decision. Read the new events and decide again."""

    last_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Refused: the conversation is closed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Refused: the log ends at `last_id` and does not hold the event that the writer refers to."""

    last_id: int


Outcome = Appended | Duplicate | Fenced | Conflict | Closed | Lost


def outcome_of(reply: Any, conversation_id: str, checksum: str = "") -> Outcome | None:
    """Return the outcome in a reply of the function `append`; None if the conversation to create exists already.

    Args:
        checksum: checksum of the last event to write.

    Raises:
        UnknownConversation: there is no such conversation.
        ConversationBusy: it takes no message now.
        StoreError: the reply is not one of the function's.
    """
    match reply:
        case ["missing"]:
            raise UnknownConversation(conversation_id)
        case ["busy"]:
            raise ConversationBusy(conversation_id)
        case ["exists"]:
            return None
        case ["appended", first, last]:
            return Appended(first, last, checksum)
        case ["duplicate", first, last]:
            return Duplicate(first, last, checksum)
        case ["fenced"]:
            return Fenced()
        case ["conflict", last]:
            return Conflict(last)
        case ["closed"]:
            return Closed()
        case ["lost", last]:
            return Lost(last)
    raise StoreError(f"Unexpected reply of the function append: {reply!r}.")


async def has_appended(store: Store, conversation_id: str, key: str) -> bool:
    """Return whether the log holds the append that a producer made under a key."""
    once = store.keys(conversation_id).once
    return bool(await store.persist(lambda: store.connection.call("HEXISTS", once, f"p:{key}")))
