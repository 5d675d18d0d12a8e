"""The status of an evaluation, as a user reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deckhands.evaluation.attempts.status import (
    AttemptDetails,
    EvaluationStatus,
    ProgressScreen,
    SpendingMeter,
    parse_status,
    render_progress,
)
from tests.unit.deckhands.evaluation.attempts.test_results import row

SHOWN = AttemptDetails(
    instance="add-1\x1b[2J",
    model="acme/large",
    attempt=1,
    state="running",
    waits_for="tool",
    worker="controller-host-1",
    seconds=12.4,
    iterations=3,
    cost_usd=0.25,
    conversation_id="k1",
)
STATUS = EvaluationStatus(
    state="running",
    total=10,
    ended=4,
    in_flight=3,
    pending=3,
    outcomes={"resolved": 3, "unresolved": 1, "limit": 0},
    cost_usd=1.5,
    tokens=9_000,
    usd_per_minute=0.5,
    tokens_per_minute=3_000.0,
    eta_seconds=90.0,
    refused=2,
    limit=3,
    limits={"acme/large": 3},
    found={"acme/large": 5},
    bound="acme/large: 429s: they came at 5 at once",
    attempts=[SHOWN] * 3,
)


def test_a_line_says_what_binds_now() -> None:
    assert STATUS.render_line == (
        "4 of 10 attempts ended (3 resolved, 1 unresolved), 3 in flight, 1 min left; $1.5000, $0.5000 and 3,000 tokens "
        "a minute; 2 429s; limit 3, bound by acme/large: 429s: they came at 5 at once; acme/large overloads at 5"
    )


def test_table_fits_the_screen_and_ignores_escape_sequences() -> None:
    lines = render_progress(STATUS, columns=80, rows=8)
    assert len(lines) == 6
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("INSTANCE")
    assert "\\x1b[2J" in lines[1]
    assert lines[3] == "… and 1 more in flight"
    assert "\x1b" not in "".join(lines)


def test_elsewhere_there_is_a_line_whenever_another_limit_binds(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressScreen() as screen:
        screen.show(STATUS)
        screen.show(replace(STATUS, ended=5))
        screen.show(replace(STATUS, bound="-n 3"))
        screen.show(replace(STATUS, bound="-n 3", ended=10, state="over"))
    lines = capsys.readouterr().err.splitlines()
    assert ["4 of 10" in lines[0], "-n 3" in lines[1], "10 of 10" in lines[2], len(lines)] == [True, True, True, 3]


def test_written_status_is_read_again_and_garbage_is_not() -> None:
    found = parse_status({**STATUS.as_json(), "at": 3.0})
    assert found == STATUS
    assert parse_status({}) is None
    assert parse_status({**STATUS.as_json(), "in_flight": "many"}) is None


def test_meter_counts_by_minute_and_forgets_restarts() -> None:
    meter = SpendingMeter([row("a", cost_usd=1.0)])
    assert meter.rates(0.0, 1.0, 0) == (0.0, 0.0, 0.0)
    meter.add(row("b", cost_usd=2.0, prompt_tokens=500))
    assert meter.rates(10.0, 3.0, 500) == (0.2, 50.0, 0.1)
    meter.forget([row("a")])
    assert meter.outcomes["resolved"] == 1
