"""Wall and monotonic clocks. The only caller of `time` in our packages, except for workspace hosts.

A process does all its periodic work at common ticks, so that an idle process rarely wakes up and its loops send their
commands to the store together.

Holds: wall times are aware UTC; durations are float seconds from a monotonic clock.
Does not: decide who owns a conversation. Safety depends on fencing tokens, never on a clock.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """A source of time for components."""

    def now(self) -> datetime:
        """Return the wall time, aware UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease. Only differences are meaningful."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall time, aware UTC."""
        return datetime.fromtimestamp(time.time(), UTC)

    def monotonic(self) -> float:
        """Return seconds that never decrease. Only differences are meaningful."""
        return time.monotonic()

    def cpu(self) -> float:
        """Return the CPU seconds used by this process."""
        return time.process_time()


SYSTEM_CLOCK: Clock = SystemClock()
"""The clock of this machine, the default of callers that pass none."""


class SharedClock:
    """The time that all workers of a store share, independent of their own wall clocks.

    The store returns its time at each beat. In between, this clock follows the machine's monotonic clock.
    """

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._lead: float | None = None

    def now(self) -> datetime:
        """Return the shared time, aware UTC; the machine's own time until the store's first answer."""
        if self._lead is None:
            return self._own.now()
        return datetime.fromtimestamp(self._own.monotonic() + self._lead, UTC)

    def monotonic(self) -> float:
        """Return seconds that never decrease. Only differences are meaningful."""
        return self._own.monotonic()

    def machine_now(self) -> datetime:
        """Return the wall time of this machine, which may be wrong."""
        return self._own.now()

    def apply_store_time(self, store_ms: int, *, sent: float) -> None:
        """Apply the store's time from the reply to a call that was sent at `sent` (monotonic) and was answered now.

        The store read its clock between these times. The shared time is changed only if it contradicts this.
        """
        said = store_ms / 1000
        least, most = said - self._own.monotonic(), said - sent
        self._lead = (least + most) / 2 if self._lead is None else min(max(self._lead, least), most)


def now_nanos() -> int:
    """Return this machine's wall time in nanoseconds since the epoch."""
    return time.time_ns()


def from_millis(millis: int) -> datetime:
    """Convert the store's milliseconds since the epoch to an aware UTC time."""
    return datetime.fromtimestamp(millis / 1000, UTC)


def to_millis(moment: datetime) -> int:
    """Convert an aware time to milliseconds since the epoch, rounded down."""
    return int(moment.timestamp() * 1000)


SHARE_OF_PID = 0.37


async def wait_for_tick(period_seconds: float) -> None:
    """Wait until the next tick of a period, at most as long as the period.

    The ticks of a process are multiples of the period by the clock of its event loops, plus an offset that differs
    between processes, so that those of one machine do not all wake up at once.
    """
    now = asyncio.get_running_loop().time() + os.getpid() * SHARE_OF_PID
    await asyncio.sleep(period_seconds - now % period_seconds)
