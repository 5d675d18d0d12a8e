"""Hours of clusters at work: nothing is lost or doubled, they repeat from their seed, and leaps change no log.

A failure prints the `Hours` that repeat it.
"""

from pathlib import Path

import pytest

from broker.contract.codec import encode
from tests.simulation.hours import Hours, HoursOutcome, find_broken_hours, simulate_hours

SHORT_HOURS = 0.3
SEEDS = range(2)
MORE_SEEDS = range(100, 140)
PARTS = 4


def list_content(outcome: HoursOutcome) -> dict[str, list[tuple[str, str]]]:
    """Return kind and content of all events."""
    return {
        cid: [(event.kind, str(event.wire().get("content", ""))) for event in events]
        for cid, events in outcome.logs.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_work_under_faults_loses_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    outcome = simulate_hours(Hours(seed, SHORT_HOURS), tmp_path)
    assert find_broken_hours(outcome) == []
    assert outcome.cluster.wire.struck


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_longer_work_loses_and_doubles_nothing(part: int, tmp_path: Path) -> None:
    for seed in MORE_SEEDS[part::PARTS]:
        outcome = simulate_hours(Hours(seed), tmp_path)
        assert find_broken_hours(outcome) == [], outcome.hours


def test_work_repeats_from_its_seed_to_the_byte(tmp_path: Path) -> None:
    first, second = (simulate_hours(Hours(7, SHORT_HOURS), tmp_path) for _ in range(2))
    assert first.cluster.wire.passed == second.cluster.wire.passed
    assert [encode(event.wire()) for events in first.logs.values() for event in events] == [
        encode(event.wire()) for events in second.logs.values() for event in events
    ]


def test_leaps_over_idle_spans_change_no_log(tmp_path: Path) -> None:
    hours = Hours(3, 0.05, conversations=2, has_faults=False)
    leaping = simulate_hours(hours, tmp_path)
    steady = simulate_hours(Hours(3, 0.05, conversations=2, has_faults=False, has_leaps=False), tmp_path)
    assert find_broken_hours(leaping) == find_broken_hours(steady) == []
    assert leaping.leaps.leapt > steady.cluster.clock.monotonic() / 2
    assert list_content(leaping) == list_content(steady)
    assert len(leaping.cluster.wire.passed) < len(steady.cluster.wire.passed) / 2
    assert leaping.cluster.clock.monotonic() == pytest.approx(steady.cluster.clock.monotonic(), rel=0.05)
