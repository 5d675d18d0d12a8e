"""The simulation is able to fail: each guard of the store's functions that is switched off is found out.

Guards that another one backs up (who holds a running action, what a dead worker gives back) cannot be found this way:
without them nothing breaks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from broker.store.store import functions_code
from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.checks import broken
from tests.simulation.faults import Fault

KEY_OF_APPEND = "remember = guard == 'tool' and 'o:' .. b or 'p:' .. a"


def faults_at(fault: Fault, name: str, model: Mapping[str, str], controllers: int = 1) -> Iterator[Plan]:
    """Plans with one fault each, at every boundary of a command."""
    passed = simulate(Plan(controllers=controllers), model).cluster.wire.passed
    for at, boundary in enumerate(passed, 1):
        if boundary.endswith(name):
            yield Plan(0, {at: fault}, controllers=controllers)


BUGS: dict[str, tuple[str, str, tuple[Any, ...], str]] = {
    "an append that is not fenced": (
        "    if owner ~= a or token ~= b then return {'fenced'} end\n",
        "",
        (Fault.STOP, "deck_append", 2),
        "I4",
    ),
    "an owner's append that forgets its key": (
        "    if append_key == b .. ':' .. c .. ':' .. flags then return written_before(append_ids) end\n",
        "",
        (Fault.CUT, "deck_append"),
        "I9",
    ),
    "a decision on an old log": (
        "    if tonumber(c) ~= last then return {'conflict', last} end\n",
        "",
        (Fault.PAUSE, "deck_append"),
        "I4",
    ),
    "a person's append that forgets its key": (
        KEY_OF_APPEND,
        KEY_OF_APPEND + " .. now",
        (Fault.KILL, "deck_append"),
        "I3",
    ),
    "a second observation": (
        KEY_OF_APPEND,
        KEY_OF_APPEND.replace("'o:' .. b", "'O:' .. b .. now"),
        (Fault.CUT, "deck_append"),
        "I4",
    ),
    "an append that rings nobody": (
        "if flags ~= 'quiet' then notify_unless(notified, owner, shard, meta, cid, now) end",
        "",
        (Fault.KILL, "deck_append"),
        "I1",
    ),
    "a burial that tells nobody": (
        "  redis.call('HDEL', meta, 'owner')\n  notify_again(shard, meta, cid, now)",
        "  redis.call('HDEL', meta, 'owner')",
        (Fault.KILL, "deck_claim"),
        "I1",
    ),
    "a release without a look at the news": (
        "  if last ~= seen then return {'news', tonumber(last)} end\n",
        "",
        (Fault.PAUSE, "deck_release"),
        "I1",
    ),
    "an observation that leaves its entry unacknowledged": (
        "    if guard == 'tool' and c ~= '' then acknowledge(c) end\n    if flags",
        "    if flags",
        (Fault.KILL, "deck_append"),
        "I13",
    ),
    "a wait that nobody ends": (
        "    attempt(shard, shard .. ':parked', cid, wake_parked, shard, cid, now)\n",
        "",
        (Fault.KILL, "deck_append"),
        "I1",
    ),
}
"""What is wrong: the text of the functions, what stands in its place, the fault and the command where it shows, what is broken then."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return environment(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, model: Mapping[str, str]) -> None:
    right, wrong, where, invariant = BUGS[bug]
    assert functions_code().count(right) == 1, "the guard is written otherwise now: plant the bug anew"
    logging.disable(logging.CRITICAL)
    try:
        for tried, plan in enumerate(faults_at(*where[:2], model, *where[2:])):
            outcome = simulate(plan.with_functions(lambda code: code.replace(right, wrong)), model)
            if found := broken(outcome):
                print(f"{bug}: found by {plan} after {tried} others: {found}")
                assert any(line.startswith(f"{invariant}:") for line in found), found
                return
    finally:
        logging.disable(logging.NOTSET)
    raise AssertionError(f"{bug}: not found")


def test_a_workspace_that_forgets_what_it_has_run_is_found(model: Mapping[str, str]) -> None:
    for plan in faults_at(Fault.KILL, "before deck_append", model):
        outcome = simulate(plan, model, node_remembers=False)
        if any(line.startswith("I5:") for line in broken(outcome)):
            return
    raise AssertionError("an action was run twice and nobody noticed")
