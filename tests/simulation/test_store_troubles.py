"""The store is away, refuses writes, loses its tail, is far away, or no clock is right: every conversation continues.

A failure prints the chat that reproduces it: `broken_chat(simulate_chat(Chat(…), folder))`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.chat import Chat, broken_chat, simulate_chat
from tests.simulation.faults import Fault
from tests.simulation.troubles import Kind, Trouble

SEEDS = 2
MORE_SEEDS = 150
HOUR = 3_600.0
PROCESSES = ("controller-0", "controller-1", "tools-0", "tools-1", "person of chat-0")
LAST_AT = 3.0
"""By when a chat without troubles is nearly over."""


def restarted(random: Random) -> Chat:
    """The store is away, for a moment or for longer than any heartbeat."""
    trouble = Trouble(Kind.RESTART, random.uniform(0, LAST_AT), random.choice([0.2, 1.0, 20.0]))
    return Chat(troubles=[trouble])


def refusing(random: Random) -> Chat:
    """The store's disk is full for a while."""
    return Chat(troubles=[Trouble(Kind.REFUSAL, random.uniform(0, LAST_AT), random.choice([0.3, 5.0]))])


def losing(random: Random) -> Chat:
    """The store comes back without the last moments."""
    at = random.uniform(0.2, LAST_AT)
    lost_seconds = random.uniform(0.05, min(1.0, at - 0.1))
    return Chat(troubles=[Trouble(Kind.LOST_TAIL, at, random.choice([0.3, 3.0]), lost_seconds)], limit_seconds=30.0)


def far_away(random: Random) -> Chat:
    """A round trip takes up to two seconds."""
    return Chat(latency_seconds=random.choice([0.25, 0.5, 1.0]), rounds=2, has_bell=False, limit_seconds=900.0)


def mistimed(random: Random) -> Chat:
    """All clocks are an hour off, and the store's jumps; a worker dies."""
    clocks = {name: random.choice([-HOUR, 0.0, HOUR]) for name in PROCESSES}
    jumps = [Trouble(Kind.CLOCK, random.uniform(0, LAST_AT), random.choice([-HOUR, HOUR])) for _ in range(2)]
    return Chat(faults={random.randint(100, 900): Fault.KILL}, clocks_ahead=clocks, troubles=jumps)


TROUBLES = [restarted, refusing, losing, far_away, mistimed]


def check(drawn: Callable[[Random], Chat], seed: int, folder: Path) -> None:
    chat = replace(drawn(Random(seed)), seed=seed)
    outcome = simulate_chat(chat, folder)
    found = broken_chat(outcome)
    assert not found, f"{found}: {chat} struck {outcome.cluster.wire.struck}"
    if not chat.faults:
        assert outcome.takeovers == 0, f"{chat}: a living worker was buried"


@pytest.mark.parametrize("drawn", TROUBLES)
def test_every_conversation_continues(drawn: Callable[[Random], Chat], tmp_path: Path) -> None:
    for seed in range(SEEDS):
        check(drawn, seed, tmp_path)


def test_log_losing_its_tail_before_reading_is_taken_up(tmp_path: Path) -> None:
    check(losing, 27, tmp_path)


@pytest.mark.parametrize("seed", [160, 252])
def test_an_action_whose_number_a_lost_action_had_is_answered(seed: int, tmp_path: Path) -> None:
    """A tool worker was about to claim the lost action when the store went away."""
    check(losing, seed, tmp_path)


def test_conversation_returned_to_its_former_owner_is_taken_up(tmp_path: Path) -> None:
    """The same worker had given it up and claimed it again; the older store knows the first claim."""
    check(losing, 1161, tmp_path)


@pytest.mark.parametrize("seed", [282, 407, 1073])
def test_a_person_says_what_was_lost_again(seed: int, tmp_path: Path) -> None:
    """A message without the one before it; the very same events again; a message that no other process has seen."""
    check(losing, seed, tmp_path)


def test_store_is_fast_again_after_overlapping_slow_spells(tmp_path: Path) -> None:
    outcome = simulate(Plan(faults={20: Fault.SLOW, 22: Fault.SLOW}), environment(tmp_path))
    assert [fault for _, fault, _, _ in outcome.cluster.wire.struck] == [Fault.SLOW, Fault.SLOW]
    assert outcome.cluster.wire.latency_seconds == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("drawn", TROUBLES)
def test_every_conversation_continues_many_times(drawn: Callable[[Random], Chat], tmp_path: Path) -> None:
    for seed in range(SEEDS, SEEDS + MORE_SEEDS):
        check(drawn, seed, tmp_path)
