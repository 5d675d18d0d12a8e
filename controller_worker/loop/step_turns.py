"""The order of steps in one controller worker: interactive work first, tenants by weight.

An event loop that steps hundreds of conversations at once makes all of them slow. So only a few step at once. The
others wait in line, each for one step of those before it and not for all of their work.

While interactive work is claimed or steps, even fewer turns go to other work, because more work on the event loop makes
each wait for the store longer.

Holds: of eight turns with waiters, one is offered first to the last class and one to the middle class. Within a class,
the turns of tenants are 1/weight apart. A conversation that takes longer than `LONGEST_SECONDS`, because a hook or a
provider is slow, delays no other one.
Does not: order anything while fewer than `AT_ONCE` step; its cost is then negligible.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from broker.coordination import ClaimedConversation

AT_ONCE = 16
INTERACTIVE_EXTRA = 4
"""Additional turns for interactive conversations."""
BESIDE_INTERACTIVE = 4
"""Turns of other conversations while an interactive one steps."""
LONGEST_SECONDS = 0.1
USUAL_ORDER = (0, 1, 2)
ORDERS = {0: (2, 1, 0), 4: (1, 0, 2)}
"""The order of classes, by the number of the turn modulo 8; as in turns.lua."""


@dataclass(slots=True)
class StepTurn:
    """The place of one conversation in the line for steps.

    Attributes:
        rank: the rank of its priority; 0 goes first.
        share: its tenant's name in the line.
        weight: its tenant's share relative to others.
        is_new: it was just claimed, and takes its first steps until its first wait.
    """

    turns: StepTurns
    rank: int
    share: str
    weight: float
    is_new: bool = True

    async def take(self) -> None:
        """Wait until the conversation may step."""
        if not self.turns.try_take(self):
            await self.turns.wait(self)

    async def take_next(self) -> None:
        """Let others take a turn between two steps."""
        turns = self.turns
        # A new conversation yields to interactive work only; otherwise each of its first steps would wait in line.
        if turns.is_full_for(self) or (turns.has_waiters and not self.is_new):
            turns.give(self)
            await self.take()

    def give(self) -> None:
        """Give the turn back after a step."""
        self.is_new = False
        self.turns.give(self)


@dataclass(slots=True)
class _Line:
    """The waiting turns of one class, by place and number."""

    waiting: list[tuple[float, int, asyncio.Future[None], StepTurn]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    at: float = 0.0

    def join(self, number: int, future: asyncio.Future[None], turn: StepTurn) -> None:
        place = max(self.at, self.shares.get(turn.share, 0.0))
        self.shares[turn.share] = place + 1 / turn.weight
        # A new conversation has waited in line before its claim, and only a few are claimed at once.
        heapq.heappush(self.waiting, (self.at if turn.is_new else place, number, future, turn))

    def pop(self) -> tuple[asyncio.Future[None], StepTurn] | None:
        while self.waiting:
            self.at, _, future, turn = heapq.heappop(self.waiting)
            if not future.done():
                return future, turn
        self.shares.clear()
        self.at = 0.0
        return None


class StepTurns:
    """The turns of all conversations of a worker."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._holders: dict[int, tuple[StepTurn, float]] = {}
        self._lines: Sequence[_Line] = tuple(_Line() for _ in USUAL_ORDER)
        self._numbers = count()
        self._picks = 0
        self._waiting = [0] * len(USUAL_ORDER)
        self._hurried = 0
        self._interactive = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_waiters(self) -> bool:
        """Whether a turn has waiters."""
        return any(self._waiting)

    def is_full_for(self, turn: StepTurn) -> bool:
        """Return whether a non-interactive turn must wait, because enough others step beside interactive work."""
        return turn.rank > 0 and self._is_hurried and self._others > BESIDE_INTERACTIVE

    def make_turn(self, claimed: ClaimedConversation) -> StepTurn:
        """Return the turns of a conversation."""
        return StepTurn(self, claimed.rank, claimed.share, max(claimed.weight, 0.001))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Hold back other work while interactive work is claimed."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1
            self._hand_out()

    def try_take(self, turn: StepTurn) -> bool:
        """Take a turn if none is ahead in line."""
        if turn.rank > 0 and self.has_waiters:
            return False
        if self._waiting[turn.rank] or not self._has_room(turn.rank):
            return False
        self._hold(turn)
        return True

    async def wait(self, turn: StepTurn) -> None:
        """Wait in line."""
        future = asyncio.get_running_loop().create_future()
        self._lines[turn.rank].join(next(self._numbers), future, turn)
        self._waiting[turn.rank] += 1
        self._set_timer()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the turn was already given to this conversation
                self.give(turn)
            raise
        finally:
            self._waiting[turn.rank] -= 1

    def give(self, turn: StepTurn) -> None:
        """Give a turn back, unless it no longer counts as taken."""
        self._drop(id(turn))
        self._hand_out()

    @property
    def _is_hurried(self) -> bool:
        return self._hurried + self._interactive > 0

    @property
    def _others(self) -> int:
        """Number of non-interactive conversations that step."""
        return len(self._holders) - self._interactive

    def _has_room(self, rank: int) -> bool:
        if rank == 0:
            return len(self._holders) < self._at_once + INTERACTIVE_EXTRA
        # During interactive work only a few others step, but those few always do.
        if self._is_hurried:
            return self._others < min(self._at_once, BESIDE_INTERACTIVE)
        return len(self._holders) < self._at_once

    def _hold(self, turn: StepTurn) -> None:
        self._holders[id(turn)] = (turn, asyncio.get_running_loop().time())
        self._interactive += turn.rank == 0

    def _drop(self, key: int) -> None:
        found = self._holders.pop(key, None)
        if found is not None:
            self._interactive -= found[0].rank == 0

    def _hand_out(self) -> None:
        while self.has_waiters:
            found = self._pick_next()
            if found is None:
                return
            future, turn = found
            self._hold(turn)
            future.set_result(None)

    def _pick_next(self) -> tuple[asyncio.Future[None], StepTurn] | None:
        for rank in ORDERS.get((self._picks + 1) % 8, USUAL_ORDER):
            found = self._lines[rank].pop() if self._has_room(rank) else None
            if found is not None:
                self._picks += 1
                return found
        return None

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LONGEST_SECONDS, self._expire_slow)

    def _expire_slow(self) -> None:
        """Give back turns that take too long."""
        self._timer = None
        latest = asyncio.get_running_loop().time() - LONGEST_SECONDS
        for key, (_, since) in list(self._holders.items()):
            if since > latest:
                break
            self._drop(key)
        self._hand_out()
        if self.has_waiters:
            self._set_timer()
