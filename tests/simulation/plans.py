"""Plans drawn from a seed: pairs of faults, and many."""

from collections.abc import Iterator
from random import Random

from tests.simulation.canonical import Plan
from tests.simulation.faults import OF_A_PROCESS, Fault

MAX_FAULTS = 16
LAST_FAULT_AT = 600
"""Faults stop at some time, and only after that is everything sure to come to its end."""


def random_pairs(number: int, size: int, seed: int) -> Iterator[Plan]:
    """Two faults each, in runs that end with the conversation.

    Args:
        size: how many boundaries such a run has when nothing fails. Faults planned after them seldom strike.
    """
    random = Random(seed)
    for _ in range(number):
        faults = {at: random.choice(OF_A_PROCESS) for at in random.sample(range(1, size + 1), 2)}
        yield Plan(0, faults, is_watched_to_the_end=False)


def random_plan(seed: int) -> Plan:
    """Many faults, rarely or often, among one or two workers of each kind."""
    random = Random(seed)
    distance = random.choice([20, 40, 80])
    faults: dict[int, Fault] = {}
    at = 0
    while len(faults) < MAX_FAULTS and (at := at + random.randint(1, 2 * distance)) <= LAST_FAULT_AT:
        faults[at] = random.choice(OF_A_PROCESS)
    return Plan(seed, faults, controllers=random.choice([1, 2]), tools=random.choice([1, 2]))
