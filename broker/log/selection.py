"""Selects conversations by tenant, label and state, in pages: any number, with bounded work per page.

`WaitReason` lists the reasons why a conversation waits; its controller writes them to the index.

Holds: newest first, by creation time and id. If conversations are created or deleted meanwhile, no page skips or
repeats another conversation. Labels and tenants have their own indexes, so conversations without them are not read.
Controllers write no other reason. Listings, metrics and explanations of waits use these values.
Keys: reads `deck:{k}:index`, `deck:{k}:label:<name>=<value>` and `deck:{k}:label:=<tenant>`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from broker.contract import AgentState
from broker.log.conversations import ConversationRow, Conversations, SelectionFields
from broker.store import ShardKeys, Store


class WaitReason(StrEnum):
    """Why a conversation waits. The values are stable."""

    SCHEDULED = "scheduled"
    """Its start time."""
    TOOL = "tool"
    """A tool worker that runs its action."""
    DELEGATE = "delegate"
    """Its delegates."""
    RATE_LIMIT = "rate_limit"
    """Its turn at a quota, or the next attempt after a provider refused a call for its own quota."""
    BUDGET = "waiting_for_budget"
    """Funds in a budget account."""
    BATCH = "batch"
    """A batch of calls at a provider."""
    NEWER_WORKER = "newer_worker"
    """A worker of the version that wrote the latest events of its log."""
    LOCKED = "locked"
    """A worker with the master key that decrypts its log."""
    PINNED_VERSION = "pinned_version"
    """A controller worker of the version that it is pinned to."""
    SERVICE_UNAVAILABLE = "service_unavailable"
    """The next attempt after the provider was unavailable. The values below are the same for other errors."""
    INTERNAL = "internal"
    TIMEOUT = "timeout"
    MALFORMED_REPLY = "malformed_reply"
    NO_RESPONSE = "no_response"


PAGE_SIZE = 500
MAX_SCANNED = 1_000
"""A page ends after this many conversations were read, even if it is not full."""
WAITING = "waiting"
"""A value for states: all conversations that wait."""
SCHEDULED = WaitReason.SCHEDULED.value
"""A value for states: conversations that wait for their start time."""
WAITING_STATES = frozenset({AgentState.AWAITING_USER_INPUT.value, AgentState.AWAITING_USER_CONFIRMATION.value})

IndexPosition = tuple[float, str]
"""A position in an index: creation time in ms, and id."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Criteria for conversations.

    Attributes:
        labels: all of them must match.
        states: one of them must match: an `AgentState`, `waiting` or `scheduled`; empty for any.
        tenant: their tenant; None for any.
        model: a part of the name of the model that answered last, case-insensitive; empty for any.
        min_cost_usd: lower bound of their cost.
        title: a part of their title, case-insensitive; empty for any.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[str] = frozenset()
    tenant: str | None = None
    model: str = ""
    min_cost_usd: float = 0.0
    title: str = ""

    def matches(
        self,
        state: str,
        labels: Mapping[str, str],
        *,
        wait_reason: str = "",
        tenant: str = "",
        model: str = "",
        cost_usd: float = 0.0,
        title: str = "",
    ) -> bool:
        """Return whether a conversation matches."""
        is_theirs = self.tenant is None or self.tenant == tenant
        is_like = self.model.lower() in model.lower() and cost_usd >= self.min_cost_usd
        is_like = is_like and self.title.lower() in title.lower()
        return (
            is_theirs
            and is_like
            and is_any_of(state, wait_reason, self.states)
            and self.labels.items() <= labels.items()
        )


EVERYTHING = Selection()


def is_any_of(state: str, wait_reason: str, states: frozenset[str]) -> bool:
    """Return whether a state is one of several; an empty collection matches any state."""
    is_waiting = bool(wait_reason) or state in WAITING_STATES
    is_scheduled = wait_reason == SCHEDULED and SCHEDULED in states
    return not states or state in states or is_scheduled or (is_waiting and WAITING in states)


