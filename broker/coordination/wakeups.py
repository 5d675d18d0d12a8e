"""How a controller worker is notified of new events: by its shard's ready stream and its own mailbox.

Holds: a wake-up is a hint; the log is the truth. Lost, late and repeated wake-ups cost time, never events.
Keys: `deck:{k}:ready`, `deck:{k}:ready:interactive` (group `controllers`), `deck:{k}:worker:<w>:mail`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from broker.coordination.unreadable import CANNOT_BE_READ, Unreadable, conversation_of
from broker.runtime.errors import StoreRefused
from broker.store.group_reader import BLOCK_SECONDS, HEARTBEAT_SECONDS, MADE_WITH_THE_NEXT_BEAT, GroupReader
from broker.store.keys import ShardKeys
from broker.store.store import Store

BATCH = 256
TRIM_MAILBOX_EVERY = 1_000

_log = logging.getLogger(__name__)


class ReadyStream:
    """The conversations of one shard that nobody owns and that have new events, in their turn; see turns.lua.

    Interactive ones have a stream of their own, which a worker reads even if it has room for no others.
    """

    def __init__(self, store: Store, names: ShardKeys, worker_id: str, *, is_interactive: bool = False) -> None:
        self._store, self._names = store, names
        self._unreadable = Unreadable(store)
        self._stream = names.ready_interactive if is_interactive else names.ready
        self._prefix = "ready:interactive|" if is_interactive else ""
        self._reader = GroupReader(store, "controllers", worker_id, [self._stream])

    async def read(self, *, limit: int) -> list[tuple[str, str]]:
        """Wait up to two seconds and return up to `limit` pairs of conversation id and entry.

        The entry is acknowledged by the claim it leads to.
        """
        notified = []
        for _, entry, fields in await self._reader.read(limit=min(limit, BATCH)):
            entry_id = entry.decode()
            try:
                notified.append((_conversation_in(self._store, self._names, fields), self._prefix + entry_id))
            except CANNOT_BE_READ as error:
                await self._unreadable.put_aside(
                    self._names, self._stream, entry_id, fields, error, group="controllers"
                )
        return notified

    async def aclose(self) -> None:
        """Close its connection."""
        await self._reader.aclose()


class Mailbox:
    """The wake-ups of one shard for the conversations that a worker owns."""

    def __init__(self, store: Store, names: ShardKeys, worker_id: str) -> None:
        self._store, self._names = store, names
        self._unreadable = Unreadable(store)
        self._key = names.mail(worker_id)
        self._after = "0-0"
        self._read_since_trim = 0
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def read(self) -> list[str]:
        """Wait up to two seconds and return the ids of conversations that have new events, each once."""
        entries = await self._entries()
        if entries:
            self._after = entries[-1][0].decode()
            self._read_since_trim += len(entries)
            if self._read_since_trim >= TRIM_MAILBOX_EVERY:
                self._read_since_trim = 0
                trim = ("XTRIM", self._key, "MINID", self._after)
                with suppress(StoreRefused):  # it was overwritten meanwhile
                    await self._store.call(*trim)
        notified: dict[str, None] = {}
        for entry_id, fields in entries:
            try:
                notified[_conversation_in(self._store, self._names, fields)] = None
            except CANNOT_BE_READ as error:
                await self._unreadable.put_aside(self._names, self._key, entry_id.decode(), fields, error)
        return list(notified)

    async def _entries(self) -> list[Any]:
        command = ("XREAD", "COUNT", BATCH, "BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS", self._key, self._after)
        try:
            found = await self._store.persist(lambda: self._connection.call(*command))
        except StoreRefused as error:
            if not error.message.startswith(MADE_WITH_THE_NEXT_BEAT):
                raise
            self._after = "0-0"
            await asyncio.sleep(HEARTBEAT_SECONDS)  # by then it has been moved out of the way
            return []
        return found[0][1] if found else []

    async def aclose(self) -> None:
        """Close its connection."""
        await self._connection.aclose()


def _conversation_in(store: Store, names: ShardKeys, fields: list[bytes]) -> str:
    about = dict(zip(fields[::2], fields[1::2], strict=True))
    return conversation_of(store, names, about[b"c"]).conversation_id


async def wake(store: Store, conversation_ids: Iterable[str]) -> None:
    """Notify conversations whose logs have not grown: what they wait for has arrived.

    One that cannot be notified, because its keys are damaged, is logged: the caller is not at fault.
    """
    calls = []
    for conversation_id in conversation_ids:
        names = store.keys(conversation_id)
        calls.append(("FCALL", "deck_wake", 2, names.root, names.shard.root, conversation_id))
    try:
        await store.call_many(calls)
    except StoreRefused as error:
        _log.warning("a conversation could not be notified: %s", error)
