"""The short table of a benchmark of evaluations, and the file that keeps it."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.machine import load

FOLDER = ROOT / "build" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table.

    Attributes:
        most: the target, at most so much; None: it only informs.
    """

    name: str
    value: float | str
    unit: str = ""
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it keeps its target."""
        return self.most is None or (not isinstance(self.value, str) and self.value <= self.most)

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:,.4g}"
        target = "" if self.most is None else f"  (at most {self.most:g}: {'met' if self.is_met else 'MISSED'})"
        return f"  {self.name:<58} {value:>10} {self.unit}{target}".rstrip()


def show(name: str, title: str, lines: Sequence[Line]) -> None:
    """Print the table, and write it to `build/benchmarks/NAME.json`."""
    lines = [*lines, Line("load of the machine at the end", round(load(), 1))]
    print(title, *lines, sep="\n", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"title": title, "figures": [asdict(line) for line in lines]}
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Written to {path.relative_to(ROOT)}.")


def ideal_seconds(attempts: Iterable[float], at_once: int) -> float:
    """Return how long attempts take if so many are under way at once, in their order, and nothing costs anything."""
    ends: list[float] = []
    for seconds in attempts:
        begins = heapq.heappop(ends) if len(ends) >= at_once else 0.0
        heapq.heappush(ends, begins + seconds)
    return max(ends, default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0
