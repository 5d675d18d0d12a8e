"""Schedules as values: cron expressions, time zones with their two odd hours, ticks that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from pydantic import ValidationError

from deckhands.operations.schedules.schedule import MAX_MISSED, DueTicks, Schedule, find_due

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
BERLIN = "Europe/Berlin"


def at(cron: str, zone: str = "UTC", **fields: object) -> Schedule:
    return Schedule(name="s", cron=cron, zone=zone, **fields)  # type: ignore[arg-type]


def test_ticks_are_minutes_of_a_zone() -> None:
    assert at("30 6 * * *").next_after(NOON) == datetime(2026, 3, 3, 6, 30, tzinfo=UTC)
    assert at("30 6 * * *", BERLIN).next_after(NOON) == datetime(2026, 3, 3, 5, 30, tzinfo=UTC)
    assert at("30 6 * * *", "Asia/Kolkata").next_after(NOON) == datetime(2026, 3, 3, 1, 0, tzinfo=UTC)


def test_tick_in_the_skipped_hour_comes_after_it() -> None:
    ticks = at("30 2 * * *", BERLIN).next_ticks(datetime(2026, 3, 28, 12, tzinfo=UTC), number=2)
    assert ticks == [datetime(2026, 3, 29, 1, 0, tzinfo=UTC), datetime(2026, 3, 30, 0, 30, tzinfo=UTC)]


def test_a_tick_of_the_hour_that_comes_twice_comes_once() -> None:
    ticks = at("30 2 * * *", BERLIN).next_ticks(datetime(2026, 10, 24, 12, tzinfo=UTC), number=2)
    assert ticks == [datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)]


def test_a_tick_of_every_hour_comes_every_hour() -> None:
    ticks = at("0 * * * *", BERLIN).next_ticks(datetime(2026, 10, 24, 20, tzinfo=UTC), number=12)
    assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(hours=1)}


def test_future_tick_is_not_due() -> None:
    tick = NOON + timedelta(hours=1)
    assert find_due(at("0 13 * * *"), tick, NOON) == DueTicks(None, 0, tick)


def test_a_tick_that_has_come_is_due() -> None:
    assert find_due(at("* * * * *"), NOON, NOON) == DueTicks(NOON, 0, NOON + timedelta(minutes=1))


def test_of_missed_ticks_only_the_latest_is_made_up_for() -> None:
    now = NOON + timedelta(minutes=10, seconds=30)
    assert find_due(at("* * * * *"), NOON, now) == DueTicks(
        NOON + timedelta(minutes=10), 10, NOON + timedelta(minutes=11)
    )


def test_a_tick_that_is_too_late_is_missed() -> None:
    now = NOON + timedelta(hours=2)
    assert find_due(at("0 12 * * *"), NOON, now) == DueTicks(None, 1, NOON + timedelta(days=1))
    assert find_due(at("0 12 * * *", catch_up_seconds=3 * 3600), NOON, now).tick == NOON


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
