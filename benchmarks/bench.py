"""What every benchmark is given: where to work, how much to do, and the peer if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.figures import Spread
from benchmarks.peer.sdk import Sdk


class Size(StrEnum):
    """How much is measured."""

    SMOKE = "smoke"
    """Only to see that it works; the figures mean nothing."""
    SHORT = "short"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Bench:
    """One run.

    Attributes:
        directory: on the machine's disk, for the stores of both sides; removed at the end.
        sdk: OpenHands' SDK, or None without it.
    """

    directory: Path
    size: Size
    sdk: Sdk | None

    def choose(self, *, smoke: int, short: int, full: int) -> int:
        """Return the amount for this run's size."""
        return {Size.SMOKE: smoke, Size.SHORT: short, Size.FULL: full}[self.size]

    async def peer(self, work: str, **arguments: Any) -> dict[str, Any]:
        """Have the SDK do a piece of work, on the same disk; an empty answer without it."""
        if self.sdk is None:
            return {}
        return await self.sdk.ask(work, **{"directory": str(self.directory)} | arguments)


def spread(values: list[float], *, scale: float) -> Spread | None:
    """Return the spread of values, or None if nothing was measured."""
    return Spread.of(values, scale=scale) if values else None
