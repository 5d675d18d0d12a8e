"""The outcomes of an append to a log, as types; and whether one has been made.

Does not: include a lost reply: `event_log` repeats the call until it has an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.runtime import ConversationBusy, StoreError, UnknownConversation
from broker.store import Store


@dataclass(frozen=True, slots=True)
class Appended:
    """Written, under the ids first to last; `checksum` is the last one's, see `codec.checksum_of`."""

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Written by an earlier call with the same key, under the ids first to last."""

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


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


@dataclass(frozen=True, slots=True)
class Lost:
    """Refused: the log, which ends at `last_id`, does not hold the event that the writer goes by."""

    last_id: int


Outcome = Appended | Duplicate | Fenced | Conflict | Closed | Lost


def outcome_of(reply: Any, conversation_id: str, checksum: str = "") -> Outcome | None:
    """Return what a reply of the function `append` says; None: the conversation was not to exist, and does.

    Args:
        checksum: of the last event to be written.

    Raises:
        UnknownConversation: there is no such conversation.
        ConversationBusy: it takes no message now.
        StoreError: the function never gives this reply.
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
    raise StoreError(f"The function append answered {reply!r}.")


async def has_appended(store: Store, conversation_id: str, key: str) -> bool:
    """Say whether the log has what a producer has appended under a key."""
    once = store.keys(conversation_id).once
    return bool(await store.persist(lambda: store.connection.call("HEXISTS", once, f"p:{key}")))