class ConversationQuery:
    """The conversations of a store that match a selection."""

    def __init__(self, store: Store, selection: Selection) -> None:
        self._store = store
        self._selection = selection
        self._conversations = Conversations(store)

    async def iterate_pages(self) -> AsyncIterator[list[ConversationRow]]:
        """Yield the conversations, newest first, in pages of 1 to 500."""
        indexes = await asyncio.gather(*map(self._find_smallest_index, await self._store.load_shards()))
        before: IndexPosition | None = None
        while places := await self._find_positions(indexes, before):
            before = places[-1]
            rows = await self._conversations.load_rows([cid for _, cid in places])
            if chosen := [row for row in rows if self._is_match(row)]:
                yield chosen

    async def load_page(
        self, before: IndexPosition | None, *, limit: int
    ) -> tuple[list[ConversationRow], IndexPosition | None]:
        """Return up to `limit` conversations after a position, and the position after which the next page starts.

        A page ends early when it has read `SCANNED` conversations. The position is None after the last page.

        Args:
            before: the position at which an earlier page ended; None for the first page.
        """
        indexes = await asyncio.gather(*map(self._find_smallest_index, await self._store.load_shards()))
        chosen: list[str] = []
        scanned = 0
        at_once = min(limit + 1, PAGE_SIZE)
        while scanned < MAX_SCANNED:
            places = await self._find_positions(indexes, before, limit=at_once)
            if not places:
                return await self.load_matching_rows(chosen), None
            for place, is_meant in zip(places, await self._match(places), strict=True):
                if is_meant:
                    if len(chosen) == limit:
                        return await self.load_matching_rows(chosen), before
                    chosen.append(place[1])
                before = place
            scanned += len(places)
            at_once = PAGE_SIZE  # few match, so many must be read
        return await self.load_matching_rows(chosen), before

    async def _match(self, places: list[IndexPosition]) -> list[bool]:
        if self._selection == EVERYTHING:
            return [True] * len(places)
        found = await self._conversations.load_selection_fields([cid for _, cid in places])
        return [glimpse is not None and self._is_match(glimpse) for glimpse in found]

    async def load_matching_rows(self, chosen: list[str]) -> list[ConversationRow]:
        """Return the rows of the given conversations that exist and match."""
        return [row for row in await self._conversations.load_rows(chosen) if self._is_match(row)]

    async def count(self) -> int:
        """Return the number of matching conversations."""
        number = 0
        async for page in self.iterate_pages():
            number += len(page)
        return number

    def _is_match(self, row: ConversationRow | SelectionFields) -> bool:
        return self._selection.matches(
            row.state,
            row.labels,
            wait_reason=row.wait_reason,
            tenant=row.tenant,
            model=row.model,
            cost_usd=row.cost_usd,
            title=row.title,
        )

    async def _find_smallest_index(self, names: ShardKeys) -> str:
        """Return the smallest index that contains all matching conversations of a shard."""
        keys = [names.label_index(name, value) for name, value in self._selection.labels.items()]
        keys += [names.tenant_index(self._selection.tenant)] if self._selection.tenant else []
        if not keys:
            return names.index
        commands = [("ZCARD", key) for key in keys]
        sizes = await self._store.call_many(commands)
        return min(zip(sizes, keys, strict=True))[1]

    async def _find_positions(
        self, indexes: list[str], before: IndexPosition | None, *, limit: int = PAGE_SIZE
    ) -> list[IndexPosition]:
        """Return the positions of the next conversations of all shards."""
        each = await asyncio.gather(*(self._find_positions_in(index, before, limit) for index in indexes))
        return sorted((place for places in each for place in places), reverse=True)[:limit]

    async def _find_positions_in(self, index: str, before: IndexPosition | None, limit: int) -> list[IndexPosition]:
        high: str = "+inf" if before is None else f"{before[0]:.0f}"
        while True:
            command = ("ZREVRANGEBYSCORE", index, high, "-inf", "WITHSCORES", "LIMIT", 0, limit)
            flat = await self._store.call(*command)
            members = zip(flat[::2], flat[1::2], strict=True)
            places = [(float(score), cid.decode(errors="backslashreplace")) for cid, score in members]
            new = [place for place in places if before is None or place < before]
            if new or len(places) < limit:
                return new
            limit *= 2  # more conversations in one millisecond than fit into a page
