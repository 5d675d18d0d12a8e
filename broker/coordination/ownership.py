"""Ownership of conversations: claim, release, fencing tokens, snapshots and dispatch under a token.

Holds: at most one token is current. A call with an older one changes nothing and returns `False` or `Fenced`.
Does not: rely on clocks. Heartbeats (`membership`) decide when to take over; tokens decide which writes are accepted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from secrets import token_hex
from typing import Any

from broker.contract import Ownership
from broker.coordination.crash_attribution import Mark
from broker.coordination.wakeups import settle_results
from broker.runtime import CorruptEntry, EventsLost, OwnershipLost, StoreError, StoreRefused, StoreUnavailable
from broker.store import Store, decode_text, parse_number, read_tolerantly

SNAPSHOT = "snapshot"
MAX_SETTLEMENTS = 8
"""How often a call settles results that have come meanwhile, and is repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimedConversation:
    """A claimed conversation.

    Attributes:
        last_id: the id of its last event.
        crashes: number of workers in a row that died with it since it last made progress.
        node: the node of its workspace, or empty.
        rank: rank of its priority, see `broker.contract.specs`.
        share: the name of its tenant in the fair queue.
        weight: the weight of its tenant relative to others.
    """

    ownership: Ownership
    last_id: int
    crashes: int
    node: str
    is_closed: bool
    rank: int = 1
    share: str = ""
    weight: float = 1.0


class ClaimFailure(StrEnum):
    """Why a claim failed."""

    YOURS = "yours"
    OWNED = "owned"
    MISSING = "missing"
    SWEPT = "swept"


class StartStatus(StrEnum):
    """Whether a scheduled conversation may start."""

    DUE = "due"
    EXPIRED = "expired"


class DispatchOutcome(StrEnum):
    """The state of a dispatched action."""

    QUEUED = "queued"
    RUNNING = "running"
    SETTLED = "settled"
    ENQUEUED = "enqueued"
    FENCED = "fenced"


