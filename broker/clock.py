"""The only caller of `time` in our packages (workspace hosts apart): wall and monotonic clocks, and one for tests.

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
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds that never go backwards; only differences mean anything."""
        return time.monotonic()

    def cpu(self) -> float:
        """Return the CPU seconds this process has used."""
        return time.process_time()


class ManualClock:
    """A clock that moves only when told to; wall and monotonic time move together."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds` (≥ 0)."""
        assert seconds >= 0
        self._elapsed += seconds

    def now(self) -> datetime:
        """Return the wall time, aware UTC."""
        return datetime.fromtimestamp(self._start.timestamp() + self._elapsed, UTC)

    def monotonic(self) -> float:
        """Return seconds since the clock was made."""
        return self._elapsed


def from_millis(millis: int) -> datetime:
    """Turn the store's milliseconds since the epoch into an aware UTC time."""
    return datetime.fromtimestamp(millis / 1000, UTC)


def to_millis(moment: datetime) -> int:
    """Turn an aware time into milliseconds since the epoch, rounded down."""
    return int(moment.timestamp() * 1000)
