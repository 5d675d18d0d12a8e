"""While nothing is due in a shard, workers take turns: a beat leaves its work out if another's has just found none."""

from __future__ import annotations

from broker.coordination.membership import QUIET_HEARTBEAT_SECONDS, Membership
from broker.store.store import open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from tests.broker_parts import CID


async def test_beat_after_a_quiet_one_leaves_its_work() -> None:
    clock = ManualClock()
    store = await open_store(MemoryConnection(MemoryServer(clock)), clock=clock)
    first, second = (Membership(store, f"jobs-{number}", "jobs") for number in (1, 2))
    for member in (first, second):
        await member.register()
    found = await first.beat(0)
    assert found is not None
    await store.call("ZADD", store.known_keys(CID).shard.parked, 1, CID)
    found = await second.beat(0)
    assert found is not None
    assert found.woken_count == 0
    clock.advance(QUIET_HEARTBEAT_SECONDS / 2)
    found = await second.beat(0)
    assert found is not None
    assert found.woken_count == 1


async def test_worker_without_progress_beats_less_often_and_lives_as_long() -> None:
    clock = ManualClock()
    store = await open_store(MemoryConnection(MemoryServer(clock)), clock=clock)
    member = Membership(store, "jobs-1", "jobs")
    await member.register()
    usual = member.ttl_seconds
    for _ in range(2):
        await member.beat(0)
    assert member.ttl_seconds == usual
    assert usual > 3 * QUIET_HEARTBEAT_SECONDS
