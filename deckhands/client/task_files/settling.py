"""Waiting for many conversations at once: looked at in turn, so that many need no more connections than one.

Holds: a conversation is reported once, when its log says that it has settled; the index only says when to look there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from broker.contract.agent_state import TERMINAL_STATES, WAITING_FOR_PERSON_STATES
from broker.contract.codec import decode_any
from broker.runtime.errors import CorruptEntry, UnknownConversation
from deckhands.client.client import Client
from deckhands.client.many import for_each
from deckhands.client.reading.summary import Summary, Tally

POLL_SECONDS = 0.25
AT_ONCE = 500
READ_AT_ONCE = 8
RESTING = frozenset(state.value.encode() for state in TERMINAL_STATES | WAITING_FOR_PERSON_STATES)

OnSettled = Callable[[str, Summary], Awaitable[None]]
OnLost = Callable[[str, str], None]
"""Gets a conversation that cannot be read, and why."""


class Settling:
    """Conversations that somebody waits for.

    Args:
        on_settled: gets each conversation and its summary.
        on_lost: gets each that was deleted, or whose log is damaged; it is not waited for any more.
    """

    def __init__(self, client: Client, on_settled: OnSettled, on_lost: OnLost) -> None:
        self._client = client
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._seen: dict[str, int] = {}
        self._is_complete = False

    def add(self, conversation_id: str) -> None:
        """Wait for another one."""
        self._seen.setdefault(conversation_id, 0)

    def complete(self) -> None:
        """Say that no more will be added."""
        self._is_complete = True

    @property
    def waiting(self) -> int:
        """How many have not settled."""
        return len(self._seen)

    async def run(self) -> None:
        """Return when all have settled and no more will be added; raises what `on_settled` does, and StoreError."""
        while self._seen or not self._is_complete:
            ids = list(self._seen)
            for at in range(0, len(ids), AT_ONCE):
                resting = await self._resting(ids[at : at + AT_ONCE])
                await for_each(resting, self._look, at_once=READ_AT_ONCE)
            if self._seen or not self._is_complete:
                await asyncio.sleep(POLL_SECONDS)

    async def _resting(self, ids: Sequence[str]) -> list[str]:
        """Return those that may have settled since they were read."""
        store = self._client.store
        commands = [("HMGET", store.keys(cid).meta, "last_id", "state") for cid in ids]
        found = []
        for cid, (last_id, state) in zip(ids, await store.call_many(commands), strict=True):
            if last_id is None:
                self._lose(cid, "there is no such conversation")
            elif state in RESTING and int(last_id) != self._seen[cid]:
                found.append(cid)
        return found

    async def _look(self, conversation_id: str) -> None:
        try:
            tally = Tally.of(await self._client.log.read(conversation_id, decode=decode_any))
        except (CorruptEntry, UnknownConversation) as error:
            self._lose(conversation_id, error.message)
            return
        self._seen[conversation_id] = tally.last_event_id
        if tally.status.is_settled:
            await self._on_settled(conversation_id, tally.summary())
            del self._seen[conversation_id]

    def _lose(self, conversation_id: str, why: str) -> None:
        del self._seen[conversation_id]
        self._on_lost(conversation_id, why)
