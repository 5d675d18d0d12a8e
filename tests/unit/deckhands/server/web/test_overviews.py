"""The server's cache of evaluations, and when it reads their rows again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from broker.testing.manual_clock import ManualClock
from deckhands.evaluation.attempts.catalog import Catalog, EvaluationInfo, EvaluationListing
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.server.web.overviews import KEPT, REST, Overviews
from tests.evaluation_parts import status_of_rows

READING_SECONDS = 2.0
ROWS = [AttemptRow(instance=name, model="m", attempt=1, outcome="resolved") for name in "ab"]


class SlowCatalog(Catalog):
    """A catalog that takes two seconds to read rows, and counts how often it does."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.read = clock, 0

    async def rows(self, name: str) -> list[AttemptRow]:
        self.read += 1
        await asyncio.sleep(0)
        self.clock.advance(READING_SECONDS)
        return list(ROWS)


def listed(
    clock: ManualClock, name: str = "one", *, state: str = "running", rows: Sequence[AttemptRow] = ROWS
) -> EvaluationListing:
    return EvaluationListing(
        name, EvaluationInfo(), status_of_rows(rows, total=9, state=state), clock.now(), is_driven=True
    )


async def test_concurrent_requests_share_one_read() -> None:
    clock = ManualClock()
    catalog, overviews = SlowCatalog(clock), Overviews(clock)
    found = await asyncio.gather(*[overviews.of(catalog, listed(clock)) for _ in range(20)])
    assert catalog.read == 1
    assert [entry.instance for entry in found[-1].entries] == ["a", "b"]
    assert found[-1].models["m"]["attempts"] == 2


async def test_running_evaluation_is_reread_after_ten_times_its_read_time() -> None:
    clock = ManualClock()
    catalog, overviews = SlowCatalog(clock), Overviews(clock)
    first = listed(clock)
    await overviews.of(catalog, first)
    later = replace(first, at=first.at + timedelta(seconds=1))
    clock.advance(REST * READING_SECONDS - 0.1)
    await overviews.of(catalog, later)
    assert catalog.read == 1
    clock.advance(0.2)
    await overviews.of(catalog, first)
    assert catalog.read == 1  # no driver has written since
    await overviews.of(catalog, later)
    assert catalog.read == 2


async def test_ended_evaluation_is_reread_after_each_write() -> None:
    clock = ManualClock()
    catalog, overviews = SlowCatalog(clock), Overviews(clock)
    first = listed(clock, state="over")
    for _ in range(3):
        await overviews.of(catalog, first)
    assert catalog.read == 1
    await overviews.of(catalog, replace(first, at=first.at + timedelta(milliseconds=1)))
    assert catalog.read == 2


async def test_only_those_that_were_looked_at_last_are_kept() -> None:
    clock = ManualClock()
    catalog, overviews = SlowCatalog(clock), Overviews(clock)
    some = [listed(clock, f"e{number}", state="over") for number in range(KEPT + 1)]
    for one in some:
        await overviews.of(catalog, one)
    await overviews.of(catalog, some[-1])
    assert catalog.read == KEPT + 1
    await overviews.of(catalog, some[0])
    assert catalog.read == KEPT + 2
