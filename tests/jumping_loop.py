"""An event loop in virtual time: its clock jumps to the next timer as soon as nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from broker.testing.manual_clock import ManualClock


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of a clock, which it advances."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_JumpingSelector(clock))
        self._jumping = clock

    def time(self) -> float:
        """Return the time of the clock."""
        return self._jumping.monotonic()


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for another one"
        self._clock.advance(max(timeout, 0))
        return super().select(0)
