"""Every boundary of the canonical conversation, and many at once: the promises hold under every fault.

A kill, a broken connection, a pause and a stop at the boundaries one after the other; pairs; and seeds with up to
sixteen faults each among two controller workers, two tool workers and a user. `make test` runs the first part of
each, `make soak` the others and new seeds, and `make faults` many more.
A failure prints the plan that reproduces it: `broken(simulate(Plan(…), environment(folder)))`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from tests.controller_parts import traced
from tests.simulation.canonical import Person, Plan, simulate
from tests.simulation.checks import CRASHES_THAT_PARK, broken
from tests.simulation.errand import DELEGATES, broken_errand, sender
from tests.simulation.faults import OF_A_PROCESS, Fault
from tests.simulation.plans import random_pairs, random_plan

PARTS = 16
PAIRS = 112
SEEDS = 368
SEED_PARTS = 32
NEW_SEEDS = 400
MORE_PARTS = 4
MORE_PAIRS = 4_000
MORE_SEEDS = 3_000
MORE_ERRANDS = 400


def parts(count: int = PARTS) -> pytest.MarkDecorator:
    """Divide a test: `make test` runs the first part, `make soak` the others."""
    others = [pytest.param(part, marks=pytest.mark.soak) for part in range(1, count)]
    return pytest.mark.parametrize("part", [0, *others])


def boundaries(model: Mapping[str, str], *, controllers: int = 1, is_watched_to_the_end: bool = True) -> int:
    """Return how many boundaries the conversation has when nothing fails."""
    plan = Plan(controllers=controllers, is_watched_to_the_end=is_watched_to_the_end)
    outcome = simulate(plan, model)
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


@parts()
@pytest.mark.parametrize(
    ("fault", "step", "controllers"),
    [(Fault.KILL, 1, 1), (Fault.CUT, 4, 1), (Fault.PAUSE, 8, 1), (Fault.STOP, 8, 2)],
    ids=["kill", "broken connection", "pause", "takeover"],
)
def test_a_fault_at_boundaries(fault: Fault, step: int, controllers: int, part: int, model: Mapping[str, str]) -> None:
    size = boundaries(model, controllers=controllers)
    plans = [Plan(0, {at: fault}, controllers=controllers) for at in range(1, size + 1, step)[part::PARTS]]
    assert struck_in(plans, model) == len(plans)


@parts()
def test_two_faults(part: int, model: Mapping[str, str]) -> None:
    plans = random_pairs(PAIRS // PARTS, boundaries(model, is_watched_to_the_end=False), seed=part)
    assert struck_in(plans, model) > 1.8 * PAIRS / PARTS  # the second one may lie behind the end


@parts(SEED_PARTS)
def test_many_faults(part: int, model: Mapping[str, str]) -> None:
    struck = struck_in((random_plan(seed) for seed in range(part, SEEDS, SEED_PARTS)), model)
    print(f"seeds {part}, {part + SEED_PARTS} … below {SEEDS}: {struck} faults struck")
    assert struck > 8 * SEEDS / SEED_PARTS  # others lie behind the end: a tool worker asks for little


def boundary(process: str, name: str, faults: Mapping[int, Fault], model: Mapping[str, str]) -> int:
    """Return where a process reaches a boundary for the last time before the conversation ends, after these faults."""
    trace = simulate(Plan(0, faults, is_watched_to_the_end=False, is_traced=True), model).cluster.wire.trace
    return max(at for at, line in enumerate(trace, 1) if f" {process} {name} " in line)


@pytest.mark.parametrize(
    ("process", "stopped", "killed"),
    [
        ("controller-0", "after deck_now", "after deck_tick"),
        ("controller-0", "before deck_register", "before deck_claim"),
        ("tools-0", "before deck_now", "before deck_tick"),
        ("tools-0", "before deck_register", "before deck_claim_action"),
        ("tools-0", "after deck_register", "after XREADGROUP"),
    ],
)
def test_worker_stopped_in_a_beat_and_killed_is_missed_soon(
    process: str, stopped: str, killed: str, model: Mapping[str, str]
) -> None:
    """It has found the replies late that were there all the time, and must not take the store for slow."""
    faults = {boundary(process, stopped, {}, model): Fault.STOP}
    faults[boundary(process, killed, faults, model)] = Fault.KILL
    assert struck_in([Plan(0, faults)], model) == 2


@pytest.mark.soak
@pytest.mark.parametrize("part", range(MORE_PARTS))
def test_many_faults_of_new_seeds(part: int, model: Mapping[str, str], soak_seed: int) -> None:
    first = soak_seed * 1_000_000
    seeds = range(first + part, first + NEW_SEEDS, MORE_PARTS)
    struck = struck_in((random_plan(seed) for seed in seeds), model)
    print(f"seeds {seeds}: {struck} faults struck")


@pytest.fixture(scope="module")
def errand(tmp_path_factory: pytest.TempPathFactory) -> Person:
    return sender(tmp_path_factory.mktemp("errand"))


def unstruck_errands(plans: Iterable[Plan], errand: Person, *, expected: Sequence[str] = ()) -> list[str]:
    """Run plans of the other conversation and check each; return those whose faults did not strike, and where they are.

    Args:
        expected: the trace of the same conversation without faults.
    """
    unstruck = []
    for plan in plans:
        outcome = simulate(plan, {}, person=errand)
        assert broken_errand(outcome) == [], f"{plan} struck {outcome.cluster.wire.struck}"
        if not outcome.struck:
            trace = simulate(replace(plan, is_traced=True), {}, person=errand).cluster.wire.trace
            other = next((at for at, (one, two) in enumerate(zip(expected, trace, strict=False)) if one != two), 0)
            shown = range(max(0, other - 3), min(other + 2, len(trace), len(expected)))
            lines = [f"{at + 1}: {expected[at]} | {trace[at]}" for at in shown]
            unstruck.append("\n".join([f"{plan} passed {len(trace)} of {len(expected)} boundaries:", *lines]))
    return unstruck


def errand_trace(errand: Person, **options: int) -> list[str]:
    outcome = simulate(Plan(is_traced=True, **options), {}, person=errand)
    assert (broken_errand(outcome), len(outcome.others)) == ([], DELEGATES)
    return outcome.cluster.wire.trace


@parts()
def test_delegates_notes_and_checks_survive_kills_at_fourth_boundaries(part: int, errand: Person) -> None:
    expected = errand_trace(errand)
    plans = [Plan(0, {at: Fault.KILL}) for at in range(1, len(expected) + 1, 4)[part::PARTS]]
    assert unstruck_errands(plans, errand, expected=expected) == []


def test_three_lapsed_heartbeats_in_a_row_give_a_conversation_up(model: Mapping[str, str]) -> None:
    """The one controller worker is stopped for too long each time that it has taken the conversation up."""
    faults: dict[int, Fault] = {}
    while len(faults) < CRASHES_THAT_PARK:
        trace = simulate(Plan(0, faults, is_watched_to_the_end=False, is_traced=True), model).cluster.wire.trace
        behind = max(faults, default=0)
        reads = (at for at, line in enumerate(trace, 1) if at > behind and " controller-0 after HDEL " in line)
        faults[next(reads)] = Fault.STOP
    outcome = simulate(Plan(0, faults), model)
    assert broken(outcome) == []
    assert outcome.row is not None
    assert "crashed its worker 3 times" in outcome.row.fields["last_error"]
    assert outcome.cluster.wire.lapsed == {"controller-0": CRASHES_THAT_PARK}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MORE_PARTS))
@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_at_every_boundary(fault: Fault, part: int, model: Mapping[str, str]) -> None:
    controllers = 2 if fault is Fault.STOP else 1
    size = boundaries(model, controllers=controllers)
    plans = [Plan(0, {at: fault}, controllers=controllers) for at in range(1, size + 1)[part::MORE_PARTS]]
    assert struck_in(plans, model) == len(plans)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MORE_PARTS))
@pytest.mark.parametrize("fault", OF_A_PROCESS)
def test_delegates_notes_and_checks_survive_faults_at_every_boundary(fault: Fault, part: int, errand: Person) -> None:
    controllers = 2 if fault is Fault.STOP else 1
    expected = errand_trace(errand, controllers=controllers)
    plans = [Plan(0, {at: fault}, controllers=controllers) for at in range(1, len(expected) + 1)[part::MORE_PARTS]]
    assert unstruck_errands(plans, errand, expected=expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MORE_PARTS))
def test_delegates_notes_questions_and_checks_with_many_faults(part: int, errand: Person) -> None:
    unstruck_errands((random_plan(seed) for seed in range(part, MORE_ERRANDS, MORE_PARTS)), errand)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MORE_PARTS))
def test_more_pairs(part: int, model: Mapping[str, str]) -> None:
    number = MORE_PAIRS // MORE_PARTS
    plans = random_pairs(number, boundaries(model, is_watched_to_the_end=False), seed=1_000 + part)
    assert struck_in(plans, model) > 1.9 * number


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MORE_PARTS))
def test_more_faults(part: int, model: Mapping[str, str]) -> None:
    struck_in((random_plan(seed) for seed in range(SEEDS + part, SEEDS + MORE_SEEDS, MORE_PARTS)), model)
