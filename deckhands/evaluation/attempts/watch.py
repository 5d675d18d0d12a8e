"""Waits for all conversations of an evaluation over one connection, by reading each in turn.

Holds: a conversation has settled when its log says so; the index only shows its progress and when to read the log. A
paused conversation has not settled.
Does not: poll at a fixed rate: the more conversations there are, the longer the pause between two readings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract.agent_state import TERMINAL_STATES, WAITING_FOR_PERSON_STATES, AgentState
from broker.contract.codec import decode_any
from broker.contract.events import Event
from broker.runtime.errors import CorruptEntry, DeckhandsError, UnknownConversation
from deckhands.client.client import Client
from deckhands.client.many import for_each
from deckhands.client.reading.summary import Summary, Tally, summarize

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0
LOOKED_AT_PER_SECOND = 1_000
AT_ONCE = 500
READ_AT_ONCE = 8
RESTING = frozenset(state.value for state in TERMINAL_STATES | WAITING_FOR_PERSON_STATES) - {AgentState.PAUSED.value}
FIELDS = ("last_id", "state", "wait_reason", "owner", "iterations", "cost_usd", "prompt_tokens", "completion_tokens")


class Lost(DeckhandsError):
    """A conversation was deleted, or its log is damaged."""

    code = "conversation_lost"


@dataclass(slots=True)
class Seen:
    """The progress of a conversation at the last reading.

    Attributes:
        state: see `AgentState`; empty: not read yet.
        worker: the one that holds it now; empty: none.
    """

    last_id: int = 0
    state: str = ""
    wait_reason: str = ""
    worker: str = ""
    iterations: int = 0
    cost_usd: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A conversation that has settled, with its whole log."""

    summary: Summary
    events: Sequence[Event]


@dataclass(slots=True)
class _Watched:
    seen: Seen
    done: asyncio.Future[Settled]
    read_id: int = 0


class Watch:
    """The conversations that are waited for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watched: dict[str, _Watched] = {}

    async def settled(self, conversation_id: str, seen: Seen) -> Settled:
        """Wait until a conversation has settled, while `run` is running.

        Args:
            seen: is kept up to date.

        Raises:
            Lost: it cannot be read any more.
        """
        watched = _Watched(seen, asyncio.get_running_loop().create_future())
        self._watched[conversation_id] = watched
        try:
            return await watched.done
        finally:
            self._watched.pop(conversation_id, None)

    async def run(self) -> None:
        """Read them in turn, until cancelled.

        Raises:
            StoreError: the store cannot be used.
        """
        while True:
            ids = list(self._watched)
            for at in range(0, len(ids), AT_ONCE):
                resting = await self._look(ids[at : at + AT_ONCE])
                await for_each(resting, self._read, at_once=READ_AT_ONCE)
            pause = len(ids) / LOOKED_AT_PER_SECOND
            await asyncio.sleep(min(max(pause, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS))

    async def _look(self, ids: Sequence[str]) -> list[str]:
        """Note their progress, and return those that may have settled since they were last read."""
        store, found = self._client.store, []
        commands = [("HMGET", store.keys(cid).meta, *FIELDS) for cid in ids]
        replies = await store.call_many(commands)
        for cid, reply in zip(ids, replies, strict=True):
            watched = self._watched.get(cid)
            if watched is None:
                continue
            if reply[0] is None:
                await self._find_archived(cid, watched)
                continue
            _note(watched.seen, reply)
            if watched.seen.state in RESTING and watched.seen.last_id != watched.read_id:
                found.append(cid)
        return found

    async def _find_archived(self, conversation_id: str, watched: _Watched) -> None:
        try:
            events = await self._client.events(conversation_id, is_lenient=True)
        except (CorruptEntry, UnknownConversation) as error:
            _fail(watched, Lost(error.message))
            return
        if not watched.done.done():
            watched.done.set_result(Settled(summarize(events), events))

    async def _read(self, conversation_id: str) -> None:
        watched = self._watched.get(conversation_id)
        if watched is None:
            return
        try:
            events = await self._client.log.read(conversation_id, decode=decode_any)
        except (CorruptEntry, UnknownConversation) as error:
            _fail(watched, Lost(error.message))
            return
        tally = Tally.of(events)
        watched.read_id = tally.last_event_id
        if tally.status.is_settled and tally.status.state is not AgentState.PAUSED and not watched.done.done():
            watched.done.set_result(Settled(tally.summary(), events))


def _note(seen: Seen, reply: Sequence[bytes | None]) -> None:
    last_id, state, wait_reason, owner, *numbers = [(part or b"").decode(errors="replace") for part in reply]
    seen.last_id, seen.state, seen.wait_reason, seen.worker = int(_number(last_id)), state, wait_reason, owner
    seen.iterations, seen.cost_usd = int(_number(numbers[0])), _number(numbers[1])
    seen.tokens = int(_number(numbers[2]) + _number(numbers[3]))


def _number(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _fail(watched: _Watched, error: Lost) -> None:
    if not watched.done.done():
        watched.done.set_exception(error)
