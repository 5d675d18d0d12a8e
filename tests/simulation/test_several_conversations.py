"""Several conversations at once, with latencies on every wire and superfluous wake-ups: no wait is long under faults.

A failure prints the chat that reproduces it: `broken_chat(simulate_chat(Chat(…), folder))`.
"""

from pathlib import Path
from random import Random

import pytest

from tests.simulation.chat import Chat, broken_chat, simulate_chat
from tests.simulation.faults import OF_A_PROCESS

SEEDS = 6
MORE_SEEDS = 1_000
PARTS = 4
FAULTS = 6
LAST_FAULT_AT = 900


def random_chat(seed: int) -> Chat:
    """Some faults among two workers of each kind and three users."""
    random = Random(seed)
    faults = {random.randint(1, LAST_FAULT_AT): random.choice(OF_A_PROCESS) for _ in range(FAULTS)}
    return Chat(seed, faults, has_bell=random.random() < 0.5)


def check(chat: Chat, folder: Path) -> None:
    outcome = simulate_chat(chat, folder)
    assert broken_chat(outcome) == [], f"{chat} struck {outcome.cluster.wire.struck}"


@pytest.mark.parametrize("has_bell", [True, False])
def test_without_faults(has_bell: bool, tmp_path: Path) -> None:
    for seed in range(SEEDS // 2):
        check(Chat(seed, has_bell=has_bell), tmp_path)


def test_with_some_faults(tmp_path: Path) -> None:
    for seed in range(SEEDS):
        check(random_chat(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_with_some_faults_many_times(part: int, tmp_path: Path) -> None:
    for seed in range(SEEDS + part, SEEDS + MORE_SEEDS, PARTS):
        check(random_chat(seed), tmp_path)
