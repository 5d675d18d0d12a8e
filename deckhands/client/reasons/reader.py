"""Facts about a conversation, read from the store around the pure core.

Holds: reads only; delegates are followed for `MAX_DEPTH` levels and `MAX_CONVERSATIONS` in all.
Keys: reads those of the conversation, of queues (see `queues`) and of workers, and `parked`, `dead` and `nodes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from broker.contract import Event
from broker.coordination import FIELD, Member, find_placement, members, read_figures, serves_pool
from broker.log import ConversationRow, Conversations, WaitReason, delegate_conversation
from broker.runtime import UnknownConversation, from_millis
from broker.store import LARGEST, Store, ask, number, pairs, text
from deckhands.client.reasons.chain import why_of
from deckhands.client.reasons.facts import ActionFact, Facts, NodeFact, PlaceInLine, WorkerFact
from deckhands.client.reasons.history import History, history_of
from deckhands.client.reasons.link import Why
from deckhands.client.reasons.queues import budget_of, place_in, quota_of, shifted
from deckhands.client.reasons.worker_logs import lines_about

MAX_DEPTH = 8
MAX_CONVERSATIONS = 50
MAX_ACTIONS = 10
NODE_PATIENCE_SECONDS = 120.0
"""How long after its last heartbeat a node is given up; as in nodes.lua."""

ReadEvents = Callable[[str], Awaitable[Sequence[Event]]]


@dataclass(frozen=True)
class Reasons:
    """Explains the conversations of a store.

    Attributes:
        read: returns the events of a conversation.
        shows_workers: the reader may know the names of workers and nodes.
        worker_logs: the folder with the logs of workers on this machine; None: none.
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
        history = history_of(await self.read(conversation_id))
        try:
            row = await Conversations(self.store).row(conversation_id)
        except UnknownConversation:
            now = self.store.clock.now()
            return why_of(Facts(conversation_id=conversation_id, now=now, row=None, history=history))
        facts = await _Moment(self, row, history, await members(self.store)).facts()
        if history.delegates and not history.status.is_settled:
            facts = replace(facts, delegates=await self._delegates(conversation_id, history, depth))
        return why_of(facts)

    async def _delegates(self, parent_id: str, history: History, depth: int) -> dict[int, Why | None]:
        found: dict[int, Why | None] = {}
        for action_id in list(history.delegates)[:MAX_ACTIONS]:
            name = delegate_conversation(parent_id, action_id)
            is_too_far = depth >= MAX_DEPTH or len(self._seen) >= MAX_CONVERSATIONS or name in self._seen
            found[action_id] = None
            if not is_too_far:
                try:
                    found[action_id] = await self._why(name, depth + 1)
                except UnknownConversation:  # its parent has not started it yet
                    continue
        return found


