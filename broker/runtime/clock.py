"""The only caller of `time` in our packages (workspace hosts apart): wall and monotonic clocks.

Holds: wall times are aware UTC; durations are float seconds from a monotonic clock.
Does not: decide who owns a conversation. Safety rests on fencing tokens, never on a clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where a component reads the time."""

    def now(self) -> datetime:
        """Return the wall time, aware UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards; only differences mean anything."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall time, aware UTC."""
        return datetime.fromtimestamp(time.time(), UTC)

    def monotonic(self) -> float:
        """Return seconds that never go backwards; only differences mean anything."""
        return time.monotonic()

    def cpu(self) -> float:
        """Return the CPU seconds this process has used."""
        return time.process_time()


SYSTEM_CLOCK: Clock = SystemClock()
"""The clock of this machine, for callers that pass no other."""


class SharedClock:
    """The time that all workers of a store share, whatever their own wall clocks say.

    The store says at each beat what time it is. In between, this clock follows the machine's monotonic clock.
    """

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._lead: float | None = None

    def now(self) -> datetime:
        """Return the shared time, aware UTC; the machine's own time until the store has answered once."""
        if self._lead is None:
            return self._own.now()
        return datetime.fromtimestamp(self._own.monotonic() + self._lead, UTC)

    def monotonic(self) -> float:
        """Return seconds that never go backwards; only differences mean anything."""
        return self._own.monotonic()

    def machine(self) -> datetime:
        """Return the wall time of this machine, right or wrong."""
        return self._own.now()

    def agree(self, store_ms: int, *, sent: float) -> None:
        """Note the store's time in the reply to a call that was sent at `sent` (monotonic) and is answered now.

        The store read it at some moment in between: nothing changes while that can be true.
        """
        said = store_ms / 1000
        least, most = said - self._own.monotonic(), said - sent
        self._lead = (least + most) / 2 if self._lead is None else min(max(self._lead, least), most)


def now_nanos() -> int:
    """Return this machine's wall time in nanoseconds since the epoch."""
    return time.time_ns()


def from_millis(millis: int) -> datetime:
    """Turn the store's milliseconds since the epoch into an aware UTC time."""
    return datetime.fromtimestamp(millis / 1000, UTC)


def to_millis(moment: datetime) -> int:
    """Turn an aware time into milliseconds since the epoch, rounded down."""
    return int(moment.timestamp() * 1000)
