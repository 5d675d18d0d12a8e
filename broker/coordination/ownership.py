"""Who works on a conversation: claim, release, fencing tokens, snapshots and dispatch under a token.

Holds: at most one token is current; a call under an older one changes nothing and is answered `False` or `Fenced`.
Does not: rely on clocks. Heartbeats (`membership`) decide when to take over, tokens what may be written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.contract import Ownership
from broker.runtime import EventsLost, OwnershipLost, StoreError, StoreRefused
from broker.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A conversation taken over.

    Attributes:
        last_id: the id of its last event.
        crashes: how many workers in a row died with it since it last made progress.
        node: where its workspace is, or empty.
        rank: of its priority, see `broker.contract.priority`.
        share: the name under which its tenant stands in line, and `weight` how much it gets beside others.
    """

    ownership: Ownership
    last_id: int
    crashes: int
    node: str
    is_closed: bool
    rank: int = 1
    share: str = ""
    weight: float = 1.0


class NotClaimed(StrEnum):
    """Why a claim gave nothing."""

    YOURS = "yours"
    OWNED = "owned"
    MISSING = "missing"
    SWEPT = "swept"


class StartStatus(StrEnum):
    """Whether a conversation that was to begin later may begin."""

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
            ready_entry: the entry of a ready stream that led here, see `ReadyStream.read`; acknowledged unless the
                worker was swept.
        """
        names = self._store.keys(conversation_id)
        stream, _, entry = ready_entry.rpartition("|")
        reply = await self._store.function(
            "deck_claim", (names.root, names.shard.root), conversation_id, worker_id, entry, stream or "ready"
        )
        match reply:
            case ["claimed", token, last, crashes, node, closed, *turn]:
                ownership = Ownership(conversation_id, worker_id, token.decode())
                return Claimed(ownership, last, crashes, node.decode(), bool(closed), *_turn(*turn))
            case [outcome]:
                return NotClaimed(outcome)
        raise StoreError(f"The function claim answered {reply!r}.")

    async def start_status(self, ownership: Ownership) -> StartStatus | float:
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
        return StartStatus(reply[0])

    async def resume_claim(self, conversation_id: str, worker_id: str) -> Claimed | None:
        """Return the current claim of this very worker, for a claim whose reply was lost."""
        names = self._store.keys(conversation_id)
        fields = ("owner", "token", "last_id", "crashes", "node", "closed", "class", "tenant")
        found = await self._store.call("HMGET", names.meta, *fields)
        owner, token, last, crashes, node, closed, rank, tenant = (
            value.decode() if value is not None else "" for value in found
        )
        if owner != worker_id:
            return None
        ownership = Ownership(conversation_id, worker_id, token)
        rules = ("HMGET", names.shard.tenants, tenant, "*")
        own, others = await self._store.call(*rules)
        share = "*" if own is None and others is not None else tenant
        weight, _, _ = (own or others or b"1").partition(b" ")
        turn = _turn(rank.encode(), share.encode(), weight)
        return Claimed(ownership, int(last), int(crashes or 0), node, bool(closed), *turn)

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
        """Record that the conversation is being stepped, so that a crash now counts against it. False when fenced."""
        names = self._store.keys(ownership.conversation_id)
        reply = await self._store.function(
            "deck_mark", (names.root, names.shard.root), ownership.worker_id, ownership.token, int(is_stepping)
        )
        return bool(reply[0] == "marked")

    async def dispatch(self, ownership: Ownership, action_id: int, entry: bytes, *, pool: str = "") -> DispatchOutcome:
        """Make sure that an appended action reaches a tool worker. Idempotent.

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
        """Return the conversations that a worker owns as the store has it; what cannot be read is left out."""
        commands = [("SMEMBERS", names.owned(worker_id)) for names in self._store.all_shards]
        replies = await self._each(commands, instead=())
        return sorted(cid.decode(errors="backslashreplace") for reply in replies for cid in reply)

    async def load_snapshot(self, conversation_id: str) -> bytes | None:
        """Return the latest snapshot, if there is one."""
        key = self._store.keys(conversation_id).snapshot
        found: bytes | None = await self._store.call("GET", key)
        return found

    async def last_ids(self, conversation_ids: list[str]) -> list[int]:
        """Return the id of the last event of each conversation, 0 where there is none or it cannot be read.

        One round trip, unless a key is damaged.
        """
        commands = [("HGET", self._store.keys(cid).meta, "last_id") for cid in conversation_ids]
        found = await self._each(commands, instead=None)
        return [int(value) if value is not None and value.isdigit() else 0 for value in found]

    async def _each(self, commands: Sequence[tuple[str, ...]], *, instead: Any) -> list[Any]:
        """Return the replies to commands that only read, and something else for one that the store refuses."""
        try:
            return await self._store.call_many(commands)
        except StoreRefused:  # a key of another type, which concerns one of them
            replies = []
            for command in commands:
                try:
                    replies.append(await self._store.call(*command))
                except StoreRefused as error:
                    _log.warning("%s cannot be read: %s", command[1], error)
                    replies.append(instead)
            return replies

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


def _turn(rank: bytes = b"1", share: bytes = b"", weight: bytes = b"1") -> tuple[int, str, float]:
    """Return rank, share and weight, as far as they can be read; functions of another version leave them out."""
    return (int(rank) if rank in (b"0", b"1", b"2") else 1), share.decode(errors="backslashreplace"), float(weight)
