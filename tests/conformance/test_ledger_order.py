"""The order in which a budget with little room serves conversations: as they come, none twice before another once."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract.fencing import Ownership
from broker.limits.ledger import Ledger, list_accounts
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from tests.broker_parts import begin_unnotified, enter, newly_notified, pass_time
from tests.exploring import examples

TENANT, EXPERIMENT = "tenant:acme", "experiment:acme/swe"
PATIENCE_SECONDS = 3.0


async def reserve(ledger: Ledger, cid: str, worst: float, total: float = 0.0, *, experiment: str = "swe") -> bool:
    chain = list_accounts(cid, tenant="acme", experiment=experiment)
    return await ledger.reserve(Ownership(cid, "w1", "1"), chain, worst_usd=worst, total_usd=total) is None


async def settle(ledger: Ledger, cid: str, total: float, *, experiment: str = "swe") -> None:
    chain = list_accounts(cid, tenant="acme", experiment=experiment)
    await ledger.settle(Ownership(cid, "w1", "1"), chain, total_usd=total)


async def made(store: Store, *ids: str, limit: float = 1.0) -> Ledger:
    """A ledger with a limit for the tenant, and conversations without a notification."""
    await enter(store, "w1")
    ledger = Ledger(store)
    await ledger.set_limit(TENANT, limit)
    await begin_unnotified(store, *ids)
    return ledger


async def let_time_pass(store: Store, cid: str, account: str = TENANT) -> None:
    """Move the last wake-up of a conversation, and the last sweep, far into the past."""
    shard = store.all_shards[0]
    key = f"{shard.budget(account)}:wanted"
    amount, at, wakes = (await store.connection.call("HGET", key, cid)).split()
    assert int(wakes) > 0
    assert int(at) > 0
    await store.connection.call("HSET", key, cid, b"%s 1 %s" % (amount, wakes))
    await store.connection.call("DEL", f"{shard.root}:ledger:swept")


async def test_latest_caller_queues_behind_waiting_ones(store: Store) -> None:
    ledger = await made(store, "bbb", "ccc")
    assert await reserve(ledger, "aaa", 0.6)
    assert not await reserve(ledger, "bbb", 0.6)
    assert not await reserve(ledger, "ccc", 0.6)
    await settle(ledger, "aaa", 0.1)
    assert await newly_notified(store) == ["bbb"]
    assert not await reserve(ledger, "aaa", 0.6, 0.1)
    assert not await reserve(ledger, "ccc", 0.6)
    assert await reserve(ledger, "bbb", 0.6)
    await settle(ledger, "bbb", 0.1)
    assert await newly_notified(store) == ["ccc"]


async def test_budget_left_beside_waiters_is_open_to_newcomers(store: Store) -> None:
    ledger = await made(store, "bbb")
    assert await reserve(ledger, "aaa", 0.9)
    assert not await reserve(ledger, "bbb", 0.5)
    await settle(ledger, "aaa", 0.1)
    assert not await reserve(ledger, "ccc", 0.5)
    await ledger.withdraw("ccc", list_accounts("ccc", tenant="acme", experiment="swe"))
    assert await reserve(ledger, "ccc", 0.3)
    assert await reserve(ledger, "bbb", 0.5)


async def test_a_small_call_does_not_overtake_a_large_one(store: Store) -> None:
    ledger = await made(store, "big", "bbb")
    assert await reserve(ledger, "aaa", 0.3)
    assert await reserve(ledger, "bbb", 0.3)
    assert not await reserve(ledger, "big", 0.9)
    await settle(ledger, "aaa", 0.1)
    assert not await reserve(ledger, "aaa", 0.3, 0.1)
    assert await newly_notified(store) == []
    await settle(ledger, "bbb", 0.1)
    assert await newly_notified(store) == ["big"]
    assert await reserve(ledger, "big", 0.9)  # the only running one


async def test_absent_woken_call_blocks_no_other(store: Store) -> None:
    ledger = await made(store, "bbb", "ccc")
    assert await reserve(ledger, "aaa", 0.6)
    assert not await reserve(ledger, "bbb", 0.6)
    assert not await reserve(ledger, "ccc", 0.6)
    await settle(ledger, "aaa", 0.1)
    assert await newly_notified(store) == ["bbb"]
    await ledger.sweep()
    assert await newly_notified(store) == []
    await let_time_pass(store, "bbb")
    await ledger.sweep()
    assert sorted(await newly_notified(store)) == ["bbb", "ccc"]
    assert await reserve(ledger, "ccc", 0.6)
    assert not await reserve(ledger, "bbb", 0.6)  # it comes after all, and is the first again
    assert not await reserve(ledger, "aaa", 0.6, 0.1)
    await settle(ledger, "ccc", 0.1)
    assert await newly_notified(store) == ["bbb"]


async def test_absent_call_is_forgotten(store: Store) -> None:
    ledger = await made(store, "bbb")
    assert await reserve(ledger, "aaa", 0.6)
    assert not await reserve(ledger, "bbb", 0.6)
    await settle(ledger, "aaa", 0.1)
    for _ in range(3):
        assert await newly_notified(store) == ["bbb"]
        await let_time_pass(store, "bbb")
        await ledger.sweep()
    assert await newly_notified(store) == []
    assert (await ledger.load_account(TENANT)).waiting == 0
    assert await store.connection.call("SMEMBERS", f"{store.all_shards[0].root}:ledger:crowded") in ([], set())
    assert await reserve(ledger, "bbb", 0.6)


async def test_leaving_call_admits_the_next_one(store: Store) -> None:
    ledger = await made(store, "big", "ccc")
    assert await reserve(ledger, "aaa", 0.3)
    assert not await reserve(ledger, "big", 0.9)
    assert not await reserve(ledger, "ccc", 0.3)
    await ledger.withdraw("big", list_accounts("big", tenant="acme", experiment="swe"))
    assert await newly_notified(store) == ["ccc"]


async def test_conversation_keeps_its_waiting_time_between_queues(store: Store) -> None:
    ledger = await made(store, "early", "late", limit=1.0)
    await ledger.set_limit(EXPERIMENT, 0.5)
    assert await reserve(ledger, "aaa", 0.5)
    assert not await reserve(ledger, "early", 0.3)  # for the experiment
    assert await reserve(ledger, "other", 0.4, experiment="more")
    assert not await reserve(ledger, "late", 0.7, experiment="more")  # for the tenant
    await ledger.set_limit(EXPERIMENT, 5.0)
    await newly_notified(store)
    assert not await reserve(ledger, "early", 0.3)
    assert (await ledger.load_account(EXPERIMENT)).waiting == 0
    await settle(ledger, "other", 0.1, experiment="more")
    assert await newly_notified(store) == ["early"]
    assert await reserve(ledger, "early", 0.3)


class Turns:
    """Conversations that call as long as they may, some of which die after a wake. Time passes only when all rest."""

    def __init__(self, seed: int, sizes: list[float], deaths: int) -> None:
        self.random = random.Random(seed)
        self.sizes = {f"c{n:02}": size for n, size in enumerate(sizes)}
        self.calls = dict.fromkeys(self.sizes, 0)
        self.deaths = deaths
        self.dead: set[str] = set()
        self.awake = list(self.sizes)
        self.calling: list[str] = []
        self.waiting: list[str] = []

    async def play(self, limit: float) -> float:
        """Return the spent amount when no work is left."""
        clock = ManualClock()
        store = await open_store(MemoryConnection(MemoryServer(clock)), clock=clock)
        ledger = await made(store, *self.sizes, limit=limit)
        while self.awake or self.calling:
            if self.awake and (not self.calling or self.random.random() < 0.5):
                await self.call(ledger, self.awake.pop(0))
            else:
                cid = self.calling.pop(self.random.randrange(len(self.calling)))
                self.calls[cid] += 1
                await settle(ledger, cid, self.calls[cid] * self.sizes[cid])
                self.awake.append(cid)
            if not self.calling and not self.awake:
                await pass_time(store, clock, PATIENCE_SECONDS, worker_id="w1")
                await ledger.sweep()
            woken = set(await newly_notified(store)) - self.dead - set(self.awake)
            self.awake += sorted(woken)
        spent = (await ledger.load_account(TENANT)).spent_usd
        await store.aclose()
        return spent

    async def call(self, ledger: Ledger, cid: str) -> None:
        if self.deaths and cid in self.waiting and self.random.random() < 0.3:
            self.deaths -= 1
            self.dead.add(cid)
            self.waiting.remove(cid)
        elif await reserve(ledger, cid, self.sizes[cid], self.calls[cid] * self.sizes[cid]):
            before = self.waiting[: self.waiting.index(cid)] if cid in self.waiting else self.waiting
            assert set(before) <= set(self.awake), f"{cid} has overtaken one of {before}"
            self.calling.append(cid)
            self.waiting = [other for other in self.waiting if other != cid]
        elif cid not in self.waiting:
            self.waiting.append(cid)


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.sampled_from([0.05, 0.25, 0.25, 1.0]), min_size=2, max_size=8),
    deaths=st.integers(0, 2),
)
def test_no_call_overtakes_or_sleeps_while_there_is_room(seed: int, sizes: list[float], deaths: int) -> None:
    turns = Turns(seed, sizes, deaths)
    spent = asyncio.run(turns.play(3.0))
    assert spent >= 3.0 or len(turns.dead) == len(sizes)
