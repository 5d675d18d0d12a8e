"""Random histories with everything at once keep the promises, and so does every fork of them.

A failure names the seed: `checked(seed)`.
"""

from itertools import pairwise
from random import Random

import pytest

from broker.contract.agent_state import TERMINAL_STATES, is_settled
from broker.contract.events import ConversationCreated
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.effects import Rest
from controller_worker.loop.replay import replay
from tests.controller_parts import CID, check_snapshots
from tests.replay.mixed_history import MixedHistory

PARTS = 4
SEEDS = 40
MORE_SEEDS = 2_000
MORE_PARTS = 16
THINGS = (20, 60)
FORKS = 2


def checked(seed: int) -> None:
    """Let a history happen, end it, and fork it; check it all the way."""
    history = MixedHistory(seed)
    history.run()
    for _ in range(Random(seed).choice(THINGS)):
        history.happen()
        check(history)
    end(history)
    check_snapshots(history)
    divergence = replay(history.events).divergence
    assert divergence is None, "\n".join(divergence.to_diff())
    for at in Random(seed).sample(range(2, len(history.events) + 1), FORKS):
        fork = forked(history, at, seed)
        fork.come_to_rest()
        end(fork)


def check(history: MixedHistory) -> None:
    """At any time: the log alone gives the state of the conversation, and no action has two results."""
    assert find_violations(history.events, conversation_id=CID, is_over=False) == []
    states = history.states()
    assert all(one != other for one, other in pairwise(states)), states
    assert len(history.dispatched) == len(set(history.dispatched))
    if history.state.lifecycle.agent_state in TERMINAL_STATES:
        assert history.state.tools.pending == ()
    if history.wants() == Rest():
        stands = fold_status(history.events)
        assert (stands.state, stands.is_unanswered) == (history.state.lifecycle.agent_state, False)


def end(history: MixedHistory) -> None:
    """Let a user end it: it comes to rest, with every action settled."""
    history.say("and now end it")
    history.come_to_rest()
    assert is_settled(history.state.lifecycle.agent_state)
    assert find_violations(history.events, conversation_id=CID) == []
    check(history)


def forked(history: MixedHistory, at: int, seed: int) -> MixedHistory:
    """Start another conversation with its first events."""
    fork = MixedHistory(seed)  # the same agent
    assert isinstance(fork.events[0], ConversationCreated)
    fork.put(*history.events[2:at])
    return fork


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        checked_or_named(seed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(MORE_PARTS))
def test_more_random_histories(part: int) -> None:
    for seed in range(SEEDS + part, SEEDS + MORE_SEEDS, MORE_PARTS):
        checked_or_named(seed)


def checked_or_named(seed: int) -> None:
    try:
        checked(seed)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
