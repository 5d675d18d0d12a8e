"""Schedules as values: cron expressions, time zones with their two odd hours, ticks that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from pydantic import ValidationError

from deckhands.operations.schedules.schedule import MAX_MISSED, DueTicks, Schedule, find_due

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
BERLIN = "Europe/Berlin"
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def at(cron: str, zone: str = "UTC", **fields: object) -> Schedule:
    return Schedule(name="s", cron=cron, zone=zone, **fields)  # type: ignore[arg-type]


def test_ticks_are_minutes_of_a_zone() -> None:
    assert at("30 6 * * *").next_after(NOON) == datetime(2026, 3, 3, 6, 30, tzinfo=UTC)
    assert at("30 6 * * *", BERLIN).next_after(NOON) == datetime(2026, 3, 3, 5, 30, tzinfo=UTC)
    assert at("30 6 * * *", "Asia/Kolkata").next_after(NOON) == datetime(2026, 3, 3, 1, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after", "ticks"),
    [
        (datetime(2026, 3, 28, 12, tzinfo=UTC), ["2026-03-29T01:00+00:00", "2026-03-30T00:30+00:00"]),
        (datetime(2026, 10, 24, 12, tzinfo=UTC), ["2026-10-25T00:30+00:00", "2026-10-26T01:30+00:00"]),
    ],
    ids=["skipped hour: after it", "hour that comes twice: once"],
)
def test_ticks_at_a_change_of_the_clock(after: datetime, ticks: list[str]) -> None:
    found = at("30 2 * * *", BERLIN).next_ticks(after, number=2)
    assert [tick.isoformat(timespec="minutes") for tick in found] == ticks


def test_a_tick_of_every_hour_comes_every_hour() -> None:
    ticks = at("0 * * * *", BERLIN).next_ticks(datetime(2026, 10, 24, 20, tzinfo=UTC), number=12)
    assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(hours=1)}


@pytest.mark.parametrize(
    ("schedule", "tick", "now", "due"),
    [
        (at("0 13 * * *"), NOON + HOUR, NOON, DueTicks(None, 0, NOON + HOUR)),
        (at("* * * * *"), NOON, NOON, DueTicks(NOON, 0, NOON + MINUTE)),
        (at("* * * * *"), NOON, NOON + 10.5 * MINUTE, DueTicks(NOON + 10 * MINUTE, 10, NOON + 11 * MINUTE)),
        (at("0 12 * * *"), NOON, NOON + 2 * HOUR, DueTicks(None, 1, NOON + 24 * HOUR)),
        (at("0 12 * * *", catch_up_seconds=10_800), NOON, NOON + 2 * HOUR, DueTicks(NOON, 0, NOON + 24 * HOUR)),
    ],
    ids=["future", "now", "latest of the missed", "too late", "caught up"],
)
def test_due_ticks(schedule: Schedule, tick: datetime, now: datetime, due: DueTicks) -> None:
    assert find_due(schedule, tick, now) == due


def test_years_of_missed_ticks_are_not_gone_through() -> None:
    now = NOON + timedelta(days=3650)
    found = find_due(at("* * * * *"), NOON, now)
    assert (found.tick, found.next) == (now, now + timedelta(minutes=1))
    assert found.missed < MAX_MISSED


@pytest.mark.parametrize(
    "fields",
    [
        {"cron": "* * * *"},
        {"cron": "61 * * * *"},
        {"cron": "0 0 31 2 *"},
        {"cron": "* * * * *", "zone": "Europe/Nowhere"},
        {"cron": "* * * * *", "zone": "../../etc/passwd"},
        {"cron": "* * * * *", "name": "a/b"},
        {"cron": "* * * * *", "overlap": "queue"},
        {"cron": "* * * * *", "catch_up_seconds": -1},
    ],
    ids=str,
)
def test_invalid_schedule_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Schedule.model_validate({"name": "s", **fields})
