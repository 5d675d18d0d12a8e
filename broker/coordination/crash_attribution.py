"""Crash attribution: after a crash, suspects start one at a time, each marked in the store while it acts.

A worker that dies drops everything it held, and at most one of these things caused the crash. So the first death counts
against each of them. From then on each is marked while it acts, and the next death counts only against the marked ones.

Holds: one suspect of a process starts at a time, so that a death counts against one and not all. A suspect that takes
longer than `TURN_SECONDS` keeps its mark, and the next one starts. A suspect that has started and then waited continues
without a turn; otherwise starting suspects would block the others. A suspect starts later the more deaths it has, so
that a kill at a fixed moment does not always hit the same suspect. A suspect that starts to wait for others has just
survived everything that it does before the wait. So it is acquitted of all earlier deaths, except those that came after
such a wait. Frequent deaths therefore do not add up against a suspect that waits for hours, but a result that kills its
workers is still given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

TURN_SECONDS = 1.0
PAUSE_SECONDS = 0.5


class Mark(IntEnum):
    """A record in the store about a suspect; `ACTING_AGAIN`: it acts after the wait that acquitted it."""

    WAITING = 0
    ACTING = 1
    ACQUITTED = 2
    ACTING_AGAIN = 3


class SuspectTurns:
    """The turns in which the suspects of a process start.

    Args:
        turn_seconds: maximum duration of a turn.
        pause_seconds: delay of a suspect's first turn, for each death but the first.
    """

    def __init__(self, *, turn_seconds: float = TURN_SECONDS, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.pause_seconds = pause_seconds
        self._turn_seconds = turn_seconds
        self._free = asyncio.Semaphore(1)

    async def take(self) -> Callable[[], None]:
        """Wait for a turn and return the function that ends it. A turn also ends after `turn_seconds`. Idempotent."""
        await self._free.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                limit.cancel()
                self._free.release()

        limit = asyncio.get_running_loop().call_later(self._turn_seconds, end)
        return end


class CrashAttribution:
    """Marks one thing while it acts. Does nothing for things that no worker died with.

    Args:
        mark: writes a record about it to the store.
        deaths: number of deaths that count against it.
    """

    def __init__(self, turns: SuspectTurns, mark: Callable[[Mark], Awaitable[object]], *, deaths: int) -> None:
        self._turns = turns
        self._mark = mark
        self._is_suspect = deaths > 0
        self._pause = turns.pause_seconds * (deaths - 1)
        self._has_begun = self._is_marked = self._is_acquitted = False
        self._end_turn: Callable[[], None] | None = None

    async def mark_acting(self) -> None:
        """Mark it as acting; the first time, wait for a turn first. Idempotent."""
        if not self._is_suspect or self._is_marked:
            return
        if not self._has_begun:
            self._has_begun = True
            await asyncio.sleep(self._pause)
            self._end_turn = await self._turns.take()
        self._is_marked = True
        await self._mark(Mark.ACTING_AGAIN if self._is_acquitted else Mark.ACTING)

    async def mark_waiting(self) -> None:
        """Mark it as waiting: a death from now on does not count against it. Idempotent."""
        if self._is_marked:
            self._is_marked = False
            await self._mark(Mark.WAITING)
            self.end_turn()

    async def acquit(self) -> None:
        """Mark it as waiting for others: it has survived all its work, so earlier deaths had another cause."""
        if self._is_marked:
            self._is_marked = False
            self._is_acquitted = True
            await self._mark(Mark.ACQUITTED)
            self.end_turn()

    def end_turn(self) -> None:
        """End the turn but leave the mark, which stays or is removed elsewhere. Idempotent."""
        if self._end_turn is not None:
            self._end_turn()
            self._end_turn = None

    def clear(self) -> None:
        """Clear the suspicion, because it made progress and the store has reset its deaths."""
        self._is_suspect = self._is_marked = False
        self.end_turn()


async def _refuse_mark(mark: Mark) -> None:
    raise AssertionError(f"marked without a suspicion: {mark.name}")


NOT_SUSPECTED = CrashAttribution(SuspectTurns(), _refuse_mark, deaths=0)
"""The attribution for things that no worker has died with."""
