"""Reads facts about a conversation from the store and from workers' logs, for the pure explanations of `chain`.

Holds: reads only; delegates are followed for `MAX_DEPTH` levels and `MAX_CONVERSATIONS` in all. Invalid entries of a
queue count as absent. A place in a queue is a snapshot, not a promise of a turn; finding it reads at most `MOST_BEFORE`
entries.
Keys: reads those of the conversation and of workers, `parked`, `dead` and `nodes`; of queues `deck:{k}:ready…`,
`deck:{k}:act:…`, `deck:{k}:turns:…`, `deck:{k}:quota:…` and `deck:{k}:budget:…`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from broker.contract import Event
from broker.coordination import FIELD, ClusterMember, find_placement, list_members, read_figures, serves_pool
from broker.limits import Ledger, QuotaPool
from broker.log import ConversationRow, Conversations, WaitReason
from broker.runtime import DeckhandsError, StoreMisconfigured, UnknownConversation, from_millis, make_delegate_id
from broker.store import (
    LARGEST,
    ConversationKeys,
    ShardKeys,
    Store,
    decode_text,
    parse_number,
    read_tolerantly,
    to_pairs,
)
from deckhands.client.reasons.chain import explain
from deckhands.client.reasons.facts import (
    ActionFact,
    BudgetFact,
    ConversationFacts,
    NodeFact,
    QueuePosition,
    QuotaFact,
    WorkerFact,
)
from deckhands.client.reasons.history import History, fold_history
from deckhands.client.reasons.link import Why

MAX_DEPTH = 8
MAX_CONVERSATIONS = 50
MAX_ACTIONS = 10
NODE_PATIENCE_SECONDS = 120.0
"""How long after its last heartbeat a node is given up; as in nodes.lua."""
MOST_BEFORE = 1_000
CLASSES = ("0", "1", "2")
IN_LINE = ("turn", "turn p")
REFUSED = "-"
"""Instead of an action's worker, whose result was refused; as in results.lua."""
ENTRY = re.compile(r"\d{1,20}-\d{1,20}")
READ_BYTES = 256 * 1024
"""The number of bytes read from the end of each file."""
MAX_FILES = 200
MAX_LINES = 12
LINE_CHARS = 400

ReadEvents = Callable[[str], Awaitable[Sequence[Event]]]


@dataclass(frozen=True)
class Reasons:
    """Explains the conversations of a store.

    Attributes:
        read: returns the events of a conversation.
        shows_workers: the reader may know the names of workers and nodes.
        worker_logs: the folder with the logs of workers on this machine; None if there is none.
    """

    store: Store
    read: ReadEvents
    shows_workers: bool = True
    worker_logs: Path | None = None
    _seen: set[str] = field(default_factory=set)

    async def why(self, conversation_id: str) -> Why:
        """Return the chain of reasons for a conversation's current state.

        Raises:
            UnknownConversation: no such conversation.
            StoreError: the store does not answer.
        """
        return await replace(self, _seen=set())._why(conversation_id, 0)  # noqa: SLF001  (of this class)

    async def _why(self, conversation_id: str, depth: int) -> Why:
        self._seen.add(conversation_id)
        history = fold_history(await self.read(conversation_id))
        try:
            row = await Conversations(self.store).load_row(conversation_id)
        except UnknownConversation:
            now = self.store.clock.now()
            return explain(ConversationFacts(conversation_id=conversation_id, now=now, row=None, history=history))
        keys = await self.store.locate(conversation_id)
        facts = await _FactReader(self, row, keys, history, await list_members(self.store)).facts()
        if history.delegates and not history.status.is_settled:
            facts = replace(facts, delegates=await self._delegates(conversation_id, history, depth))
        return explain(facts)

    async def _delegates(self, parent_id: str, history: History, depth: int) -> dict[int, Why | None]:
        found: dict[int, Why | None] = {}
        for action_id in list(history.delegates)[:MAX_ACTIONS]:
            name = make_delegate_id(parent_id, action_id)
            is_too_far = depth >= MAX_DEPTH or len(self._seen) >= MAX_CONVERSATIONS or name in self._seen
            found[action_id] = None
            if not is_too_far:
                try:
                    found[action_id] = await self._why(name, depth + 1)
                except UnknownConversation:  # its parent has not started it yet
                    continue
        return found


