"""The index of conversations: what a listing shows, closing, dead letters, the record of takeovers.

Does not: say anything that the log does not; the index is written along with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from broker.runtime.clock import from_millis
from broker.runtime.errors import UnknownConversation
from broker.store.connection import texts_by_name
from broker.store.store import Store

SCANNED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation as a listing shows it.

    Attributes:
        state: the agent's state, see `AgentState`.
        wait_reason: why it waits, or empty.
        owner: the worker that works on it, or empty.
        labels: what a producer has written on it.
        tenant: whose it is, or empty.
        not_before: when it begins, by the store's clock when it was submitted; None: it does not wait.
        fields: everything else its owner shows: iterations, cost_usd, prompt_tokens, model, …
    """

    conversation_id: str
    title: str
    state: str
    wait_reason: str
    last_event_id: int
    created: datetime
    updated: datetime
    owner: str
    node: str
    is_closed: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    not_before: datetime | None = None
    tenant: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model that has answered last, or empty."""
        return self.fields.get("model", "")

    @property
    def cost_usd(self) -> float:
        """What it has cost so far."""
        return _usd(self.fields.get("cost_usd", ""))


@dataclass(frozen=True, slots=True)
class Takeover:
    """One conversation, or one action of it, taken over from a dead worker."""

    conversation_id: str
    action_id: int | None
    from_worker: str
    to_worker: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The part of a row by which conversations are chosen."""

    state: str
    wait_reason: str
    labels: Mapping[str, str]
    tenant: str
    model: str
    cost_usd: float


class Conversations:
    """The index of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def recent(self, *, limit: int = 50) -> list[ConversationRow]:
        """Return up to `limit` conversations, the newest first."""
        commands = [("ZREVRANGE", names.index, 0, limit - 1, "WITHSCORES") for names in self._store.all_shards]
        replies = await self._store.persist(lambda: self._store.connection.call_many(commands))
        scored = [(float(flat[i + 1]), flat[i]) for flat in replies for i in range(0, len(flat), 2)]
        ids = [cid.decode(errors="backslashreplace") for _, cid in sorted(scored, reverse=True)[:limit]]
        return await self.rows(ids)

    async def count(self) -> int:
        """Return how many conversations there are."""
        commands = [("ZCARD", names.index) for names in self._store.all_shards]
        return sum(await self._store.persist(lambda: self._store.connection.call_many(commands)))

    async def beginning_with(self, prefix: str, *, limit: int) -> list[ConversationRow]:
        """Return the conversations whose ids begin so, in order of their ids, and at most `limit` of them.

        Args:
            prefix: letters, digits, `-` and `_`.
        """
        found: set[str] = set()
        for names in self._store.all_shards:
            cursor = b"0"
            while True:
                scan = ("ZSCAN", names.index, cursor, "MATCH", f"{prefix}*", "COUNT", SCANNED_AT_ONCE)
                cursor, flat = await self._store.persist(lambda: self._store.connection.call(*scan))  # noqa: B023
                found.update(cid.decode(errors="backslashreplace") for cid in flat[::2])
                if cursor == b"0":
                    break
        return await self.rows(sorted(found)[:limit])

    async def rows(self, conversation_ids: Sequence[str]) -> list[ConversationRow]:
        """Return those of the conversations that exist, in the order of the ids."""
        rows = await self._rows(conversation_ids)
        return [row for row in rows if row is not None]

    async def glimpses(self, conversation_ids: Sequence[str]) -> list[Glimpse | None]:
        """Return what is asked about conversations before they are shown; None for those that do not exist."""
        commands = [("HMGET", self._store.keys(cid).meta, *_GLIMPSE) for cid in conversation_ids]
        replies = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return [_glimpse(reply) for reply in replies]

    async def row(self, conversation_id: str) -> ConversationRow:
        """Return one conversation.

        Raises:
            UnknownConversation: no such conversation.
        """
        (row,) = await self._rows([conversation_id])
        if row is None:
            raise UnknownConversation(conversation_id)
        return row

    async def close(self, conversation_id: str) -> None:
        """Refuse every further event and end the workspace's processes.  Idempotent."""
        await self._call("deck_close", conversation_id)

    async def requeue(self, conversation_id: str) -> None:
        """Give a dead letter another chance.  Idempotent."""
        await self._call("deck_requeue", conversation_id)

    async def dead_letters(self) -> list[str]:
        """Return the conversations that crashed three workers in a row, the oldest first."""
        commands = [("ZRANGE", names.dead, 0, -1) for names in self._store.all_shards]
        replies = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return [cid.decode(errors="backslashreplace") for reply in replies for cid in reply]

    async def takeovers(self) -> list[Takeover]:
        """Return the latest takeovers, at most about 10,000 a shard, in order within a shard."""
        found = []
        for names in self._store.all_shards:
            key = names.takeovers
            entries = await self._store.persist(lambda: self._store.connection.call("XRANGE", key, "-", "+"))  # noqa: B023
            for _, flat in entries:
                fields = texts_by_name(flat)
                action = fields.get("a")
                found.append(
                    Takeover(
                        conversation_id=fields["c"],
                        action_id=int(action) if action else None,
                        from_worker=fields["from"],
                        to_worker=fields["to"],
                        at=from_millis(int(float(fields["at"]))),
                    )
                )
        return found

    async def _call(self, function: str, conversation_id: str) -> None:
        names = self._store.keys(conversation_id)
        reply = await self._store.function(function, (names.root, names.shard.root), conversation_id)
        if reply[0] == "missing":
            raise UnknownConversation(conversation_id)

    async def _rows(self, ids: Sequence[str]) -> list[ConversationRow | None]:
        commands = [("HGETALL", self._store.keys(cid).meta) for cid in ids]
        replies = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return [_row(cid, flat) for cid, flat in zip(ids, replies, strict=True)]


