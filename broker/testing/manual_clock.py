"""A clock for tests and simulations."""

from __future__ import annotations

from datetime import UTC, datetime


class ManualClock:
    """A clock that moves only in `advance`; wall and monotonic time move together."""

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
        """Return seconds since the clock was created."""
        return self._elapsed
