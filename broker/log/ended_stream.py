"""The stream of conversations that have settled, for clients that wait for many of them with one connection.

Holds: entries are hints; the log is the truth. A reader polls too, more rarely, and so finds what the stream has lost:
an entry that was trimmed or that a former version of the functions did not add.
Keys: `deck:{k}:ended`.
"""

from __future__ import annotations

from broker.store import Argument, Store

BLOCK_SECONDS = 5.0
BATCH = 500


class EndedStream:
    """A reader of all shards, on one connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shards = store.all_shards
        self._after: dict[str, bytes] = {}
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def open(self) -> None:
        """Start after the latest entries: `read` returns the conversations that settle from now on."""
        commands: list[tuple[Argument, ...]] = [("XREVRANGE", one.ended, "+", "-", "COUNT", 1) for one in self._shards]
        found = await self._store.retry(lambda: self._connection.call_many(commands))
        for names, entries in zip(self._shards, found, strict=True):
            self._after[names.ended] = entries[0][0] if entries else b"0-0"

    async def read(self) -> list[str]:
        """Wait up to five seconds and return the ids of conversations that have settled. Any writer may forge them."""
        command = ("XREAD", "COUNT", BATCH, "BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS")
        found = await self._store.retry(lambda: self._connection.call(*command, *self._after, *self._after.values()))
        for key, entries in found or ():
            self._after[key.decode()] = entries[-1][0]
        return [
            value.decode(errors="replace")
            for _, entries in found or ()
            for _, fields in entries
            for value in fields[1::2]
        ]

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()
