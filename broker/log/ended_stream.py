"""The stream of conversations that have settled, for clients that wait for many of them with one connection.

Holds: entries are hints; the log is the truth. A reader also polls now and then, which finds conversations whose entry
was trimmed or never added by an earlier version.
Keys: `deck:{k}:ended`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from broker.store import Argument, Store

BLOCK_SECONDS = 5.0
BATCH = 500
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 0.5
"""How long a reader pauses on a cluster before it asks again."""


class EndedStream:
    """A reader of all shards, on one connection; on a cluster, one to each of its nodes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._after: dict[str, bytes] = {}
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def open(self) -> None:
        """Start after the latest entries: `read` returns the conversations that settle from now on."""
        shards = await self._store.load_shards()
        commands: list[tuple[Argument, ...]] = [("XREVRANGE", one.ended, "+", "-", "COUNT", 1) for one in shards]
        found = await self._store.retry(lambda: self._connection.call_many(commands))
        for names, entries in zip(shards, found, strict=True):
            self._after[names.ended] = entries[0][0] if entries else b"0-0"

    async def read(self) -> list[str]:
        """Wait up to five seconds and return the ids of conversations that have settled. Any writer may forge them."""
        for names in await self._store.load_shards():
            self._after.setdefault(names.ended, b"0-0")  # a shard that was added since
        found = await self._store.retry(self._poll if self._connection.is_cluster else self._wait)
        for key, entries in found or ():
            self._after[key.decode()] = entries[-1][0]
        return [
            value.decode(errors="replace")
            for _, entries in found or ()
            for _, fields in entries
            for value in fields[1::2]
        ]

    async def _wait(self) -> Any:
        command = ("XREAD", "COUNT", BATCH, "BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS")
        return await self._connection.call(*command, *self._after, *self._after.values())

    async def _poll(self) -> Any:
        """Poll repeatedly, because one command on a cluster cannot wait for streams of several slots."""
        pause = FIRST_POLL_SECONDS
        until = self._store.clock.monotonic() + BLOCK_SECONDS
        while True:
            commands = [("XREAD", "COUNT", BATCH, "STREAMS", key, after) for key, after in self._after.items()]
            replies = await self._connection.call_many(commands)
            found = [stream for reply in replies for stream in reply or ()]
            if found or self._store.clock.monotonic() >= until:
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()
