"""Every boundary of the canonical conversation, and many at once: whatever fails there, the promises hold.

The points of one run of these tests: a kill, a broken connection,
a pause and a stop at the boundaries one after the other; pairs; and seeds with up to
sixteen faults each among two controller workers, two tool workers and a person. `make faults` runs many more.
A failure prints the plan that reproduces it: `broken(simulate(Plan(…), environment(folder)))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.controller_parts import traced
from tests.simulation.canonical import Person, Plan, environment, simulate
from tests.simulation.checks import broken
from tests.simulation.errand import DELEGATES, broken_errand, sender
from tests.simulation.faults import Fault
from tests.simulation.plans import random_pairs, random_plan

PARTS = 2
PAIRS = 24
SEEDS = 40
KILLS_APART = 6
CUTS_APART = 8
STOPS_APART = 16
ERRAND_KILLS_APART = 32
"""How many boundaries lie between two faults; the slow tests leave none out."""
MORE_PAIRS = 4_000
MORE_SEEDS = 3_000
MORE_ERRANDS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return environment(tmp_path_factory.mktemp("model"))


def boundaries(model: Mapping[str, str], **options: int) -> int:
    """Return how many boundaries the conversation has when nothing fails."""
    outcome = simulate(Plan(**options), model)
    assert broken(outcome) == []
    return len(outcome.cluster.wire.passed)


def struck_in(plans: Iterable[Plan], model: Mapping[str, str]) -> int:
    """Run plans and check each; return how many faults struck."""
    struck = 0
    for plan in plans:
        outcome = simulate(plan, model)
        struck += outcome.struck
        assert broken(outcome) == [], f"{plan} struck {outcome.cluster.wire.struck}"
    return struck


def test_the_canonical_conversation(model: Mapping[str, str]) -> None:
    outcome = simulate(Plan(), model)
    assert broken(outcome) == []
    assert [traced(event) for event in outcome.events] == [
        "1 Created(environment)",
        "2 Message(user)",
        "3 SystemMessage(agent)",
        "4 Recall(user) workspace_context",
        "5 SC running",
        "6 RecallObs(environment, cause 4)",
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 CmdRun(agent)",
        "10 CmdOutput(agent, cause 8)",
        "11 Message(user)",
        "12 Recall(user) knowledge",
        "13 NullObs(environment, cause 12)",
        "14 CmdOutput(agent, cause 9)",
        "15 ModelCallFailed(environment)",
        "16 SC rate_limited",
        "17 SC running",
        "18 ModelReply(agent)",
        "19 Think(agent)",
        "20 ThinkObs(agent, cause 19)",
        "21 CmdRun(agent)",
        "22 ChangeState(user) paused",
        "23 SC paused",
        "24 ChangeState(user) running",
        "25 SC running",
        "26 CmdOutput(agent, cause 21)",
        "27 ModelReply(agent)",
        "28 Finish(agent)",
        "29 SC finished",
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_every_sixth_boundary(part: int, model: Mapping[str, str]) -> None:
    size = boundaries(model)
    plans = [Plan(0, {at: Fault.KILL}) for at in range(1, size + 1, KILLS_APART)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_broken_connection_at_every_eighth_boundary(part: int, model: Mapping[str, str]) -> None:
    size = boundaries(model)
    plans = [Plan(0, {at: Fault.CUT}) for at in range(1, size + 1, CUTS_APART)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_pause_at_every_sixteenth_boundary(part: int, model: Mapping[str, str]) -> None:
    size = boundaries(model)
    plans = [Plan(0, {at: Fault.PAUSE}) for at in range(1, size + 1, STOPS_APART)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_worker_stopped_at_every_sixteenth_boundary_while_another_takes_over(
    part: int, model: Mapping[str, str]
) -> None:
    size = boundaries(model, controllers=2)
    plans = [Plan(0, {at: Fault.STOP}, controllers=2) for at in range(1, size + 1, STOPS_APART)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.parametrize("part", range(PARTS))
def test_two_faults(part: int, model: Mapping[str, str]) -> None:
    plans = random_pairs(PAIRS // PARTS, boundaries(model), seed=part)
    assert struck_in(plans, model) > 1.5 * PAIRS / PARTS


@pytest.mark.parametrize("part", range(PARTS))
def test_many_faults(part: int, model: Mapping[str, str]) -> None:
    struck = struck_in((random_plan(seed) for seed in range(part, SEEDS, PARTS)), model)
    print(f"seeds {part}, {part + PARTS} … below {SEEDS}: {struck} faults struck")
    assert struck > 10 * SEEDS / PARTS


@pytest.fixture(scope="module")
def errand(tmp_path_factory: pytest.TempPathFactory) -> Person:
    return sender(tmp_path_factory.mktemp("errand"))


def unstruck_errands(plans: Iterable[Plan], errand: Person, *, expected: Sequence[str] = ()) -> list[str]:
    """Run plans of the other conversation and check each; return those whose faults did not strike, and where they are.

    Args:
        expected: the boundaries of the same conversation without faults.
    """
    unstruck = []
    for plan in plans:
        outcome = simulate(plan, {}, person=errand)
        wire = outcome.cluster.wire
        assert broken_errand(outcome) == [], f"{plan} struck {wire.struck}"
        if not wire.struck:
            pairs = zip(expected, wire.passed, strict=False)
            other = next((f"{at}: {one}, not {two}" for at, (two, one) in enumerate(pairs, 1) if one != two), "nowhere")
            unstruck.append(
                f"{plan} passed {len(wire.passed)} of {len(expected)} boundaries; other than expected {other}"
            )
    return unstruck


def errand_boundaries(errand: Person, **options: int) -> list[str]:
    outcome = simulate(Plan(**options), {}, person=errand)
    assert (broken_errand(outcome), len(outcome.others)) == ([], DELEGATES)
    return outcome.cluster.wire.passed


@pytest.mark.parametrize("part", range(PARTS))
def test_delegates_notes_questions_and_checks_with_kills(part: int, errand: Person) -> None:
    expected = errand_boundaries(errand)
    plans = [Plan(0, {at: Fault.KILL}) for at in range(1, len(expected) + 1, ERRAND_KILLS_APART)[part::PARTS]]
    assert unstruck_errands(plans, errand, expected=expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_at_every_boundary(fault: Fault, part: int, model: Mapping[str, str]) -> None:
    controllers = 2 if fault is Fault.STOP else 1
    size = boundaries(model, controllers=controllers)
    plans = [Plan(0, {at: fault}, controllers=controllers) for at in range(1, size + 1)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", list(Fault))
def test_delegates_notes_questions_and_checks_with_a_fault_at_every_boundary(
    fault: Fault, part: int, errand: Person
) -> None:
    controllers = 2 if fault is Fault.STOP else 1
    expected = errand_boundaries(errand, controllers=controllers)
    plans = [Plan(0, {at: fault}, controllers=controllers) for at in range(1, len(expected) + 1)[part::PARTS]]
    assert unstruck_errands(plans, errand, expected=expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_delegates_notes_questions_and_checks_with_many_faults(part: int, errand: Person) -> None:
    unstruck_errands((random_plan(seed) for seed in range(part, MORE_ERRANDS, PARTS)), errand)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_more_pairs(part: int, model: Mapping[str, str]) -> None:
    struck_in(random_pairs(MORE_PAIRS // PARTS, boundaries(model), seed=1_000 + part), model)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_more_faults(part: int, model: Mapping[str, str]) -> None:
    struck_in((random_plan(seed) for seed in range(SEEDS + part, SEEDS + MORE_SEEDS, PARTS)), model)
