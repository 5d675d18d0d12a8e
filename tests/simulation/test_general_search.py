"""The general search finds each planted bug within some seeds, and nothing without one.

A failure prints the seed that repeats it: `Search(folder).run(seed)`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.proof import Proof
from tests.simulation import planted
from tests.simulation.general import Search
from tests.simulation.simulated_host import JournalWithoutResults, JournalWithoutStarts
from tests.simulation.wire import Bug, StoreBug
from tool_worker.host.journal import Journal

SEEDS = 400
"""At most, to find a bug. Most are found by 40; a change of the product moves them."""
CLEAN_SEEDS = 40
FEW_SEEDS = 4
PARTS = 4

BUGS: list[StoreBug] = [
    planted.forget_owners_key,
    planted.ring_nobody,
    planted.say_silently,
    planted.release_blindly,
    planted.keep_owner_at_release,
    planted.keep_rung_at_release,
    planted.renew_no_token,
    planted.skip_an_id,
    planted.leave_index_behind,
    planted.keep_entries,
    planted.forget_answers,
    planted.acknowledge_before_append,
    planted.forget_parked,
    planted.park_for_longer,
    planted.top_up_silently,
    planted.charge_twice,
    planted.bury_silently,
    planted.leave_last_event_out_of_snapshots,
]
MADE_FOR_EACH_RUN: list[Callable[[], StoreBug]] = [planted.forget_producers_key, planted.confirm_unwritten]
"""Those that count."""


FOUND: dict[str, str] = {}
"""How each bug was found, by those tests that have run."""


def check_found(name: str, search: Search, proof: Proof) -> None:
    found = search.find(range(SEEDS))
    FOUND[name] = "not found" if found is None else f"seed {found[0]}: {found[1][0].split(':')[0]}"
    proof.record(
        "bugs found by the general search",
        trials=len(FOUND),
        failures=list(FOUND.values()).count("not found"),
        unit="planted bugs that the general search looked for",
        figures=FOUND,
        is_drawn=False,
    )
    assert found is not None, f"not found by {SEEDS} seeds"
    print(f"found by seed {found[0]}: {found[1]}")


def test_nothing_is_found_without_a_bug(tmp_path: Path) -> None:
    assert Search(tmp_path).find(range(FEW_SEEDS)) is None


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: StoreBug, tmp_path: Path, proof: Proof) -> None:
    check_found(bug.__name__, Search(tmp_path, Bug(bug)), proof)


@pytest.mark.slow
@pytest.mark.parametrize("make", MADE_FOR_EACH_RUN, ids=lambda make: make.__name__)
def test_planted_bug_that_counts_is_found(make: Callable[[], StoreBug], tmp_path: Path, proof: Proof) -> None:
    check_found(make.__name__, Search(tmp_path, Bug(make())), proof)


@pytest.mark.slow
@pytest.mark.parametrize("journal", [JournalWithoutResults, JournalWithoutStarts])
def test_planted_bug_of_the_host_is_found(journal: type[Journal], tmp_path: Path, proof: Proof) -> None:
    check_found(journal.__name__, Search(tmp_path, journal=journal), proof)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found_without_a_bug_by_more_seeds(part: int, tmp_path: Path) -> None:
    assert Search(tmp_path).find(range(part, CLEAN_SEEDS, PARTS)) is None
