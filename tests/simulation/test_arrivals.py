"""Work that arrives through the front door under faults: nothing is lost or doubled, and each planted bug is found.

A failure prints the simulation that repeats it.
"""

from pathlib import Path

import pytest

from tests.proof import Proof
from tests.simulation import planted
from tests.simulation.arrivals import ORDERS, Arrivals, find_arrivals, find_broken_arrivals, simulate_arrivals
from tests.simulation.wire import Bug, StoreBug

FEW_SEEDS = 3
CLEAN_SEEDS = 40
PARTS = 4
SEEDS = 60
"""At most, to find a bug."""
FOUND: dict[str, str] = {}
"""How each bug was found, by those tests that have run."""


def test_work_of_all_origins_ends_once_and_is_reported(tmp_path: Path) -> None:
    outcome = simulate_arrivals(Arrivals(), tmp_path)
    assert find_broken_arrivals(outcome) == []
    assert len(outcome.logs) > ORDERS
    assert len(outcome.received) == len(outcome.logs)


def test_nothing_is_lost_or_doubled_under_faults(tmp_path: Path) -> None:
    assert find_arrivals(tmp_path, range(FEW_SEEDS)) is None


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_or_doubled_with_more_seeds(part: int, tmp_path: Path) -> None:
    assert find_arrivals(tmp_path, range(part, CLEAN_SEEDS, PARTS)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        planted.leave_entries_of_the_dead,
        planted.forget_callers,
        planted.tell_of_later_events,
        planted.keep_lines,
        planted.end_attempts_silently,
    ],
    ids=lambda bug: bug.__name__,
)
def test_planted_bug_of_the_front_door_is_found(bug: StoreBug, tmp_path: Path, proof: Proof) -> None:
    found = find_arrivals(tmp_path, range(SEEDS), Bug(bug))
    FOUND[bug.__name__] = "not found" if found is None else f"seed {found[0].seed}"
    proof.record(
        "bugs of the front door found by its search",
        trials=len(FOUND),
        failures=list(FOUND.values()).count("not found"),
        unit="planted bugs of the front door",
        figures=FOUND,
        is_drawn=False,
    )
    assert found is not None, f"not found by {SEEDS} seeds"
    print(f"found by {found[0]}: {found[1]}")
