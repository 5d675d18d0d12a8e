"""The index of conversations: rows of a listing, closing, dead letters, the record of takeovers.

Holds: damaged data of one conversation hides no other conversation. A field that is not a number counts as 0, and a key
of another type is skipped.
Does not: hold anything that is not in the log. `append` writes the index together with the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from broker.runtime import StoreRefused, UnknownConversation, from_millis
from broker.store import WRONG_TYPE_PREFIX, Argument, ShardKeys, Store, decode_fields

SCAN_BATCH = 1_000
MAX_DIGITS = 18
LATEST_MS = 250_000_000_000_000
"""A time in the year 9892."""
MAX_CACHED_LABELS = 1_000
"""Number of different sets of labels that are cached."""


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation in a listing.

    Attributes:
        state: the agent's state, see `AgentState`.
        wait_reason: why it waits, or empty.
        owner: the worker that owns it, or empty.
        labels: labels set by a producer.
        tenant: its tenant, or empty.
        not_before: its start time, computed with the store's clock at submission; None if it is not scheduled.
        fields: all other fields set by its owner: iterations, cost_usd, prompt_tokens, model, …
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
        """The model that answered last, or empty."""
        return self.fields.get("model", "")

    @property
    def iterations(self) -> int:
        """Its steps so far; 0 if the field is damaged, because tool workers can write it."""
        return _parse_integer(self.fields.get("iterations", "0").encode())

    @property
    def cost_usd(self) -> float:
        """Its cost so far, in USD."""
        return _parse_usd(self.fields.get("cost_usd", ""))


@dataclass(frozen=True, slots=True)
class Takeover:
    """A conversation, or one of its actions, that was taken over from a dead worker."""

    conversation_id: str
    action_id: int | None
    from_worker: str
    to_worker: str
    at: datetime


@dataclass(frozen=True, slots=True)
class SelectionFields:
    """The part of a row that a selection compares."""

    state: str
    wait_reason: str
    labels: Mapping[str, str]
    tenant: str
    model: str
    cost_usd: float
    title: str


@dataclass(slots=True)
class ConversationProgress:
    """The progress of a conversation. The defaults stand for a conversation that has not been read yet.

    Attributes:
        state: see `AgentState`; empty if not known yet.
        worker: its current owner; empty if it has none.
        has_unknown_cost: the price of some calls is unknown, so the true cost is higher.
        tokens: prompt and completion tokens.
        created_ms: creation time in Unix milliseconds. It tells apart two conversations that had the same id.
        updated_ms: time of the last append, in Unix milliseconds.
    """

    last_id: int = 0
    state: str = ""
    wait_reason: str = ""
    worker: str = ""
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    tokens: int = 0
    created_ms: int = 0
    updated_ms: int = 0

    def update_from(self, other: ConversationProgress) -> None:
        """Copy all values from another."""
        for field_ in fields_of(self):
            setattr(self, field_.name, getattr(other, field_.name))


class Conversations:
    """The index of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_recent(self, *, limit: int = 50) -> list[ConversationRow]:
        """Return up to `limit` conversations, newest first."""
        commands = [("ZREVRANGE", names.index, 0, limit - 1, "WITHSCORES") for names in await self._store.load_shards()]
        replies = await self._store.call_many(commands)
        scored = [(float(flat[i + 1]), flat[i]) for flat in replies for i in range(0, len(flat), 2)]
        ids = [cid.decode(errors="backslashreplace") for _, cid in sorted(scored, reverse=True)[:limit]]
        return await self.load_rows(ids)

    async def count(self) -> int:
        """Return the number of conversations."""
        commands = [("ZCARD", names.index) for names in await self._store.load_shards()]
        return sum(await self._store.call_many(commands))

    async def find_by_prefix(self, prefix: str, *, limit: int) -> list[ConversationRow]:
        """Return up to `limit` ids of conversations that start with a prefix, sorted.

        Args:
            prefix: letters, digits, `-` and `_`.
        """
        found: set[str] = set()

        async def scan_shard(names: ShardKeys) -> None:
            cursor = b"0"
            while True:
                scan = ("ZSCAN", names.index, cursor, "MATCH", f"{prefix}*", "COUNT", SCAN_BATCH)
                cursor, flat = await self._store.call(*scan)
                found.update(cid.decode(errors="backslashreplace") for cid in flat[::2])
                if cursor == b"0":
                    return

        await asyncio.gather(*map(scan_shard, await self._store.load_shards()))
        return await self.load_rows(sorted(found)[:limit])

    async def load_rows(self, conversation_ids: Sequence[str]) -> list[ConversationRow]:
        """Return the rows of the conversations that exist, in the order of the ids."""
        rows = await self._rows(conversation_ids)
        return [row for row in rows if row is not None]

    async def load_selection_fields(self, conversation_ids: Sequence[str]) -> list[SelectionFields | None]:
        """Return the parts of the rows that a selection compares; None for a conversation that does not exist."""
        replies = await self._call_each(
            [("HMGET", names.meta, *_SELECTION_FIELDS) for names in await self._store.locate_all(conversation_ids)]
        )
        return [_parse_selection_fields(reply) if reply else None for reply in replies]

    async def load_progress(self, conversation_ids: Sequence[str]) -> list[ConversationProgress | None]:
        """Return the progress of conversations; None for each that does not exist."""
        replies = await self._call_each(
            [("HMGET", names.meta, *_PROGRESS_FIELDS) for names in await self._store.locate_all(conversation_ids)]
        )
        return [_parse_progress(reply) if reply else None for reply in replies]

    async def load_row(self, conversation_id: str) -> ConversationRow:
        """Return the row of one conversation.

        Raises:
            UnknownConversation: no such conversation.
        """
        names = await self._store.locate(conversation_id)
        (row,) = await self._rows([conversation_id])
        if row is None and await self._store.has_moved(names):
            return await self.load_row(conversation_id)
        if row is None:
            raise UnknownConversation(conversation_id)
        return row

    async def close(self, conversation_id: str) -> None:
        """Refuse all further events and end the processes of the workspace. Idempotent."""
        await self._call("deck_close", conversation_id)

    async def requeue(self, conversation_id: str) -> None:
        """Retry a dead letter. Idempotent."""
        await self._call("deck_requeue", conversation_id)

    async def list_dead_letters(self) -> list[str]:
        """Return the conversations that crashed three workers in a row, oldest first."""
        commands = [("ZRANGE", names.dead, 0, -1) for names in await self._store.load_shards()]
        replies = await self._store.call_many(commands)
        return [cid.decode(errors="backslashreplace") for reply in replies for cid in reply]

    async def list_takeovers(self) -> list[Takeover]:
        """Return the latest takeovers that are readable: about 10,000 per shard, in order within each shard."""
        found = []
        commands = [("XRANGE", names.takeovers, "-", "+") for names in await self._store.load_shards()]
        for entries in await self._store.call_many(commands):
            for _, flat in entries:
                with contextlib.suppress(LookupError, ValueError, OverflowError):  # any worker could have written it
                    found.append(_parse_takeover(decode_fields(flat)))
        return found

    async def _call(self, function: str, conversation_id: str) -> None:
        names = await self._store.locate(conversation_id)
        reply = await self._store.call_function(function, (names.root, names.shard.root), conversation_id)
        if reply[0] == "missing" and await self._store.has_moved(names):
            await self._call(function, conversation_id)
        elif reply[0] == "missing":
            raise UnknownConversation(conversation_id)

    async def _rows(self, ids: Sequence[str]) -> list[ConversationRow | None]:
        replies = await self._call_each([("HGETALL", names.meta) for names in await self._store.locate_all(ids)])
        rows = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in replies]
        await self._store.encryption.decrypt_fields(ids, rows)
        return [_parse_row(cid, row) for cid, row in zip(ids, rows, strict=True)]

    async def _call_each(self, commands: Sequence[tuple[Argument, ...]]) -> list[list[Any]]:
        """Return the replies to commands; an empty list where a key has another type."""
        try:
            found: list[list[Any]] = await self._store.retry(lambda: self._store.connection.call_many(commands))
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            if len(commands) == 1:
                return [[]]
            half = len(commands) // 2
            return [*await self._call_each(commands[:half]), *await self._call_each(commands[half:])]
        return found


