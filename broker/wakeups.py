"""How a controller worker hears of news: its shard's ready stream, and its own mailbox; and how others ring it.

Holds: a ring is a hint; the log is the truth. Lost, late and repeated rings cost time, never events.
Keys: `deck:{k}:ready` (group `controllers`), `deck:{k}:worker:<w>:mail`.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.group_reader import BLOCK_SECONDS, GroupReader
from broker.keys import ShardKeys
from broker.store import Store

BATCH = 256
TRIM_MAILBOX_EVERY = 1_000


class ReadyStream:
    """The conversations of one shard that nobody owns and that have news."""

    def __init__(self, store: Store, names: ShardKeys, worker_id: str) -> None:
        self._reader = GroupReader(store, "controllers", worker_id, [names.ready])

    async def read(self, *, limit: int) -> list[tuple[str, str]]:
        """Wait up to two seconds and return up to `limit` pairs of conversation id and entry id.

        The entry is acknowledged by the claim it leads to.
        """
        entries = await self._reader.read(limit=min(limit, BATCH))
        return [(fields[1].decode(), entry_id.decode()) for _, entry_id, fields in entries]

    async def aclose(self) -> None:
        """Close its connection."""
        await self._reader.aclose()


class Mailbox:
    """The rings of one shard for the conversations a worker owns."""

    def __init__(self, store: Store, names: ShardKeys, worker_id: str) -> None:
        self._store = store
        self._key = names.mail(worker_id)
        self._after = "0-0"
        self._read_since_trim = 0
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def read(self) -> list[str]:
        """Wait up to two seconds and return the ids of conversations that have news, each once."""
        found = await self._store.persist(
            lambda: self._connection.call(
                *("XREAD", "COUNT", BATCH, "BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS", self._key, self._after)
            )
        )
        entries = found[0][1] if found else []
        if entries:
            self._after = entries[-1][0].decode()
            self._read_since_trim += len(entries)
            if self._read_since_trim >= TRIM_MAILBOX_EVERY:
                self._read_since_trim = 0
                await self._store.persist(lambda: self._store.connection.call("XTRIM", self._key, "MINID", self._after))
        return list(dict.fromkeys(fields[1].decode() for _, fields in entries))

    async def aclose(self) -> None:
        """Close its connection."""
        await self._connection.aclose()


async def wake(store: Store, conversation_ids: Iterable[str]) -> None:
    """Ring conversations whose logs have not grown: what they wait for has come."""
    calls = []
    for conversation_id in conversation_ids:
        names = store.keys(conversation_id)
        calls.append(("FCALL", "deck_wake", 2, names.root, names.shard.root, conversation_id))
    await store.persist(lambda: store.connection.call_many(calls))
