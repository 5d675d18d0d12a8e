"""Wake-ups for controller workers about new events: the ready stream of a shard and the mailbox of a worker.

Holds: a wake-up is a hint; the log is the truth. Lost, late and repeated wake-ups cost time, never events. The wake-up
for an observation carries it, which saves the owner a round trip. The owner folds it only if it follows its last event.
Keys: `deck:{k}:ready`, `deck:{k}:ready:interactive` (group `controllers`), `deck:{k}:worker:<w>:mail`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from broker.coordination.quarantine import PARSE_ERRORS, Quarantine, find_conversation_keys
from broker.coordination.waiting_results import settle_results
from broker.runtime import StoreMisconfigured, StoreRefused, StoreTooNew
from broker.store import (
    BLOCK_SECONDS,
    HEARTBEAT_SECONDS,
    MISSING_STREAM_ERRORS,
    Argument,
    GroupReader,
    ShardKeys,
    Store,
)

BATCH = 256
TRIM_MAILBOX_EVERY = 1_000
"""A mailbox is trimmed after this many entries, which the owner has read."""
TRIM_CARRIED_EVERY = 64
"""The same for entries with an observation. They are also trimmed after two seconds without a new one."""

_log = logging.getLogger(__name__)


class ReadyStream:
    """The conversations of one shard that have new events and no owner, in the order of their turns; see turns.lua.

    Interactive ones have their own stream, which a worker reads even if it has room for no others.
    """

    def __init__(self, store: Store, names: ShardKeys, worker_id: str, *, is_interactive: bool = False) -> None:
        self._store = store
        self._names = names
        self._unreadable = Quarantine(store)
        self._stream = names.ready_interactive if is_interactive else names.ready
        self._prefix = "ready:interactive|" if is_interactive else ""
        self._reader = GroupReader(store, "controllers", worker_id, [self._stream])

    async def read(self, *, limit: int) -> list[tuple[str, str]]:
        """Wait up to two seconds and return up to `limit` pairs of conversation id and entry.

        The claim of a conversation acknowledges its entry.
        """
        notified = []
        for _, entry, fields in await self._reader.read(limit=min(limit, BATCH)):
            entry_id = entry.decode()
            try:
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                conversation_id = (await find_conversation_keys(self._store, self._names, about[b"c"])).conversation_id
                notified.append((conversation_id, self._prefix + entry_id))
            except PARSE_ERRORS as error:
                await self._unreadable.quarantine(
                    self._names, self._stream, entry_id, fields, error, group="controllers"
                )
        return notified

    async def aclose(self) -> None:
        """Close the connection."""
        await self._reader.aclose()


@dataclass(frozen=True, slots=True)
class CarriedEvent:
    """An event that the owner received together with its notification.

    Attributes:
        entry: its bytes, see `codec`.
        before: checksum of the event before it in the log.
        is_watched: a client follows the conversation.
    """

    event_id: int
    entry: bytes
    before: str
    is_watched: bool


class WorkerMailbox:
    """The wake-ups of one shard for the conversations that a worker owns."""

    def __init__(self, store: Store, names: ShardKeys, worker_id: str) -> None:
        self._store = store
        self._names = names
        self._unreadable = Quarantine(store)
        self._key = names.mailbox(worker_id)
        self._after = "0-0"
        self._read_since_trim = self._carried_since_trim = 0
        self._is_quiet = False
        self._gaps: dict[str, str] = {}
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def read(self) -> dict[str, CarriedEvent | None]:
        """Wait up to two seconds and return the ids of conversations with new events, each once.

        Each id comes with its event, if the wake-up carried one and was the only one for that conversation.
        """
        entries = await self._read_entries()
        self._is_quiet = not entries
        if entries:
            self._after = entries[-1][0].decode()
        self._read_since_trim += len(entries)
        notified: dict[str, CarriedEvent | None] = {}
        with_results: dict[str, None] = {}
        for entry_id, fields in entries:
            try:
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                conversation_id = (await find_conversation_keys(self._store, self._names, about[b"c"])).conversation_id
                carried = None
                if b"e" in about:
                    before, is_watched = about[b"p"].decode(), b"w" in about
                    carried = CarriedEvent(int(about[b"i"]), about[b"e"], before, is_watched=is_watched)
            except PARSE_ERRORS as error:
                await self._unreadable.quarantine(self._names, self._key, entry_id.decode(), fields, error)
            else:
                self._carried_since_trim += carried is not None
                if b"r" in about:  # settled, it comes again with its event
                    with_results[conversation_id] = None
                    continue
                notified[conversation_id] = None if conversation_id in notified else carried
        await self._settle(with_results)
        return notified

    def take_gaps(self) -> dict[str, str]:
        """Return each loss that tool workers report, once; see `record_reported_gap`."""
        gaps, self._gaps = self._gaps, {}
        return gaps

    async def _settle(self, conversation_ids: Iterable[str]) -> None:
        """Append the observations that tool workers have left beside the logs of conversations."""
        for conversation_id in conversation_ids:
            try:
                if gap := await settle_results(self._store, conversation_id):
                    self._gaps[conversation_id] = gap
            except (StoreRefused, StoreMisconfigured, StoreTooNew) as error:  # of one conversation: it affects no other
                _log.warning("the results of %s cannot be settled: %s", conversation_id, error)

    async def _read_entries(self) -> list[Any]:
        command: tuple[Argument, ...] = (
            "XREAD",
            "COUNT",
            BATCH,
            "BLOCK",
            int(BLOCK_SECONDS * 1000),
            "STREAMS",
            self._key,
            self._after,
        )
        # Trim with the next read, which saves a round trip.
        is_to_be_trimmed = (
            self._read_since_trim >= TRIM_MAILBOX_EVERY
            or self._carried_since_trim >= TRIM_CARRIED_EVERY
            or (self._is_quiet and self._carried_since_trim > 0)
        )
        commands: list[tuple[Argument, ...]] = [command]
        if is_to_be_trimmed:
            milliseconds, _, number = self._after.partition("-")
            commands.insert(0, ("XTRIM", self._key, "MINID", f"{milliseconds}-{int(number) + 1}"))
        try:
            *_, found = await self._store.retry(lambda: self._connection.call_many(commands))
        except StoreRefused as error:
            if not error.message.startswith(MISSING_STREAM_ERRORS):
                raise
            self._after = "0-0"
            await asyncio.sleep(HEARTBEAT_SECONDS)  # it has been moved away by then
            return []
        if is_to_be_trimmed:
            self._read_since_trim = self._carried_since_trim = 0
        return found[0][1] if found else []

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()


async def wake_conversations(store: Store, conversation_ids: Iterable[str]) -> None:
    """Notify conversations without new events, because a resource that they wait for is available.

    If a conversation's keys are damaged, its failed notification is logged and not raised.
    """
    calls = []
    for conversation_id in conversation_ids:
        names = await store.locate(conversation_id)
        calls.append(("FCALL", "deck_wake", 2, names.root, names.shard.root, conversation_id))
    try:
        await store.call_many(calls)
    except StoreRefused as error:
        _log.warning("a conversation could not be notified: %s", error)
