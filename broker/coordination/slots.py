"""The slots of a worker: how many conversations or actions it holds at once, with a reserve for interactive work.

Holds: interactive and other work cannot block each other. Each side may always have an eighth of the capacity, at least
one slot, even if the other side uses all. So a worker holds at most nine eighths of its capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """A limiter with slots for interactive and other work."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept = max(1, capacity // 8)
        self._taken = {True: 0, False: 0}
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        """The number of slots in use."""
        return sum(self._taken.values())

    def count_free(self, *, is_first: bool) -> int:
        """Return how many slots interactive work (`is_first`) or other work may take now."""
        return max(self.capacity - self.used, self._kept - self._taken[is_first], 0)

    def take(self, *, is_first: bool) -> None:
        """Take a slot, even if none is free: the caller already holds the work."""
        self._taken[is_first] += 1

    def release(self, *, is_first: bool) -> None:
        """Release a slot."""
        self._taken[is_first] -= 1
        self._freed.set()

    @asynccontextmanager
    async def hold(self, *, is_first: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        await self.wait(is_first=is_first)
        self.take(is_first=is_first)
        try:
            yield
        finally:
            self.release(is_first=is_first)

    @asynccontextmanager
    async def free(self, *, is_first: bool) -> AsyncIterator[None]:
        """Free a held slot, and wait for one at the end of the block. If that is cancelled, the slot is held anyway."""
        self.release(is_first=is_first)
        try:
            yield
            await self.wait(is_first=is_first)
        finally:
            self.take(is_first=is_first)

    async def wait(self, *, is_first: bool) -> int:
        """Wait until a slot is free, and return the number of free slots."""
        while not (free := self.count_free(is_first=is_first)):
            self._freed.clear()
            await self._freed.wait()
        return free
