"""Delivers actions to tool workers: the action streams of their pools and of their node.

The stream of a node also carries orders about a workspace that are not events: they change nothing that the log
records.

Holds: an action is claimed before its side effect. An action claimed by a worker that died is delivered again as
`ActionReclaimed`, so that its new worker asks the journal before it runs anything. One observation settles an action.
Keys: `deck:{k}:act:<route>`, `deck:{k}:act:interactive:<route>` (group `tools`), `deck:{k}:act:node:<id>`, the action
stream of the workspace's node.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from broker.contract import WorkspaceSpec, codec
from broker.coordination.crash_attribution import Mark
from broker.coordination.quarantine import PARSE_ERRORS, Quarantine, find_conversation_keys
from broker.runtime import EventsLost, StoreRefused, StoreTooNew
from broker.secrets import ClaimedSecrets
from broker.store import GroupReader, ShardKeys, Store

LARGEST_ID = 2**53
ORDERS = frozenset({"cancel", "close", "terminal", "transfer"})


@dataclass(frozen=True, slots=True)
class ActionDelivery:
    """An action delivered to this worker.

    Attributes:
        entry: the action event's bytes, see `codec`.
        workspace: the workspace of the conversation's tools.
        place: `<stream>|<entry id>`, acknowledged together with the observation.
        is_anywhere: it was sent to a pool and not to its workspace. The claim binds no workspace to this node.
        sealed_workspace: the text of `workspace`, as it was dispatched.
        capability: permits reports about this action, see results.lua.
    """

    conversation_id: str
    action_id: int
    entry: bytes
    workspace: WorkspaceSpec
    location: str
    is_anywhere: bool = False
    sealed_workspace: bytes = b""
    capability: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ControlDelivery:
    """An order about a workspace: `cancel` a running action, `close` it, open a `terminal`, or `transfer` files.

    Attributes:
        token: the token of a transfer or terminal, see `broker.coordination`.
        entry: the entry of the action to cancel; empty if it is unknown.
    """

    conversation_id: str
    action_id: int
    order: str
    location: str
    token: str = ""
    entry: bytes = b""


@dataclass(frozen=True, slots=True)
class ActionClaimed:
    """No other worker has started this action: run it.

    Attributes:
        attempt: counts from 1.
        moves: how often the workspace was moved away from a lost node.
        secrets: the stored secrets of the conversation, see `Secrets.find_named`; None if unknown.
    """

    attempt: int
    moves: int = 0
    secrets: ClaimedSecrets | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ActionReclaimed:
    """A worker that has died had claimed it: ask the workspace's journal before running anything.

    Attributes:
        attempt: counts the first worker that died with it; after that, only workers that died while it ran, see `mark`.
    """

    attempt: int
    previous_worker: str
    moves: int = 0
    secrets: ClaimedSecrets | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NothingToDo:
    """There is nothing to run. `why` says: settled, held by another worker, forwarded to its node, forged, or gone."""

    reason: str


def _seal(delivery: ActionDelivery) -> str:
    """Return the seal of a delivered action, as `results.grant` in results.lua makes it at the dispatch.

    A compromised tool worker can add entries to every action stream; the seal proves that an owner dispatched an
    action. It is SHA-1, because functions can compute no other hash. A forgery would need another action with the seal
    of a dispatched one.
    """
    stream = delivery.location.rpartition("|")[0].replace(":act:interactive:", ":act:", 1)
    route = stream.partition(":act:")[2] if delivery.is_anywhere else "bound"
    workspace = hashlib.sha1(delivery.sealed_workspace, usedforsecurity=False).hexdigest()
    text = b"%d %b %b %b" % (delivery.action_id, route.encode(), workspace.encode(), delivery.entry)
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


ClaimOutcome = ActionClaimed | ActionReclaimed | NothingToDo


def list_routes(node: str, pools: Sequence[str]) -> list[str]:
    """Return the routes that a worker on `node` serves: its node first, then its pools."""
    return [f"node:{node}", *(f"pool:{pool}" for pool in pools)]


class ActionQueue:
    """The action streams of one shard, as one worker reads them.

    Args:
        is_first: True for the streams of interactive conversations, False for all others, None for both.
    """

    def __init__(
        self,
        store: Store,
        names: ShardKeys,
        *,
        worker_id: str,
        node: str,
        pools: Sequence[str],
        is_first: bool | None = False,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._node = node
        self.is_first = bool(is_first)
        self.streams = [
            names.actions(route, is_interactive=lane)
            for lane in (True, False)
            if is_first in (None, lane)
            for route in list_routes(node, pools)
        ]
        self._names = names
        self._unreadable = Quarantine(store)
        self._reader = GroupReader(store, "tools", worker_id, self.streams)

    async def read(self, *, limit: int) -> list[ActionDelivery | ControlDelivery]:
        """Wait up to two seconds and return the deliveries to this worker, at most `limit` from each stream."""
        deliveries: list[ActionDelivery | ControlDelivery] = []
        for stream, entry_id, flat in await self._reader.read(limit=limit):
            try:
                deliveries.append(await self._parse_delivery(f"{stream.decode()}|{entry_id.decode()}", flat))
            except PARSE_ERRORS as error:
                key = stream.decode()
                await self._unreadable.quarantine(self._names, key, entry_id.decode(), flat, error, group="tools")
        return deliveries

    async def _parse_delivery(self, place: str, flat: list[bytes]) -> ActionDelivery | ControlDelivery:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        cid = (await find_conversation_keys(self._store, self._names, fields[b"c"])).conversation_id
        action_id = int(fields[b"a"])
        if not 0 <= action_id <= LARGEST_ID:
            raise ValueError(f"there is no event {action_id}")
        if b"x" in fields:
            order, token = fields[b"x"].decode(), fields.get(b"t", b"").decode()
            if order not in ORDERS:
                raise ValueError(f"there is no order {order!r}")
            return ControlDelivery(cid, action_id, order, place, token, fields.get(b"e", b""))
        text = fields.get(b"w", b"")
        workspace = WorkspaceSpec.model_validate_json(text or b"{}")
        capability = fields.get(b"k", b"").decode()
        with suppress(StoreTooNew):  # the executor answers it; an encrypted one is checked when it is decrypted
            codec.decode_wire(fields[b"e"])
        return ActionDelivery(cid, action_id, fields[b"e"], workspace, place, b"p" in fields, text, capability)

    async def claim(self, delivery: ActionDelivery) -> ClaimOutcome:
        """Claim an action before its side effect. Binds the conversation's workspace to this node.

        Idempotent: a repeated claim by the same worker is `ActionReclaimed` from itself.

        Raises:
            EventsLost: the log does not hold this action. Its entry is acknowledged.
        """
        names = await self._store.locate(delivery.conversation_id)
        stream, _, entry = delivery.location.rpartition("|")
        checksum = codec.checksum_of(delivery.entry)
        reply = await self._store.call_function(
            "deck_claim_action",
            (names.root, names.shard.root),
            delivery.conversation_id,
            delivery.action_id,
            self._worker_id,
            self._node,
            stream,
            entry,
            int(delivery.is_anywhere),
            checksum,
            1,
            _seal(delivery),
        )
        read_at, connects = self._store.clock.monotonic(), self._store.connection.connects
        match reply:
            case ["claimed", attempt, moves, secrets]:
                return ActionClaimed(attempt, moves, ClaimedSecrets(secrets, read_at, connects))
            case ["reclaimed", attempt, previous, moves, secrets]:
                return ActionReclaimed(attempt, previous.decode(), moves, ClaimedSecrets(secrets, read_at, connects))
            case ["lost", last]:
                raise EventsLost(delivery.conversation_id, last, delivery.action_id, checksum)
        return NothingToDo(reply[0])

    async def mark(self, delivery: ActionDelivery, mark: Mark) -> bool:
        """Record whether a claimed action runs; only then does a crash count. Returns False if the claim was lost."""
        names = await self._store.locate(delivery.conversation_id)
        reply = await self._store.call_function(
            "deck_mark_action", (names.root, names.shard.root), delivery.action_id, self._worker_id, int(mark)
        )
        return bool(reply[0] == "marked")

    async def acknowledge(self, delivery: ActionDelivery | ControlDelivery) -> None:
        """Acknowledge an entry without an observation."""
        stream, _, entry = delivery.location.rpartition("|")
        await self._store.call("XACK", stream, "tools", entry)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._reader.aclose()


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
            Whether all of them have ended. If False, they end when a tool worker carries out the order, or after they
            have been idle for their time to live.
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
        """Return the entry that currently carries the order; None if the order was carried out.

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
