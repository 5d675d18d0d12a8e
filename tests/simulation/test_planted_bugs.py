"""Each bug that is planted is found: the checks would see what they are there for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from tests.simulation import planted
from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.checks import LATE, broken
from tests.simulation.faults import Fault
from tests.simulation.wire import Bug, StoreBug

SEEDS_WITHOUT_FAULTS = 20


@dataclass(frozen=True)
class Where:
    """Where a bug shows: after a fault at a command, or, without one, in some order of the processes."""

    fault: Fault | None = None
    command: str = ""
    controllers: int = 1
    finds: str = "I1"


def plans(where: Where, model: Mapping[str, str]) -> Iterator[Plan]:
    if where.fault is None:
        for seed in range(SEEDS_WITHOUT_FAULTS):
            yield Plan(seed, controllers=where.controllers)
        return
    passed = simulate(Plan(controllers=where.controllers), model).cluster.wire.passed
    for at, boundary in enumerate(passed, 1):
        if boundary.endswith(where.command):
            yield Plan(0, {at: where.fault}, controllers=where.controllers)


BUGS: dict[str, tuple[StoreBug | Bug, Where]] = {
    "an append under a stale token": (planted.accept_stale_tokens, Where(Fault.STOP, "deck_append", 2, "I6")),
    "a decision on an old log": (planted.accept_stale_decisions, Where(Fault.PAUSE, "deck_append", finds="I4")),
    "an owner's append that forgets its key": (planted.forget_owners_key, Where(Fault.CUT, "deck_append", finds="I9")),
    "a person's append that forgets its key": (
        planted.forget_producers_key(),
        Where(Fault.KILL, "deck_append", finds="I3"),
    ),
    "a second observation": (planted.forget_answers, Where(Fault.CUT, "deck_append", finds="I4")),
    "an append that rings nobody": (planted.ring_nobody, Where(Fault.KILL, "deck_append")),
    "an observation that leaves its entry unacknowledged": (
        planted.keep_entries,
        Where(Fault.KILL, "deck_append", finds="I13"),
    ),
    "an entry acknowledged before the append": (
        planted.acknowledge_before_append,
        Where(Fault.KILL, "after deck_claim_action", finds=LATE),
    ),
    "a release without a look at the news": (planted.release_blindly, Where(Fault.PAUSE, "deck_release")),
    "a ring's mark that is taken away after reading": (
        Bug(on_port=planted.clear_rung_after_reading),
        Where(finds=LATE),
    ),
    "a burial that rings nobody": (planted.bury_silently, Where(Fault.KILL, "deck_claim")),
    "a wait that nobody ends": (planted.forget_parked, Where(Fault.KILL, "deck_append")),
    "a snapshot that is off by one": (
        planted.leave_last_event_out_of_snapshots,
        Where(Fault.KILL, "deck_claim", finds="I7"),
    ),
}
"""What is planted, and where it shows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return environment(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, model: Mapping[str, str]) -> None:
    what, where = BUGS[bug]
    planted_bug = what if isinstance(what, Bug) else Bug(on_store=what)
    logging.disable(logging.CRITICAL)
    try:
        for tried, plan in enumerate(plans(where, model)):
            outcome = simulate(replace(plan, bug=planted_bug), model)
            if found := broken(outcome):
                print(f"{bug}: found by {plan} after {tried} others: {found}")
                assert any(line.startswith(f"{where.finds}:") for line in found), found
                return
    finally:
        logging.disable(logging.NOTSET)
    raise AssertionError(f"{bug}: not found")


def test_a_workspace_that_forgets_what_it_has_run_is_found(model: Mapping[str, str]) -> None:
    for plan in plans(Where(Fault.KILL, "before deck_append"), model):
        outcome = simulate(plan, model, node_remembers=False)
        if any(line.startswith("I5:") for line in broken(outcome)):
            return
    raise AssertionError("an action was run twice and nobody noticed")
