"""Permits of conversations that change hands, and what a permit costs that is asked for again: on each kind of store."""

from __future__ import annotations

import time

import pytest

from broker.limits.governor import CallOutcome
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock
from tests.broker_parts import pass_time
from tests.conformance.test_governor import Callers

FORMER, LATTER = "1000", "2000"
"""Tokens of two owners of a conversation, one after the other."""


async def in_flight(callers: Callers) -> int:
    level = f"{callers.store.all_shards[0].quota(callers.pool.name)}:level:{callers.pool.quotas[0].key}"
    return int(await callers.store.connection.call("HGET", level, "in_flight"))


async def left(callers: Callers) -> float:
    level = f"{callers.store.all_shards[0].quota(callers.pool.name)}:level:{callers.pool.quotas[0].key}"
    return float(await callers.store.connection.call("HGET", level, "input"))


@pytest.mark.parametrize("worker", ["w1", "w2"])
async def test_a_former_owner_takes_no_permit_from_the_latter(store: Store, worker: str) -> None:
    callers = await Callers.limited(store, concurrency=2, input_tokens_per_minute=60_000)
    assert await callers.may_call("aaa", worker="w1", fence=FORMER, tokens=(100, 0))
    since = time.monotonic()
    assert await callers.may_call("aaa", worker=worker, fence=LATTER, tokens=(200, 0))
    before = await left(callers)
    # The former owner was taken for dead, and continues.
    assert not await callers.may_call("aaa", worker="w1", fence=FORMER, tokens=(600, 0))
    await callers.settle("aaa", CallOutcome.UNSENT, worker="w1", fence=FORMER)
    await callers.governor.withdraw(callers.pool, "aaa", "w1", fence=FORMER)
    assert await in_flight(callers) == 1
    filled = 1_000 * (time.monotonic() - since)  # the bucket fills by one a millisecond
    assert before <= await left(callers) <= before + filled + 2  # whole ms at both ends
    await callers.settle("aaa", worker=worker, fence=LATTER, input_tokens=200)
    assert await in_flight(callers) == 0


async def test_former_owner_takes_no_queue_place_from_the_next(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("first", worker="w2")
    assert not await callers.may_call("aaa", worker="w1", fence=FORMER)
    assert not await callers.may_call("aaa", worker="w2", fence=LATTER)
    await callers.governor.withdraw(callers.pool, "aaa", "w1", fence=FORMER)
    await callers.settle("first", worker="w2")  # calls aaa
    await callers.governor.withdraw(callers.pool, "aaa", "w1", fence=FORMER)
    assert not await callers.may_call("aaa", worker="w1", fence=FORMER)
    assert not await callers.may_call("bbb", worker="w1")
    assert await callers.may_call("aaa", worker="w2", fence=LATTER)


@pytest.mark.parametrize("asks", [(600, 700), (600, 500), (600, 600)], ids=["more", "less", "the-same"])
async def test_permit_requested_again_with_another_size_costs_the_difference(
    memory_store: Store, clock: ManualClock, asks: tuple[int, int]
) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    assert await callers.may_call("aaa", worker="w1", tokens=(asks[0], 0))
    await pass_time(memory_store, clock, 30.0, worker_id="w1")  # the bucket is full again
    assert await callers.may_call("aaa", worker="w1", tokens=(asks[1], 0))
    assert await left(callers) == min(1_000.0, 1_000.0 - (asks[1] - asks[0]))
    assert await in_flight(callers) == 1


async def test_what_was_called_and_has_grown_costs_the_difference(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000, concurrency=1)
    assert await callers.may_call("first", worker="w1")
    assert not await callers.may_call("grows", worker="w1", tokens=(600, 0))
    await callers.settle("first", worker="w1")  # calls `grows`, for 600
    await pass_time(memory_store, clock, 2.0, worker_id="w1")
    assert await callers.may_call("grows", worker="w1", tokens=(700, 0))
    assert await left(callers) == pytest.approx(900.0)