class _FactReader:
    """One reading of the store."""

    def __init__(
        self, asked: Reasons, row: ConversationRow, keys: ConversationKeys, history: History, alive: list[ClusterMember]
    ) -> None:
        self._asked = asked
        self._store = asked.store
        self._row = row
        self._history = history
        self._keys = keys
        self._names = keys.shard
        self._members = {member.worker_id: member for member in alive}
        self._now = asked.store.clock.now()
        self._shard_ms = 0.0

    async def facts(self) -> ConversationFacts:
        """Read the facts."""
        names, name = self._names, self._row.conversation_id
        commands = [
            *(("TIME",), ("FCALL", "deck_now", 1, names.root), ("HGETALL", self._keys.meta)),
            *(("ZSCORE", names.parked, name), ("ZSCORE", names.dead, name)),
        ]
        time, shard, flat, parked, dead = await read_tolerantly(self._store.connection, commands)
        if isinstance(time, list):
            self._now = from_millis(int(parse_number(time[0]) * 1000 + parse_number(time[1]) / 1000))
        self._shard_ms = parse_number(shard[1]) if isinstance(shard, list) else self._now.timestamp() * 1000
        meta = {key: decode_text(value) for key, value in to_pairs(flat).items()}
        facts = ConversationFacts(
            conversation_id=name,
            now=self._now,
            row=self._row,
            history=self._history,
            owner=self._worker(self._row.owner) if self._row.owner else None,
            place=await self._ready_place(meta.get("ready_id", "")),
            parked_until=self._to_server_time(parked),
            expires=self._to_server_time(meta.get("expires_ms", "").encode() or None),
            died=(self._to_server_time(dead) or self._now) if dead is not None else None,
            controllers=sum(one.role == "controller" and one.left_seconds > 0 for one in self._members.values()),
            shows_workers=self._asked.shows_workers,
        )
        if facts.died is not None:
            facts = await self._with_deaths(facts)
        if self._history.pending:
            facts = await self._with_actions(facts)
        return await self._with_money(facts)

    async def _with_deaths(self, facts: ConversationFacts) -> ConversationFacts:
        found = await Conversations(self._store).list_takeovers()
        deaths = tuple(one for one in found if one.conversation_id == facts.conversation_id)
        lines: tuple[str, ...] = ()
        if self._asked.worker_logs is not None:
            wanted = [facts.conversation_id, *(death.from_worker for death in deaths[-3:])]
            lines = await asyncio.to_thread(find_log_lines, self._asked.worker_logs, wanted)
        return replace(facts, deaths=deaths, worker_lines=lines)

    async def _with_actions(self, facts: ConversationFacts) -> ConversationFacts:
        actions = {one: await self._action(one) for one in list(self._history.pending)[:MAX_ACTIONS]}
        workspace = self._history.created.workspace if self._history.created else None
        pool, unserved = workspace.pool if workspace is not None else "", ""
        if workspace is not None and not any(serves_pool(one, pool) for one in self._members.values()):
            unserved = f"No tool worker of the pool {pool} is running."
        elif workspace is not None and not self._row.node:
            where = await find_placement(self._store, workspace)
            unserved = "" if where.nodes else where.make_refusal().message
        node = await self._node(self._row.node, is_fixed=workspace is not None and workspace.path is not None)
        return replace(facts, actions=actions, pool=pool, unserved=unserved, node=node)

    async def _with_money(self, facts: ConversationFacts) -> ConversationFacts:
        deferral = self._history.deferral
        if deferral is None or not deferral.waits_for:
            return facts
        if deferral.code == WaitReason.RATE_LIMIT:
            return replace(facts, quota=await read_quota(self._store, deferral.waits_for, facts.conversation_id))
        if deferral.code == WaitReason.BUDGET:
            return replace(facts, budget=await read_budget(self._store, deferral.waits_for, facts.conversation_id))
        return facts

    async def _ready_place(self, ready_id: str) -> QueuePosition | None:
        if not ready_id or self._row.owner:
            return None
        stream, mark, entry = ready_id.rpartition("|")
        stream = stream if mark else self._names.ready
        name = self._row.conversation_id
        place, _ = await find_position(self._store, self._names, stream, entry, group="controllers", member=name)
        return place

    async def _action(self, action_id: int) -> ActionFact:
        command = ("HMGET", self._keys.once, f"q:{action_id}", f"w:{action_id}")
        found = (await read_tolerantly(self._store.connection, [command]))[0]
        queued, worker = map(decode_text, found) if isinstance(found, list) else ("", "")
        stream, mark, entry = queued.rpartition("|")
        place, seconds = None, None
        if mark:
            member = f"{self._row.conversation_id} {action_id}"
            place, seconds = await find_position(self._store, self._names, stream, entry, group="tools", member=member)
        began = add_seconds(self._now, -seconds) if seconds is not None else None
        return ActionFact(action_id, self._worker(worker) if worker not in ("", REFUSED) else None, began, place)

    async def _node(self, node: str, *, is_fixed: bool) -> NodeFact | None:
        if not node:
            return None
        is_alive = any(one.about.get("node") == node and one.left_seconds > 0 for one in self._members.values())
        deadline = (await read_tolerantly(self._store.connection, [("ZSCORE", self._names.nodes, node)]))[0]
        given_up = self._to_server_time(deadline)
        seen = add_seconds(given_up, -NODE_PATIENCE_SECONDS) if given_up is not None else None
        return NodeFact(node, is_alive, seen, given_up, is_fixed)

    def _worker(self, worker_id: str) -> WorkerFact:
        member = self._members.get(worker_id)
        if member is None:  # it was swept
            return WorkerFact(worker_id, 0.0)
        figures = read_figures(member.about.get(FIELD, ""))
        held = figures.get("held_conversations", {}).get("")
        lag = figures.get("loop_lag_seconds", {}).get("")
        return WorkerFact(worker_id, member.left_seconds, None if held is None else int(held), lag)

    def _to_server_time(self, millis: object) -> datetime | None:
        """Convert a time of the shard to the server's clock."""
        if not isinstance(millis, bytes | float | int):
            return None
        found = parse_number(millis)
        return add_seconds(self._now, (found - self._shard_ms) / 1000) if 0 < found < LARGEST else None


