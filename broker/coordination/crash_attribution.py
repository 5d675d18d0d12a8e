"""Crash attribution: what was active when a worker died runs under a mark in the store, one at a time.

A worker that dies drops everything it held, and at most one of these things is to blame. So the first death
counts against each of them. From then on each is marked while it acts, and the next death counts against the marked.

Holds: one suspect of a process begins at a time, so that a death counts against one of them and not all. A suspect that
takes longer than `TURN_SECONDS` keeps its mark and lets the next one begin. One that has begun and waited continues at
once, or those that begin would hold up all others. The more deaths count against a suspect, the later it begins, so
that a kill that always comes at the same moment does not meet the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TURN_SECONDS = 1.0
PAUSE_SECONDS = 0.5


class Turns:
    """The turns in which the suspects of a process begin.

    Args:
        turn_seconds: How long one may last.
        pause_seconds: How much later a suspect asks for its turn, for each death but the first.
    """

    def __init__(self, *, turn_seconds: float = TURN_SECONDS, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.pause_seconds = pause_seconds
        self._turn_seconds = turn_seconds
        self._free = asyncio.Semaphore(1)

    async def take(self) -> Callable[[], None]:
        """Wait for a turn and return what ends it; it ends by itself when it has lasted too long. Idempotent."""
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
    """Marks one thing while it acts; does nothing for things that no worker has died with.

    Args:
        mark: Notes in the store that it acts, or that it only waits now.
        deaths: How many count against it.
    """

    def __init__(self, turns: Turns, mark: Callable[[bool], Awaitable[object]], *, deaths: int) -> None:
        self._turns = turns
        self._mark = mark
        self._is_suspect = deaths > 0
        self._pause = turns.pause_seconds * (deaths - 1)
        self._has_begun = self._is_marked = False
        self._end_turn: Callable[[], None] | None = None

    async def act(self) -> None:
        """Act, the first time when it is its turn. Idempotent."""
        if not self._is_suspect or self._is_marked:
            return
        if not self._has_begun:
            self._has_begun = True
            await asyncio.sleep(self._pause)
            self._end_turn = await self._turns.take()
        self._is_marked = True
        await self._mark(True)

    async def rest(self) -> None:
        """Only wait: a death that comes now does not count against it. Idempotent."""
        if self._is_marked:
            self._is_marked = False
            await self._mark(False)
            self.end_turn()

    def end_turn(self) -> None:
        """Let the next one act; the mark was taken away otherwise, or is to stay. Idempotent."""
        if self._end_turn is not None:
            self._end_turn()
            self._end_turn = None

    def clear(self) -> None:
        """Stop suspecting it: it has made progress, and the store has forgotten its deaths."""
        self._is_suspect = self._is_marked = False
        self.end_turn()


async def _never_marked(is_acting: bool) -> None:
    raise AssertionError(f"nobody is suspected, and yet marked {is_acting}")


NOT_SUSPECTED = CrashAttribution(Turns(), _never_marked, deaths=0)
"""Of what no worker has died with."""
