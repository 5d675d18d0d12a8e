"""Follows a log as it grows, and detects the loss of events that were read.

Holds: no event is missing between two entries returned, and all entries returned before are still in the log. A store
can lose the end of a log only while all connections are closed, so the reader checks after each new connection.
"""

from __future__ import annotations

from typing import Any

from broker.contract import checksum_of
from broker.log.entries import is_first_entry
from broker.runtime import EventsLost, UnknownConversation, shorten_randomly
from broker.store import Argument, Store

BLOCK_SECONDS = 5.0
BATCH = 100


class LogFollower:
    """A reader of one log.

    Args:
        after: the last event that the reader knows.
    """

    def __init__(self, store: Store, conversation_id: str, after: int) -> None:
        self._store = store
        self._conversation_id = conversation_id
        self._after = after
        self._checksum = ""
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)
        self._connects = 0

    async def check_start(self) -> None:
        """Check that the log holds the event `after`. Raises the same errors as `read`."""
        await check_event_exists(self._store, self._conversation_id, self._after)

    async def read(self) -> list[tuple[bytes, list[Any]]]:
        """Wait up to five seconds and return the next entries with their ids, in order; empty if there are none.

        Raises:
            UnknownConversation: the conversation does not exist, or was deleted meanwhile.
            EventsLost: the log no longer holds the last event that was returned, or ends before `after`.
        """
        stream = (await self._store.locate(self._conversation_id)).events
        # jitter: readers that started together must not all ask at once
        block_ms = int(BLOCK_SECONDS * 1000 * shorten_randomly())
        command: tuple[Argument, ...] = ("XREAD", "COUNT", BATCH, "BLOCK", block_ms, "STREAMS")
        found = await self._store.retry(lambda: self._connection.call(*command, stream, f"{self._after}-0"))
        # a read of a log that no longer exists returns nothing either
        if not found or self._connection.connects != self._connects:
            connects = self._connection.connects
            await check_event_exists(self._store, self._conversation_id, self._after, self._checksum)
            self._connects = connects
        entries: list[tuple[bytes, list[Any]]] = found[0][1] if found else []
        if entries:
            self._after += len(entries)
            self._checksum = checksum_of(entries[-1][1][-1])
        return entries

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()


async def check_event_exists(store: Store, conversation_id: str, known_id: int, checksum: str = "") -> None:
    """Check that the log still holds an event.

    Args:
        checksum: checksum of its entry, see `codec.checksum_of`; empty if only the id is known.

    Raises:
        EventsLost: the log does not hold it.
        UnknownConversation: the conversation does not exist, or was deleted.
    """
    names = await store.locate(conversation_id)
    entry_id = f"{known_id}-0"
    commands = [("HGET", names.meta, "last_id"), ("XRANGE", names.events, entry_id, entry_id)]
    last_id, found = await store.call_many(commands)
    if last_id is None and await store.has_moved(names):
        await check_event_exists(store, conversation_id, known_id, checksum)
        return
    if last_id is None:
        raise UnknownConversation(conversation_id)
    if known_id and not is_first_entry(found, known_id, checksum):
        raise EventsLost(conversation_id, int(last_id), known_id, checksum)