class Owners:
    """Ownership of the conversations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(
        self, conversation_id: str, worker_id: str, *, ready_entry: str = ""
    ) -> ClaimedConversation | ClaimFailure:
        """Claim a conversation that has no owner.

        Idempotent: a second claim by the owner returns `YOURS`.

        Args:
            ready_entry: the ready stream's entry that led to this claim, see `ReadyStream.read`. It is acknowledged
                unless this worker was swept.
        """
        names = await self._store.locate(conversation_id)
        stream, _, entry = ready_entry.rpartition("|")
        reply = await self._store.call_function(
            "deck_claim", (names.root, names.shard.root), conversation_id, worker_id, entry, stream or "ready"
        )
        match reply:
            case ["claimed", token, last, crashes, node, closed, *turn]:
                ownership = Ownership(conversation_id, worker_id, token.decode())
                return ClaimedConversation(ownership, last, crashes, node.decode(), bool(closed), *_parse_turn(*turn))
            case ["missing"] if await self._store.has_moved(names):
                return await self.claim(conversation_id, worker_id, ready_entry=ready_entry)
            case [outcome]:
                return ClaimFailure(outcome)
        raise StoreError(f"Unexpected reply of the function claim: {reply!r}.")

    async def check_start(self, ownership: Ownership) -> StartStatus | float:
        """Return whether a scheduled conversation may start, or the number of seconds until its start.

        Raises:
            OwnershipLost: it has another owner.
        """
        names = await self._store.locate(ownership.conversation_id)
        reply = await self._store.call_function(
            "deck_due", (names.root, names.shard.root), ownership.worker_id, ownership.token
        )
        match reply:
            case ["wait", left_ms]:
                return float(left_ms) / 1000
            case ["fenced"]:
                raise OwnershipLost(f"The conversation {ownership.conversation_id} has another owner.")
        return StartStatus(reply[0])

    async def resume_claim(self, conversation_id: str, worker_id: str) -> ClaimedConversation | None:
        """Return the current claim of this worker, for a claim whose reply was lost."""
        names = await self._store.locate(conversation_id)
        fields = ("owner", "token", "last_id", "node", "closed", "class", "tenant")
        commands = [("HMGET", names.meta, *fields), ("HGET", names.grants, "crashes")]
        found, crashes = await self._store.retry(lambda: read_tolerantly(self._store.connection, commands))
        owner, token, last, node, closed, rank, tenant = (decode_text(value) for value in found or [None] * len(fields))
        if owner != worker_id:
            return None
        ownership = Ownership(conversation_id, worker_id, token)
        rules = ("HMGET", names.shard.tenants, tenant, "*")
        own, others = await self._store.call(*rules)
        share = "*" if own is None and others is not None else tenant
        weight, _, _ = (own or others or b"1").partition(b" ")
        turn = _parse_turn(rank.encode(), share.encode(), weight)
        return ClaimedConversation(ownership, int(last), int(parse_number(crashes)), node, bool(closed), *turn)

    async def release(
        self, ownership: Ownership, *, seen_id: int, checksum: str = "", delay_seconds: float | None = None
    ) -> int | None:
        """Release a conversation, unless events were appended after `seen_id`.

        Args:
            checksum: checksum of the event `seen_id`; empty to accept any event with that id.
            delay_seconds: park the conversation for this time.

        Returns:
            None if it was released or had another owner; otherwise the id of its last event.

        Raises:
            EventsLost: the log ends before `seen_id`, or holds another event with that id.
        """
        delay_ms = "" if delay_seconds is None else math.ceil(delay_seconds * 1000)
        for _ in range(MAX_SETTLEMENTS):
            reply = await self._call_with_token("deck_release", ownership, seen_id, delay_ms, checksum)
            if reply != ["news", seen_id]:
                break
            await settle_results(self._store, ownership.conversation_id)
        if reply[0] not in ("news", "lost"):
            return None
        last_id = int(reply[1])
        if reply[0] == "lost" or last_id < seen_id:
            raise EventsLost(ownership.conversation_id, last_id, seen_id, checksum)
        return last_id

    async def mark(self, ownership: Ownership, mark: Mark) -> bool:
        """Record whether a step of the conversation runs; only then does a crash count. Returns False if fenced."""
        names = await self._store.locate(ownership.conversation_id)
        reply = await self._store.call_function(
            "deck_mark", (names.root, names.shard.root), ownership.worker_id, ownership.token, int(mark)
        )
        return bool(reply[0] == "marked")

    async def dispatch(self, ownership: Ownership, action_id: int, entry: bytes, *, pool: str = "") -> DispatchOutcome:
        """Make sure that an appended action reaches a tool worker. Idempotent.

        Args:
            pool: the pool whose tool workers run it; empty for those that hold the conversation's workspace.
        """
        route = f"pool:{pool}" if pool else ""
        for _ in range(MAX_SETTLEMENTS):
            reply = await self._call_with_token("deck_dispatch", ownership, action_id, entry, route, token_hex(16))
            if reply != ["results"]:
                break
            await settle_results(self._store, ownership.conversation_id)
        else:
            raise StoreUnavailable(f"Results of {ownership.conversation_id} come faster than they can be settled.")
        return DispatchOutcome(reply[0])

    async def save_snapshot(
        self, ownership: Ownership, snapshot: bytes, *, seen_id: int = 0, checksum: str = ""
    ) -> bool:
        """Save a snapshot of the log up to the event `seen_id`. Returns False if fenced.

        Raises:
            EventsLost: the log does not hold that event with that checksum.
        """
        names = await self._store.locate(ownership.conversation_id)
        cipher = await self._store.encryption.find_cipher(ownership.conversation_id)
        if cipher is not None:
            snapshot = cipher.encrypt(snapshot, SNAPSHOT)
        arguments = (ownership.worker_id, ownership.token, snapshot, seen_id, checksum)
        reply = await self._store.call_function("deck_snapshot", (names.root, names.shard.root), *arguments)
        if reply[0] == "lost":
            raise EventsLost(ownership.conversation_id, int(reply[1]), seen_id, checksum)
        return bool(reply[0] == "kept")

    async def list_owned(self, worker_id: str) -> list[str]:
        """Return the conversations that a worker owns according to the store. Unreadable ids are left out."""
        commands = [("SMEMBERS", names.worker_conversations(worker_id)) for names in await self._store.load_shards()]
        replies = await self._call_each(commands, instead=())
        return sorted(cid.decode(errors="backslashreplace") for reply in replies for cid in reply)

    async def load_snapshot(self, conversation_id: str) -> bytes | None:
        """Return the latest snapshot; None if there is none, or if it belongs to another conversation or key."""
        key = (await self._store.locate(conversation_id)).snapshot
        found: bytes | None = await self._store.call("GET", key)
        cipher = await self._store.encryption.find_cipher(conversation_id) if found else None
        try:
            return found if found is None or cipher is None else cipher.decrypt(found, SNAPSHOT)
        except CorruptEntry as error:  # a snapshot only saves time
            _log.warning("the snapshot of %s cannot be used: %s", conversation_id, error)
            return None

    async def load_last_ids(self, conversation_ids: list[str]) -> list[int]:
        """Return the id of the last event of each conversation; 0 if it does not exist or is unreadable.

        One round trip, unless a key is damaged.
        """
        commands = [("HGET", names.meta, "last_id") for names in await self._store.locate_all(conversation_ids)]
        found = await self._call_each(commands, instead=None)
        return [int(value) if value is not None and value.isdigit() else 0 for value in found]

    async def _call_each(self, commands: Sequence[tuple[str, ...]], *, instead: Any) -> list[Any]:
        """Return the replies to read-only commands, with a substitute for each that the store refuses."""
        try:
            return await self._store.call_many(commands)
        except StoreRefused:  # a key of another type; it affects one conversation only
            replies = []
            for command in commands:
                try:
                    replies.append(await self._store.call(*command))
                except StoreRefused as error:
                    _log.warning("%s cannot be read: %s", command[1], error)
                    replies.append(instead)
            return replies

    async def _call_with_token(self, function: str, ownership: Ownership, *arguments: Any) -> list[Any]:
        names = await self._store.locate(ownership.conversation_id)
        return await self._store.call_function(
            function,
            (names.root, names.shard.root),
            ownership.conversation_id,
            ownership.worker_id,
            ownership.token,
            *arguments,
        )


def _parse_turn(rank: bytes = b"1", share: bytes = b"", weight: bytes = b"1") -> tuple[int, str, float]:
    """Parse rank, share and weight; invalid or missing values get defaults. Functions of other versions omit them."""
    return (int(rank) if rank in (b"0", b"1", b"2") else 1), share.decode(errors="backslashreplace"), float(weight)