_ROW_FIELDS = {
    "title",
    "state",
    "wait_reason",
    "last_id",
    "created_ms",
    "updated_ms",
    "owner",
    "node",
    "closed",
    "labels",
}
_INTERNAL = {
    "token",
    "rung",
    "ready_id",
    "append_key",
    "append_ids",
    "orphan_of",
    "workspace",
    "is_movable",
    "label_index",
    "gap",
    "deleted",
    "awaited",
    "noticed",
    "class",
    "tenant",
    "open_in",
    "busy",
    "double_texting",
    "acks",
    "planned",
    "due_ms",
    "expires_ms",
    "not_before_ms",
    "copied",
    "data_key",
}
_PLAN = frozenset({b"planned", b"not_before_ms"})
_HIDDEN_FIELDS = frozenset(name.encode() for name in _ROW_FIELDS | _INTERNAL)
_TOKENS = ("prompt_tokens", "completion_tokens")
_SELECTION_FIELDS = ("last_id", "state", "wait_reason", "labels", "tenant", "model", "cost_usd", "title")


def _parse_selection_fields(values: list[bytes | None]) -> SelectionFields | None:
    last_id, *others = values
    if last_id is None:
        return None
    state, wait_reason, labels, tenant, model, cost, title = (
        (text or b"").decode(errors="backslashreplace") for text in others
    )
    return SelectionFields(state, wait_reason, _parse_labels(labels), tenant, model, _parse_usd(cost), title)