_KNOWN = {"title", "state", "wait_reason", "last_id", "created_ms", "updated_ms", "owner", "node", "closed", "labels"}
_INTERNAL = {
    "token",
    "rung",
    "ready_id",
    "append_key",
    "append_ids",
    "mark",
    "orphan_of",
    "workspace",
    "gap",
    "deleted",
    "awaited",
    "noticed",
    "class",
    "tenant",
    "open_in",
    "busy",
    "double_texting",
    "planned",
    "due_ms",
    "expires_ms",
    "not_before_ms",
    "copied",
}
_NOT_SHOWN = _KNOWN | _INTERNAL
_GLIMPSE = ("last_id", "state", "wait_reason", "labels", "tenant", "model", "cost_usd")


def _glimpse(values: list[bytes | None]) -> Glimpse | None:
    last_id, *others = values
    if last_id is None:
        return None
    state, wait_reason, labels, tenant, model, cost = (
        (text or b"").decode(errors="backslashreplace") for text in others
    )
    return Glimpse(state, wait_reason, _labels_in(labels), tenant, model, _usd(cost))


def _usd(text: str) -> float:
    try:
        cost = float(text)
    except ValueError:
        return 0.0
    return cost if math.isfinite(cost) else 0.0


def _row(conversation_id: str, flat: list[bytes]) -> ConversationRow | None:
    meta = texts_by_name(flat)
    if "last_id" not in meta:
        return None
    return ConversationRow(
        conversation_id=conversation_id,
        title=meta.get("title", ""),
        state=meta.get("state", ""),
        wait_reason=meta.get("wait_reason", ""),
        last_event_id=int(meta["last_id"]),
        created=from_millis(int(meta.get("created_ms", "0"))),
        updated=from_millis(int(meta.get("updated_ms", "0"))),
        owner=meta.get("owner", ""),
        node=meta.get("node", ""),
        is_closed="closed" in meta,
        labels=_labels_in(meta.get("labels", "")),
        not_before=_not_before(meta),
        tenant=meta.get("tenant", ""),
        fields={key: value for key, value in meta.items() if key not in _NOT_SHOWN},
    )


def _not_before(meta: Mapping[str, str]) -> datetime | None:
    due = meta.get("not_before_ms", "")
    return from_millis(int(due)) if meta.get("planned") == "waiting" and due.isdigit() else None


def _labels_in(text: str) -> dict[str, str]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):  # a damaged hash concerns no other conversation
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