class _Moment:
    """One reading of the store."""

    def __init__(self, asked: Reasons, row: ConversationRow, history: History, alive: list[Member]) -> None:
        self._asked, self._store, self._row, self._history = asked, asked.store, row, history
        self._keys = asked.store.keys(row.conversation_id)
        self._names = self._keys.shard
        self._members = {member.worker_id: member for member in alive}
        self._now = asked.store.clock.now()
        self._shard_ms = 0.0

    async def facts(self) -> Facts:
        """Read the facts."""
        names, name = self._names, self._row.conversation_id
        commands = [
            *(("TIME",), ("FCALL", "deck_now", 1, names.root), ("HGETALL", self._keys.meta)),
            *(("ZSCORE", names.parked, name), ("ZSCORE", names.dead, name)),
        ]
        time, shard, flat, parked, dead = await ask(self._store.connection, commands)
        if isinstance(time, list):
            self._now = from_millis(int(number(time[0]) * 1000 + number(time[1]) / 1000))
        self._shard_ms = number(shard[1]) if isinstance(shard, list) else self._now.timestamp() * 1000
        meta = {key: text(value) for key, value in pairs(flat).items()}
        facts = Facts(
            conversation_id=name,
            now=self._now,
            row=self._row,
            history=self._history,
            owner=self._worker(self._row.owner) if self._row.owner else None,
            place=await self._ready_place(meta.get("ready_id", "")),
            parked_until=self._wall(parked),
            expires=self._wall(meta.get("expires_ms", "").encode() or None),
            died=(self._wall(dead) or self._now) if dead is not None else None,
            controllers=sum(one.role == "controller" and one.left_seconds > 0 for one in self._members.values()),
            shows_workers=self._asked.shows_workers,
        )
        if facts.died is not None:
            facts = await self._with_deaths(facts)
        if self._history.pending:
            facts = await self._with_actions(facts)
        return await self._with_money(facts)

    async def _with_deaths(self, facts: Facts) -> Facts:
        found = await Conversations(self._store).takeovers()
        deaths = tuple(one for one in found if one.conversation_id == facts.conversation_id)
        lines: tuple[str, ...] = ()
        if self._asked.worker_logs is not None:
            wanted = [facts.conversation_id, *(death.from_worker for death in deaths[-3:])]
            lines = await asyncio.to_thread(lines_about, self._asked.worker_logs, wanted)
        return replace(facts, deaths=deaths, worker_lines=lines)

    async def _with_actions(self, facts: Facts) -> Facts:
        actions = {one: await self._action(one) for one in list(self._history.pending)[:MAX_ACTIONS]}
        workspace = self._history.created.workspace if self._history.created else None
        pool, unserved = workspace.pool if workspace is not None else "", ""
        if workspace is not None and not any(serves_pool(one, pool) for one in self._members.values()):
            unserved = f"No tool worker of the pool {pool} is running."
        elif workspace is not None and not self._row.node:
            where = await find_placement(self._store, workspace)
            unserved = "" if where.nodes else where.refusal().message
        node = await self._node(self._row.node, is_fixed=workspace is not None and workspace.path is not None)
        return replace(facts, actions=actions, pool=pool, unserved=unserved, node=node)

    async def _with_money(self, facts: Facts) -> Facts:
        deferral = self._history.deferral
        if deferral is None or not deferral.waits_for:
            return facts
        if deferral.code == WaitReason.RATE_LIMIT:
            return replace(facts, quota=await quota_of(self._store, deferral.waits_for, facts.conversation_id))
        if deferral.code == WaitReason.BUDGET:
            return replace(facts, budget=await budget_of(self._store, deferral.waits_for, facts.conversation_id))
        return facts

    async def _ready_place(self, ready_id: str) -> PlaceInLine | None:
        if not ready_id or self._row.owner:
            return None
        stream, mark, entry = ready_id.rpartition("|")
        stream = stream if mark else self._names.ready
        name = self._row.conversation_id
        place, _ = await place_in(self._store, self._names, stream, entry, group="controllers", member=name)
        return place

    async def _action(self, action_id: int) -> ActionFact:
        command = ("HMGET", self._keys.once, f"q:{action_id}", f"w:{action_id}")
        found = (await ask(self._store.connection, [command]))[0]
        queued, worker = map(text, found) if isinstance(found, list) else ("", "")
        stream, mark, entry = queued.rpartition("|")
        place, seconds = None, None
        if mark:
            member = f"{self._row.conversation_id} {action_id}"
            place, seconds = await place_in(self._store, self._names, stream, entry, group="tools", member=member)
        began = shifted(self._now, -seconds) if seconds is not None else None
        return ActionFact(action_id, self._worker(worker) if worker else None, began, place)

    async def _node(self, node: str, *, is_fixed: bool) -> NodeFact | None:
        if not node:
            return None
        is_alive = any(one.about.get("node") == node and one.left_seconds > 0 for one in self._members.values())
        deadline = (await ask(self._store.connection, [("ZSCORE", self._names.nodes, node)]))[0]
        given_up = self._wall(deadline)
        seen = shifted(given_up, -NODE_PATIENCE_SECONDS) if given_up is not None else None
        return NodeFact(node, is_alive, seen, given_up, is_fixed)

    def _worker(self, worker_id: str) -> WorkerFact:
        member = self._members.get(worker_id)
        if member is None:  # it was swept
            return WorkerFact(worker_id, 0.0)
        figures = read_figures(member.about.get(FIELD, ""))
        held, lag = figures.get("held_conversations", {}).get(""), figures.get("loop_lag_seconds", {}).get("")
        return WorkerFact(worker_id, member.left_seconds, None if held is None else int(held), lag)

    def _wall(self, millis: object) -> datetime | None:
        """Convert a time of the shard to the server's clock."""
        if not isinstance(millis, bytes | float | int):
            return None
        found = number(millis)
        return shifted(self._now, (found - self._shard_ms) / 1000) if 0 < found < LARGEST else None