async def find_position(
    store: Store, names: ShardKeys, stream: str, entry: str, *, group: str, member: str
) -> tuple[QueuePosition | None, float | None]:
    """Return the entry's place in a stream or in the queue before it, and the seconds since a worker received it.

    Args:
        stream: its key.
        entry: its entry, or a substitute while it is in the queue.
        member: its name in the line.
    """
    if not stream.startswith(names.root):
        return None, None
    name = stream.removeprefix(f"{names.root}:").removeprefix("act:")
    groups, length = await read_tolerantly(store.connection, [("XINFO", "GROUPS", stream), ("XLEN", stream)])
    found = [to_pairs(each) for each in groups] if isinstance(groups, list) else []
    about = next((each for each in found if decode_text(each.get("name")) == group), {})
    if entry in IN_LINE:
        in_stream = min(parse_number(about.get("lag")), parse_number(length))
        return QueuePosition(name, await _count_before(store, names, stream, member, in_stream)), None
    if not ENTRY.fullmatch(entry):
        return None, None
    delivered = decode_text(about.get("last-delivered-id")) or "0-0"
    pending = (await read_tolerantly(store.connection, [("XPENDING", stream, group, entry, entry, 1)]))[0]
    if isinstance(pending, list) and pending:
        return QueuePosition(name, 0, decode_text(pending[0][1])), parse_number(pending[0][2]) / 1000
    command = ("XRANGE", stream, f"({delivered}", f"({entry}", "COUNT", MOST_BEFORE)
    before = (await read_tolerantly(store.connection, [command]))[0]
    return QueuePosition(name, len(before) if isinstance(before, list) else None), None


async def _count_before(store: Store, names: ShardKeys, stream: str, member: str, in_stream: float) -> int | None:
    line = f"{names.root}:turns{stream.removeprefix(names.root)}"
    ranks = [("ZRANK", f"{line}:{rank}", member) for rank in CLASSES]
    sizes = [("ZCARD", f"{line}:{rank}") for rank in CLASSES]
    replies = await read_tolerantly(store.connection, [*ranks, *sizes])
    before = int(in_stream)
    for rank, size in zip(replies[:3], replies[3:], strict=True):
        if isinstance(rank, int):
            return before + rank
        before += int(parse_number(size))
    return None


async def read_quota(store: Store, models: str, conversation_id: str) -> QuotaFact | None:
    """Return the queue of the quota for these models; None if this process may not read it."""
    pool = QuotaPool(model=models, quotas=()).name
    base = store.find_home(pool).quota(pool)
    sizes = [("ZCARD", f"{base}:waiting:{rank}") for rank in CLASSES]
    ranks = [("ZRANK", f"{base}:waiting:{rank}", conversation_id) for rank in CLASSES]
    try:
        replies = await read_tolerantly(store.connection, [*sizes, *ranks])
    except StoreMisconfigured:  # the user of a server that was set up before servers read quotas
        return None
    waiting = [int(parse_number(size)) for size in replies[:3]]
    for at, rank in enumerate(replies[3:]):
        if isinstance(rank, int):
            return QuotaFact(models, sum(waiting), sum(waiting[:at]) + rank)
    return QuotaFact(models, sum(waiting), None)


async def read_budget(store: Store, account: str, conversation_id: str) -> BudgetFact | None:
    """Return an account, and the number of conversations ahead in its queue; None if it cannot be read."""
    try:
        ledger = Ledger(store)
        found = await ledger.load_account(account)
        key = f"{(await ledger.find_shard(account)).budget(account)}:waiting"
    except (DeckhandsError, ValueError):
        return None
    rank = (await read_tolerantly(store.connection, [("ZRANK", key, conversation_id)]))[0]
    return BudgetFact(found, rank if isinstance(rank, int) else None)


def add_seconds(now: datetime, seconds: float) -> datetime:
    """Return the moment this many seconds from now, within the range of dates."""
    return now + timedelta(seconds=max(-1e9, min(seconds, 1e9)))


def find_log_lines(folder: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the latest lines that contain one of these ids, oldest first within a file. Blocks. Raises nothing.

    Args:
        folder: a folder with files `*.log`; a file that cannot be read is left out.
    """
    found: list[str] = []
    try:
        files = sorted(folder.glob("*.log"))[:MAX_FILES]
    except OSError:
        return ()
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - READ_BYTES))
                text = file.read(READ_BYTES).decode(errors="replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if any(name in line for name in wanted)]
        found += [f"{path.stem}: {line}"[:LINE_CHARS] for line in lines[-MAX_LINES:]]
    return tuple(found[-MAX_LINES:])
