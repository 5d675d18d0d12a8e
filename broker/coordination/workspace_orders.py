"""Orders about a conversation's workspace that are not events: they change nothing that the log records.

Keys: `deck:{k}:act:node:<id>`, the action stream of the workspace's node.
"""

from __future__ import annotations

import asyncio

from broker.runtime import StoreRefused
from broker.store import Store

_POLL_SECONDS = 0.02
_LOOKAHEAD = 1_000
_NO_READER_ERRORS = ("answered: NOGROUP", "no such key")
"""Errors of the server for a stream that no worker reads, or that was removed with its node."""


class WorkspaceOrders:
    """Sends orders to the tool workers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def end_sessions(self, conversation_id: str, *, limit_seconds: float) -> bool:
        """End the processes of a workspace. Its files stay, and a later action starts a new session. Idempotent.

        Args:
            limit_seconds: how long to wait until a tool worker of the node has done it.

        Returns:
            Whether all of them have ended. If False, they end when a tool worker gets to the order, or when they were
            idle for their time to live.
        """
        names = await self._store.locate(conversation_id)
        node = await self._store.call("HGET", names.meta, "node")
        if node is None:
            return True
        stream = names.shard.actions(f"node:{node.decode()}")
        order = ("c", conversation_id, "a", 0, "x", "close")
        entry = (await self._store.call("XADD", stream, "*", *order)).decode()
        try:
            async with asyncio.timeout(limit_seconds):
                while carrier := await self._find_carrying_entry(stream, entry, conversation_id):
                    entry = carrier
                    await asyncio.sleep(_POLL_SECONDS)  # an acknowledgement sends no notification
        except TimeoutError:
            return False
        return True

    async def _find_carrying_entry(self, stream: str, entry: str, conversation_id: str) -> str | None:
        """Return the entry that carries the order now; None if the order was carried out.

        If a worker dies with the entry, a copy is made. The copy is looked up last, so that it is not missed.
        """
        commands = [
            ("XINFO", "GROUPS", stream),
            ("XPENDING", stream, "tools", entry, entry, 1),
            ("XRANGE", stream, f"({entry}", "+", "COUNT", _LOOKAHEAD),
        ]
        try:
            groups, pending, later = await self._store.call_many(commands)
        except StoreRefused as error:
            if not any(missing in error.message for missing in _NO_READER_ERRORS):
                raise
            return entry
        for entry_id, fields in later:
            if fields[1::2] == [conversation_id.encode(), b"0", b"close"]:
                carrier: str = entry_id.decode()
                return carrier
        delivered = {flat[i]: flat[i + 1] for flat in groups for i in range(0, len(flat), 2)}[b"last-delivered-id"]
        return entry if pending or _split_entry(delivered.decode()) < _split_entry(entry) else None


def _split_entry(entry: str) -> tuple[int, int]:
    millis, _, number = entry.partition("-")
    return int(millis), int(number)
