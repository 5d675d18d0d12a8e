"""Who works on a conversation: claim, release, fencing tokens, snapshots and dispatch under a token.

Holds: at most one token is current; a call under an older one changes nothing and is answered `False` or `Fenced`.
Does not: rest on clocks. Heartbeats (`membership`) decide when to take over, tokens what may be written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.log.fencing import Ownership
from broker.runtime.errors import EventsLost, OwnershipLost, StoreError
from broker.store.store import Store


@dataclass(frozen=True, slots=True)
class Claimed:
    """A conversation taken over.

    Attributes:
        last_id: the id of its last event.
        crashes: how many workers in a row died with it since it last got on.
        node: where its workspace is, or empty.
    """

    ownership: Ownership
    last_id: int
    crashes: int
    node: str
    is_closed: bool


class NotClaimed(StrEnum):
    """Why a claim gave nothing."""

    YOURS = "yours"
    OWNED = "owned"
    MISSING = "missing"
    SWEPT = "swept"


class Standing(StrEnum):
    """How a conversation that was to begin later stands."""

    DUE = "due"
    EXPIRED = "expired"


class DispatchOutcome(StrEnum):
    """Where an action is."""

    QUEUED = "queued"
    RUNNING = "running"
    SETTLED = "settled"
    ENQUEUED = "enqueued"
    FENCED = "fenced"


class Owners:
    """Ownership of the conversations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, conversation_id: str, worker_id: str, *, ready_entry: str = "") -> Claimed | NotClaimed:
        """Become the owner of a conversation nobody owns.

        Idempotent: a second claim by the owner is `YOURS`.

        Args:
            ready_entry: the entry of the ready stream that led here; acknowledged unless the worker was swept.
        """
        names = self._store.keys(conversation_id)
        reply = await self._store.function(
            "deck_claim", (names.root, names.shard.root), conversation_id, worker_id, ready_entry
        )
        match reply:
            case ["claimed", token, last, crashes, node, closed]:
                ownership = Ownership(conversation_id, worker_id, token.decode())
                return Claimed(ownership, last, crashes, node.decode(), bool(closed))
            case [outcome]:
                return NotClaimed(outcome)
        raise StoreError(f"The function claim answered {reply!r}.")

    async def standing(self, ownership: Ownership) -> Standing | float:
        """Say whether a conversation that waits to begin may begin, or how many seconds are left until then.

        Raises:
            OwnershipLost: it has another owner.
        """
        names = self._store.keys(ownership.conversation_id)
        reply = await self._store.function(
            "deck_due", (names.root, names.shard.root), ownership.worker_id, ownership.token
        )
        match reply:
            case ["wait", left_ms]:
                return float(left_ms) / 1000
            case ["fenced"]:
                raise OwnershipLost(f"The conversation {ownership.conversation_id} has another owner.")
        return Standing(reply[0])

    async def resume_claim(self, conversation_id: str, worker_id: str) -> Claimed | None:
        """Return the current claim of this very worker, for a claim whose reply was lost."""
        names = self._store.keys(conversation_id)
        fields = ("owner", "token", "last_id", "crashes", "node", "closed")
        found = await self._store.persist(lambda: self._store.connection.call("HMGET", names.meta, *fields))
        owner, token, last, crashes, node, closed = (value.decode() if value is not None else "" for value in found)
        if owner != worker_id:
            return None
        return Claimed(Ownership(conversation_id, worker_id, token), int(last), int(crashes or 0), node, bool(closed))

    async def release(
        self, ownership: Ownership, *, seen_id: int, checksum: str = "", delay_seconds: float | None = None
    ) -> int | None:
        """Give a conversation up, unless events were appended after `seen_id`.

        Args:
            checksum: of the event `seen_id`; empty: whatever the log has under its number.
            delay_seconds: park it for so long.

        Returns:
            None when it is given up or was no longer ours; otherwise the id of its last event.

        Raises:
            EventsLost: the log ends before `seen_id`, or holds another event under that number.
        """
        delay_ms = "" if delay_seconds is None else math.ceil(delay_seconds * 1000)
        reply = await self._under_token("deck_release", ownership, seen_id, delay_ms, checksum)
        if reply[0] not in ("news", "lost"):
            return None
        last_id = int(reply[1])
        if reply[0] == "lost" or last_id < seen_id:
            raise EventsLost(ownership.conversation_id, last_id, seen_id, checksum)
        return last_id

    async def mark(self, ownership: Ownership, *, is_stepping: bool) -> bool:
        """Say that the conversation is being stepped, so that a crash now counts against it. False when fenced."""
        names = self._store.keys(ownership.conversation_id)
        reply = await self._store.function(
            "deck_mark", (names.root, names.shard.root), ownership.worker_id, ownership.token, int(is_stepping)
        )
        return bool(reply[0] == "marked")

    async def dispatch(self, ownership: Ownership, action_id: int, entry: bytes, *, pool: str = "") -> DispatchOutcome:
        """See to it that an appended action reaches a tool worker.  Idempotent.

        Args:
            pool: whose tool workers run it; empty: those that hold the conversation's workspace.
        """
        route = f"pool:{pool}" if pool else ""
        reply = await self._under_token("deck_dispatch", ownership, action_id, entry, route)
        return DispatchOutcome(reply[0])

    async def save_snapshot(
        self, ownership: Ownership, snapshot: bytes, *, seen_id: int = 0, checksum: str = ""
    ) -> bool:
        """Keep a snapshot of the log up to the event `seen_id`; False when fenced.

        Raises:
            EventsLost: the log does not hold that event with that checksum.
        """
        names = self._store.keys(ownership.conversation_id)
        arguments = (ownership.worker_id, ownership.token, snapshot, seen_id, checksum)
        reply = await self._store.function("deck_snapshot", (names.root, names.shard.root), *arguments)
        if reply[0] == "lost":
            raise EventsLost(ownership.conversation_id, int(reply[1]), seen_id, checksum)
        return bool(reply[0] == "kept")

    async def owned(self, worker_id: str) -> list[str]:
        """Return the conversations that a worker owns as the store has it."""
        commands = [("SMEMBERS", names.owned(worker_id)) for names in self._store.all_shards]
        replies = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return sorted(cid.decode() for reply in replies for cid in reply)

    async def load_snapshot(self, conversation_id: str) -> bytes | None:
        """Return the latest snapshot, if there is one."""
        key = self._store.keys(conversation_id).snapshot
        found: bytes | None = await self._store.persist(lambda: self._store.connection.call("GET", key))
        return found

    async def last_ids(self, conversation_ids: list[str]) -> list[int]:
        """Return the id of the last event of each conversation, 0 where there is none; one round trip."""
        commands = [("HGET", self._store.keys(cid).meta, "last_id") for cid in conversation_ids]
        found = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return [int(value) if value is not None and value.isdigit() else 0 for value in found]

    async def _under_token(self, function: str, ownership: Ownership, *arguments: Any) -> list[Any]:
        names = self._store.keys(ownership.conversation_id)
        return await self._store.function(
            function,
            (names.root, names.shard.root),
            ownership.conversation_id,
            ownership.worker_id,
            ownership.token,
            *arguments,
        )
