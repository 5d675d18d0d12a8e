"""The places of a worker: how many conversations or actions it holds at once, and which are kept for whom.

Holds: all others together never keep interactive work waiting, nor the other way round: each side may always have an
eighth of the capacity, at least one place, even if the other side has taken all. So there is never more in hand than
the capacity and an eighth of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Places that are taken and given back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept = max(1, capacity // 8)
        self._taken = {True: 0, False: 0}
        self._freed = asyncio.Event()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return sum(self._taken.values())

    def free(self, *, is_first: bool) -> int:
        """Return how many places interactive work (`is_first`), or everything else, may take now."""
        return max(self.capacity - self.taken, self._kept - self._taken[is_first], 0)

    def take(self, *, is_first: bool) -> None:
        """Take a place, whether there is one or not: what is there already has to be somewhere."""
        self._taken[is_first] += 1

    def give(self, *, is_first: bool) -> None:
        """Give a place back."""
        self._taken[is_first] -= 1
        self._freed.set()

    @asynccontextmanager
    async def one(self, *, is_first: bool) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        await self.wait(is_first=is_first)
        self.take(is_first=is_first)
        try:
            yield
        finally:
            self.give(is_first=is_first)

    async def wait(self, *, is_first: bool) -> int:
        """Wait until a place is free, and return how many are."""
        while not (free := self.free(is_first=is_first)):
            self._freed.clear()
            await self._freed.wait()
        return free
