"""The functions under random steps: the store in memory does what a real one does, and nothing is ever lost."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from tests.conformance.test_double import _timeless
from tests.exploring import examples
from tests.protocol_world import CONTROLLERS, CONVERSATIONS, NODES, SLOTS, Step, World
from tests.stores import RealServer, emptied

conversations = st.sampled_from(CONVERSATIONS)
controllers = st.sampled_from(CONTROLLERS)
tools = st.sampled_from(tuple(NODES))
slots = st.sampled_from(SLOTS)
picks = st.integers(0, 3)


def _step(verb: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(verb), *arguments)


steps = st.one_of(
    _step("begin", conversations),
    _step("say", conversations, st.sampled_from(["k1", "k2", "k3"])),
    _step("close", conversations),
    _step("requeue", conversations),
    _step("restart", slots),
    _step("lapse", slots),
    _step("tick", slots, st.sampled_from([0, 3_600_000])),
    _step("leave", slots),
    _step("hear", controllers),
    _step("answer", picks),
    _step("answer", picks),
    _step("claim", controllers, conversations),
    _step("decide", picks, st.integers(0, 3), st.booleans()),
    _step("decide", picks, st.just(1), st.just(False)),
    _step("settle_as_owner", picks),
    _step("release", picks, st.sampled_from([None, 1])),
    _step("mark", picks),
    _step("dispatch", picks),
    _step("take", tools),
    _step("take", tools),
    _step("run", picks, st.booleans()),
    _step("run", picks, st.just(False)),
    _step("copy", st.sampled_from(["pool:bash", "node:n1", "node:n2"])),
)
losses = _step("lose", st.sampled_from(["ready", "pool:bash", "node:n1", "node:n2"]))

BEGINNING: list[Step] = [("begin", CONVERSATIONS[0]), ("claim", "c1", CONVERSATIONS[0]), ("decide", 0, 2, False)]


async def _world(store: Store, sequence: list[Step]) -> tuple[World, list[Any]]:
    world = World(store)
    await world.start()
    return world, [await world.do(step) for step in [*BEGINNING, *sequence]]


async def _lose_nothing(sequence: list[Step], *, dispatches: bool) -> None:
    world, _ = await _world(await open_store(MemoryConnection()), sequence)
    await world.settle(dispatches=dispatches)
    await world.check()


PARKED_AND_CLOSED: list[Step] = [("close", CONVERSATIONS[0]), ("hear", "c1"), ("release", 0, 1)]


@settings(max_examples=examples(30))
@example(sequence=PARKED_AND_CLOSED)
@given(sequence=st.lists(steps, max_size=40))
def test_crashes_zombies_and_copies_lose_nothing(sequence: list[Step]) -> None:
    asyncio.run(_lose_nothing(sequence, dispatches=False))


@settings(max_examples=examples(30))
@given(sequence=st.lists(st.one_of(steps, losses), max_size=40))
def test_lost_entries_are_found_by_asking(sequence: list[Step]) -> None:
    asyncio.run(_lose_nothing(sequence, dispatches=True))


async def _compare(server: RealServer, sequence: list[Step]) -> None:
    real = await open_store(await emptied(server.url))
    try:
        expected_world, expected = await _world(real, sequence)
        world, found = await _world(await open_store(MemoryConnection()), sequence)
        for step, one, other in zip([*BEGINNING, *sequence], expected, found, strict=True):
            assert _timeless(other) == _timeless(one), step
        await expected_world.settle(dispatches=True)
        await world.settle(dispatches=True)
        for cid in CONVERSATIONS:
            key = world.store.keys(cid).events
            one, other = [len(await side.connection.call("XRANGE", key, "-", "+")) for side in (real, world.store)]
            assert one == other
    finally:
        await real.aclose()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(st.one_of(steps, losses), max_size=40))
def test_the_store_in_memory_does_what_a_real_one_does(valkey_server: RealServer, sequence: list[Step]) -> None:
    asyncio.run(_compare(valkey_server, sequence))
