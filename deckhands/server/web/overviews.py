"""Cached overviews of evaluations for the web page: their figures, and a list of their attempts.

An evaluation may have 20,000 attempts with 4,000 characters of evidence each, and every open page polls every few
seconds. So its rows are read once for all readers, and again only after a driver has written.
Holds: at most a tenth of the time goes into reading the rows of one evaluation while it runs, so the age of its figures
may be ten times the duration of a read. The figures of a finished evaluation are always final. Evidence is not cached.
Does not: check access.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from broker.runtime import Clock
from deckhands import evaluation as evals

KEPT = 16
REST = 10.0
OVER = "over"


@dataclass(frozen=True, slots=True)
class AttemptEntry:
    """The fields of an attempt by which a user selects attempts."""

    key: tuple[str, str, int]
    outcome: str
    cause: str

    @property
    def model(self) -> str:
        """The model of the attempt."""
        return self.key[0]

    @property
    def instance(self) -> str:
        """The instance of the attempt."""
        return self.key[1]


@dataclass(frozen=True, slots=True)
class EvaluationOverview:
    """The aggregated rows of an evaluation.

    Attributes:
        models: the figures of each, as `compute_summary` returns them.
        entries: in the order of the rows.
    """

    models: Mapping[str, Mapping[str, Any]]
    distributions: Mapping[str, evals.Distribution]
    failure_classes: Sequence[evals.FailureClass]
    entries: Sequence[AttemptEntry] = field(repr=False)


@dataclass(slots=True)
class _CachedOverview:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    overview: EvaluationOverview | None = None
    at: datetime | None = None
    read_at: float = 0.0
    took: float = 0.0


class Overviews:
    """The overviews of the evaluations that were viewed last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _CachedOverview] = OrderedDict()

    async def of(self, catalog: evals.Catalog, listed: evals.EvaluationListing) -> EvaluationOverview:
        """Return the overview of an evaluation. Concurrent callers share one read.

        Raises:
            StoreError: the store cannot be used.
        """
        kept = self._kept.setdefault(listed.name, _CachedOverview())
        self._kept.move_to_end(listed.name)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        async with kept.lock:
            if kept.overview is not None and self._is_fresh(kept, listed):
                return kept.overview
            begun = self._clock.monotonic()
            rows = await catalog.rows(listed.name)
            kept.overview = await asyncio.to_thread(_overview, rows)
            kept.at = listed.at
            kept.read_at = self._clock.monotonic()
            kept.took = kept.read_at - begun
            return kept.overview

    def _is_fresh(self, kept: _CachedOverview, listed: evals.EvaluationListing) -> bool:
        if kept.at == listed.at:
            return True
        is_over = listed.status is None or listed.status.state == OVER
        return not is_over and self._clock.monotonic() - kept.read_at < REST * kept.took


def _overview(rows: Sequence[evals.AttemptRow]) -> EvaluationOverview:
    return EvaluationOverview(
        evals.compute_summary(rows)["models"],
        {
            "cost_usd": evals.compute_distribution(rows, lambda row: row.cost_usd),
            "seconds": evals.compute_distribution(rows, lambda row: row.seconds),
        },
        evals.classify_failures(rows),
        tuple(AttemptEntry(row.key, row.outcome, row.cause) for row in rows),
    )