_PROGRESS_FIELDS = (
    "last_id",
    "created_ms",
    "updated_ms",
    "state",
    "wait_reason",
    "owner",
    "cost_usd",
    "has_unknown_cost",
    "iterations",
    *_TOKENS,
)


def _parse_progress(values: list[bytes | None]) -> ConversationProgress | None:
    last_id, created_ms, updated_ms, *others = values
    if last_id is None:
        return None
    state, wait_reason, owner, cost = ((text or b"").decode(errors="backslashreplace") for text in others[:4])
    is_unknown, iterations, prompt, completion = (_parse_integer(number or b"0") for number in others[4:])
    return ConversationProgress(
        last_id=_parse_integer(last_id),
        state=state,
        wait_reason=wait_reason,
        worker=owner,
        iterations=iterations,
        cost_usd=_parse_usd(cost),
        has_unknown_cost=is_unknown > 0,
        tokens=prompt + completion,
        created_ms=_parse_integer(created_ms or b"0"),
        updated_ms=_parse_integer(updated_ms or b"0"),
    )


def _parse_usd(text: str) -> float:
    try:
        cost = float(text)
    except ValueError:
        return 0.0
    return cost if math.isfinite(cost) else 0.0


def _parse_row(conversation_id: str, found: Mapping[bytes, bytes]) -> ConversationRow | None:
    # Decode only the fields that are shown: a page has hundreds of rows, each with a dozen fields that are not.
    if b"last_id" not in found:
        return None

    def text(name: bytes) -> str:
        return found[name].decode(errors="backslashreplace") if name in found else ""

    return ConversationRow(
        conversation_id=conversation_id,
        title=text(b"title"),
        state=text(b"state"),
        wait_reason=text(b"wait_reason"),
        last_event_id=_parse_integer(found[b"last_id"]),
        created=_parse_time(found.get(b"created_ms", b"0")),
        updated=_parse_time(found.get(b"updated_ms", b"0")),
        owner=text(b"owner"),
        node=text(b"node"),
        is_closed=b"closed" in found,
        labels=dict(_parse_labels(text(b"labels"))),
        not_before=_parse_time(found[b"not_before_ms"])
        if found.keys() >= _PLAN and found[b"planned"] == b"waiting"
        else None,
        tenant=text(b"tenant"),
        fields={
            name.decode(errors="backslashreplace"): value.decode(errors="backslashreplace")
            for name, value in found.items()
            if name not in _HIDDEN_FIELDS
        },
    )


def _parse_integer(raw: bytes) -> int:
    return int(raw) if raw.isdigit() and len(raw) <= MAX_DIGITS else 0


def _parse_time(raw: bytes) -> datetime:
    millis = _parse_integer(raw)
    return from_millis(millis if millis <= LATEST_MS else 0)


@lru_cache(maxsize=MAX_CACHED_LABELS)
def _parse_labels(text: str) -> Mapping[str, str]:
    """Parse labels from JSON. Cached, because all conversations of one run have the same labels."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):  # a damaged hash must not fail the whole listing
        return MappingProxyType({})
    return MappingProxyType({str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {})


def _parse_takeover(fields: Mapping[str, str]) -> Takeover:
    action = fields.get("a")
    return Takeover(
        conversation_id=fields["c"],
        action_id=int(action) if action else None,
        from_worker=fields["from"],
        to_worker=fields["to"],
        at=from_millis(int(float(fields["at"]))),
    )
