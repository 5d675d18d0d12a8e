"""What a benchmark brings: figures, and the table they are shown in.

Holds: a figure is a median with its range, never a single best; where a peer did the same work, it did it in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of measured values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], *, scale: float = 1.0) -> Self:
        """Summarize at least one value, each multiplied by `scale`."""
        scaled = sorted(value * scale for value in values)
        return cls(statistics.median(scaled), scaled[0], scaled[-1])

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        target: at most this median, or at least with `is_least`; None if it only informs.
        peer: of the same work by OpenHands' SDK, or None if it has none or is not installed.
    """

    name: str
    unit: str
    ours: Spread
    target: float | None = None
    peer: Spread | None = None
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the median keeps the target."""
        if self.target is None:
            return True
        return self.ours.median >= self.target if self.is_least else self.ours.median <= self.target

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line."""
        bound = "≥" if self.is_least else "≤"
        target = "" if self.target is None else f"{bound} {_short(self.target)} {'met' if self.is_met else 'MISSED'}"
        ratio = "" if self.peer is None else _short(self.peer.median / self.ours.median)
        return (self.name, self.unit, str(self.ours), target, str(self.peer or ""), ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark has found."""

    title: str
    figures: Sequence[Figure]
    note: str


def table(result: Result, *, peer_name: str, target_name: str = "target") -> str:
    """Return a result as a Markdown table, with its note below."""
    head = (result.title, "unit", "Deckhands", target_name, peer_name, "peer ÷ ours")
    rows = [head, *(figure.row() for figure in result.figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, "", result.note])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
