"""Quotas of models: admitted, waiting and next conversations, and owners of permits, on each kind of store."""

from __future__ import annotations

import time
from typing import Any

import pytest

from broker.limits.governor import CallGranted, CallOutcome, CallQueued, Governor, Priority, set_limits
from broker.limits.quotas import QuotaTable
from broker.runtime.errors import UsageError
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection
from tests.broker_parts import KEPT_TENANTS, begin, begin_unnotified, bury, enter, make_up_tenants, notified, pass_time

WORKER = "w1"


def governor(store: Store, text: str) -> Governor:
    return Governor(store, QuotaTable.parse(text))


def limited(store: Store, **limits: int) -> Governor:
    lines = "\n".join(f"{name} = {value}" for name, value in limits.items())
    return governor(store, f'[[quota]]\nmodel = "acme/large"\n{lines}')


class Callers:
    """Conversations that want to call one model."""

    @classmethod
    async def limited(cls, store: Store, **limits: int) -> Callers:
        """Make those of a model with limits, and the workers w1 and w2."""
        for worker in ("w1", "w2"):
            await enter(store, worker)
        return cls(store, limited(store, **limits))

    def __init__(self, store: Store, made: Governor, *, model: str = "acme/large") -> None:
        pool = made.find_pool(model, "")
        assert pool is not None
        self.store, self.governor, self.pool = store, made, pool

    async def reserve(
        self, cid: str, *, tokens: tuple[int, int] = (0, 0), worker: str = WORKER, **wanted: object
    ) -> CallGranted | CallQueued:
        asked: dict[str, Any] = {"priority": Priority.BATCH, "tenant": "", "fence": "0", **wanted}
        return await self.governor.reserve(
            self.pool, cid, worker, input_tokens=tokens[0], output_tokens=tokens[1], **asked
        )

    async def may_call(self, cid: str, **wanted: object) -> bool:
        return isinstance(await self.reserve(cid, **wanted), CallGranted)  # type: ignore[arg-type]

    async def eta(self, cid: str, **wanted: object) -> float:
        """Return how many seconds a conversation has to wait."""
        answer = await self.reserve(cid, **wanted)  # type: ignore[arg-type]
        return answer.eta_seconds

    async def settle(self, cid: str, outcome: CallOutcome = CallOutcome.OK, **used: object) -> None:
        await self.governor.settle(self.pool, cid, str(used.pop("worker", WORKER)), outcome, **used)  # type: ignore[arg-type]

    async def pump(self) -> None:
        await self.governor.wake_next(self.pool, WORKER)


async def test_concurrency_is_one_for_the_whole_cluster(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=2)
    assert await callers.may_call("aaa", worker="w1")
    assert await callers.may_call("bbb", worker="w2")
    assert not await callers.may_call("ccc", worker="w1")
    await callers.settle("aaa", worker="w1")
    assert await callers.may_call("ccc", worker="w1")


async def test_a_repeated_reservation_is_the_same_one(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=2)
    for _ in range(3):
        assert await callers.may_call("aaa")
    assert await callers.may_call("bbb")


async def test_a_conversation_is_woken_when_its_turn_comes(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    await begin_unnotified(store, "aaa", "bbb", "ccc")
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")
    assert not await callers.may_call("ccc")
    assert await notified(store) == []
    await callers.settle("aaa")
    assert await notified(store) == ["bbb"]  # one wake for one place
    assert not await callers.may_call("ccc")  # a grant is kept for its conversation
    assert await callers.may_call("bbb")
    await callers.settle("bbb")
    assert await notified(store) == ["bbb", "ccc"]


async def test_interactive_conversations_go_first(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("first")
    for n in range(5):
        assert not await callers.may_call(f"batch-{n}")
    assert not await callers.may_call("person", priority=Priority.INTERACTIVE)
    await callers.settle("first")
    assert not await callers.may_call("batch-0")
    assert await callers.may_call("person", priority=Priority.INTERACTIVE)
    await callers.settle("person")
    assert await callers.may_call("batch-0")


async def test_tenants_share_by_weight(store: Store) -> None:
    await enter(store, WORKER)
    made = governor(store, '[[quota]]\nmodel = "m"\nconcurrency = 1\n[tenants]\nbig = 3')
    callers = Callers(store, made, model="m")
    assert await callers.may_call("first")
    wanted = {f"{tenant}-{n}": tenant for n in range(8) for tenant in ("small", "big")}
    for cid, tenant in wanted.items():
        assert not await callers.may_call(cid, tenant=tenant)
    order: list[str] = []
    current = "first"
    for _ in range(8):
        await callers.settle(current)
        called = await store.connection.call("ZRANGE", f"{store.all_shards[0].quota('m')}:called", 0, -1)
        (current,) = [cid.decode() for cid in called]
        assert await callers.may_call(current)
        order.append(wanted[current])
    assert order.count("big") == 6
    assert order.count("small") == 2


async def test_a_dead_worker_holds_nothing(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa", worker="w1")
    assert not await callers.may_call("bbb", worker="w2")
    await bury(store, "w1")
    await store.connection.call("HSET", f"{store.all_shards[0].quota('acme_large')}:state", "swept", 0)
    assert await callers.may_call("bbb", worker="w2")


async def test_the_next_owner_takes_over_the_reservation(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa", worker="w1")
    assert await callers.may_call("aaa", worker="w2")
    await callers.settle("aaa", worker="w1")  # of the former owner: too late
    assert not await callers.may_call("bbb", worker="w1")
    await callers.settle("aaa", worker="w2")
    assert await callers.may_call("bbb", worker="w1")


async def test_withdrawn_call_is_not_awaited(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")
    assert not await callers.may_call("ccc")
    await callers.settle("aaa")  # calls bbb
    await callers.governor.withdraw(callers.pool, "bbb", WORKER)
    assert await callers.may_call("ccc")
    await callers.governor.withdraw(callers.pool, "ccc", WORKER)  # too late: it calls
    assert not await callers.may_call("ddd")


async def test_a_former_owner_may_have_called(store: Store) -> None:
    callers = await Callers.limited(store, requests_per_day=2)
    for worker in (WORKER, "w2"):
        assert await callers.may_call("aaa", worker=worker)
    assert not await callers.may_call("bbb")


async def test_limits_per_minute(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, requests_per_minute=600)
    granted = 0
    while clock.monotonic() < 60.0:
        if await callers.may_call(f"conversation-{granted}"):
            await callers.settle(f"conversation-{granted}")
            granted += 1
        else:
            await pass_time(memory_store, clock, 0.05, worker_id=WORKER)
    assert 595 <= granted <= 600


async def test_tokens_are_settled_by_what_was_used(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    assert await callers.may_call("aaa", tokens=(600, 0))
    await callers.settle("aaa", input_tokens=600 + 5_000)
    # 1,000 at the beginning; a debt of 4,600 flows off at 59,000 a minute.
    assert 4.7 <= await callers.eta("bbb", tokens=(100, 0)) <= 4.9
    await pass_time(memory_store, clock, 4.6, worker_id=WORKER)
    assert not await callers.may_call("bbb", tokens=(100, 0))
    await pass_time(memory_store, clock, 0.3, worker_id=WORKER)
    assert await callers.may_call("bbb", tokens=(100, 0))


async def test_call_larger_than_the_bucket_runs_when_full(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, output_tokens_per_minute=6_000)
    assert await callers.may_call("aaa", tokens=(0, 5_900))
    await callers.settle("aaa", output_tokens=5_900)
    assert not await callers.may_call("bbb", tokens=(0, 1))
    await pass_time(memory_store, clock, 60, worker_id=WORKER)
    assert await callers.may_call("bbb", tokens=(0, 1))


async def test_a_refusal_is_obeyed_once_for_everybody(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, requests_per_minute=6_000)
    assert await callers.may_call("aaa")
    assert await callers.may_call("bbb")
    await pass_time(memory_store, clock, 0.001, worker_id=WORKER)
    for cid in ("aaa", "bbb"):
        await callers.settle(cid, CallOutcome.LIMITED, retry_after_seconds=7)
    assert 6.9 <= await callers.eta("ccc") <= 7.1
    await pass_time(memory_store, clock, 7, worker_id=WORKER)
    assert await callers.may_call("ccc")
    level = await memory_store.connection.call(
        "HGET", f"{memory_store.all_shards[0].quota('acme_large')}:level:own", "factor"
    )
    assert 0.79 < float(level) < 0.81  # cut once for the two, and growing again


async def test_a_shorter_refusal_does_not_end_a_longer_one(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, requests_per_minute=6_000)
    for cid in ("aaa", "bbb"):
        assert await callers.may_call(cid)
    await callers.settle("aaa", CallOutcome.LIMITED, retry_after_seconds=60)
    await callers.settle("bbb", CallOutcome.LIMITED, retry_after_seconds=1)
    await pass_time(memory_store, clock, 30, worker_id=WORKER)
    assert not await callers.may_call("ccc")
    await pass_time(memory_store, clock, 31, worker_id=WORKER)
    assert await callers.may_call("ccc")


async def test_a_call_that_was_never_sent_costs_nothing(memory_store: Store) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    for _ in range(3):
        assert await callers.may_call("aaa", tokens=(1_000, 0))  # all that the bucket holds
        await callers.settle("aaa", CallOutcome.UNSENT)
    assert await callers.may_call("bbb", tokens=(1_000, 0))
    assert not await callers.may_call("ccc", tokens=(1_000, 0))


async def test_a_smaller_call_does_not_overtake_a_larger_one(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    assert await callers.may_call("first", tokens=(900, 0))
    assert not await callers.may_call("large", tokens=(1_000, 0))
    assert not await callers.may_call("small", tokens=(50, 0))  # which there would be room for
    await pass_time(memory_store, clock, 1, worker_id=WORKER)
    assert await callers.may_call("large", tokens=(1_000, 0))


async def test_a_refusal_for_years_is_obeyed_for_an_hour(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, requests_per_minute=6_000)
    assert await callers.may_call("aaa")
    await callers.settle("aaa", CallOutcome.LIMITED, retry_after_seconds=1e9)
    assert await callers.eta("bbb") <= 3_601
    await pass_time(memory_store, clock, 3_600, worker_id=WORKER)
    assert await callers.may_call("bbb")


async def test_a_used_up_day_is_a_wait_until_the_next(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, requests_per_day=2, day_starts_hour_utc=8)
    for cid in ("aaa", "bbb"):
        assert await callers.may_call(cid)
        await callers.settle(cid)
    assert 8 * 3600 - 1 <= await callers.eta("ccc") <= 8 * 3600 + 1  # the clock starts at midnight
    await pass_time(memory_store, clock, 8 * 3600 + 1, worker_id=WORKER)
    assert await callers.may_call("ccc")


async def test_absent_call_is_woken_again_and_then_forgotten(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, concurrency=1)
    await begin(memory_store, "aaa")
    assert await callers.may_call("first")
    assert not await callers.may_call("aaa")
    await callers.settle("first")
    for _ in range(2):
        await pass_time(memory_store, clock, 3.1, worker_id=WORKER)
        await callers.pump()
        assert not await callers.may_call("bbb")
    await pass_time(memory_store, clock, 3.1, worker_id=WORKER)
    assert await callers.may_call("bbb")


@pytest.mark.parametrize("is_deadline_lost", [False, True])
async def test_kept_call_that_is_not_made_is_not_counted(
    memory_store: Store, clock: ManualClock, is_deadline_lost: bool
) -> None:
    callers = await Callers.limited(memory_store, concurrency=1, requests_per_day=2)
    assert await callers.may_call("first")
    assert not await callers.may_call("0-gone")
    await callers.settle("first")  # calls 0-gone, which never arrives
    if is_deadline_lost:
        await memory_store.connection.call("DEL", f"{memory_store.all_shards[0].quota('acme_large')}:called")
    for _ in range(4):
        await pass_time(memory_store, clock, 3.1, worker_id=WORKER)
        await callers.pump()
    assert await callers.may_call("other")


async def test_a_conversation_called_again_gives_newcomers_no_earlier_place(
    memory_store: Store, clock: ManualClock
) -> None:
    callers = await Callers.limited(memory_store, concurrency=2)
    for cid in ("first", "second"):
        assert await callers.may_call(cid)
    waiting = ["0-late", *(f"a{n}" for n in range(8))]
    for cid in waiting:
        assert not await callers.may_call(cid, tenant=cid[:1])
    await callers.settle("first")  # calls 0-late, which does not come
    await callers.settle("second")
    for n in range(5):
        assert await callers.may_call(f"a{n}", tenant="a")
        await callers.settle(f"a{n}")
    assert await callers.may_call("a5", tenant="a")
    await pass_time(memory_store, clock, 3.1, worker_id=WORKER)
    await callers.pump()  # calls 0-late again
    for n in range(3):
        assert not await callers.may_call(f"b{n}", tenant="b")
    await callers.settle("a5")
    order = []
    for _ in range(4):
        called = await memory_store.connection.call(
            "ZRANGE", f"{memory_store.all_shards[0].quota('acme_large')}:called", 0, -1
        )
        (cid,) = [cid.decode() for cid in called if cid != b"0-late"]
        order.append(cid[0])
        assert await callers.may_call(cid)
        await callers.settle(cid)
    assert sorted(order) == ["a", "a", "b", "b"]


async def test_prompt_grown_in_the_queue_waits_for_its_tokens(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    assert await callers.may_call("first", tokens=(1_000, 0))  # all that the bucket holds
    assert not await callers.may_call("grows", tokens=(10, 0))
    assert 0.9 <= await callers.eta("grows", tokens=(900, 0)) <= 1.0
    await pass_time(memory_store, clock, 0.5, worker_id=WORKER)
    assert not await callers.may_call("grows", tokens=(900, 0))
    await pass_time(memory_store, clock, 0.5, worker_id=WORKER)
    assert await callers.may_call("grows", tokens=(900, 0))
    assert not await callers.may_call("next", tokens=(100, 0))


async def test_prompt_grown_after_its_call_keeps_its_place_and_waits(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000)
    assert await callers.may_call("first", tokens=(1_000, 0))
    assert not await callers.may_call("grows", tokens=(100, 0))
    assert not await callers.may_call("next", tokens=(50, 0))
    await pass_time(memory_store, clock, 0.11, worker_id=WORKER)
    await callers.pump()  # calls `grows`, for 100
    assert not await callers.may_call("grows", tokens=(900, 0))
    assert not await callers.may_call("next", tokens=(50, 0))
    await pass_time(memory_store, clock, 0.85, worker_id=WORKER)
    assert await callers.may_call("grows", tokens=(900, 0))
    await callers.settle("grows", input_tokens=900)
    assert not await callers.may_call("next", tokens=(100, 0))


async def test_conversation_stays_on_its_key_while_cached(memory_store: Store, clock: ManualClock) -> None:
    await enter(memory_store, WORKER)
    entry = '[[quota]]\nmodel = "m"\nkey_env = "KEY_{}"\nconcurrency = 2\n'
    callers = Callers(memory_store, governor(memory_store, entry.format(1) + entry.format(2)), model="m")
    keys = {}
    for cid in ("aaa", "bbb"):
        answer = await callers.reserve(cid)
        keys[cid] = answer.key
        await pass_time(memory_store, clock, 0.01, worker_id=WORKER)
    assert keys == {"aaa": "KEY_1", "bbb": "KEY_2"}  # the freer one
    for cid in keys:
        await callers.settle(cid, took_seconds=0.5)
    for cid in ("bbb", "aaa", "bbb"):
        assert await callers.reserve(cid) == CallGranted(keys[cid])
        await callers.settle(cid, took_seconds=0.5)
    await pass_time(memory_store, clock, 301, worker_id=WORKER)
    assert await callers.reserve("bbb") == CallGranted("KEY_1")


async def test_remaining_quota_of_the_provider_counts(memory_store: Store) -> None:
    callers = await Callers.limited(memory_store, requests_per_minute=6_000)
    assert await callers.may_call("aaa")
    await callers.governor.apply_remaining(callers.pool, "own", WORKER, {"requests": 0})
    assert not await callers.may_call("bbb")
    await callers.governor.apply_remaining(callers.pool, "own", WORKER, {"requests": 50})  # of an earlier reply
    assert not await callers.may_call("bbb")


async def test_a_store_that_was_never_told_its_quotas_is_told(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    await callers.governor.publish()
    await store.connection.call("DEL", f"{store.all_shards[0].quota('acme_large')}:limits")
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")


async def test_the_queue_of_a_busy_model_forgets_made_up_tenants(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("first")
    assert not await callers.may_call("busy", tenant="busy")
    shares = f"{store.all_shards[0].quota(callers.pool.name)}:shares:2"
    await make_up_tenants(store, shares)
    assert not await callers.may_call("aaa", tenant="another")
    assert await store.connection.call("HLEN", shares) <= KEPT_TENANTS
    assert await store.connection.call("HGET", shares, "ahead") == b"2000.0"  # the largest share is forgotten last
    await store.connection.call("HSET", shares, ":at", "1000.75")
    await make_up_tenants(store, shares)
    assert not await callers.may_call("bbb", tenant="another")
    assert await store.connection.call("HLEN", shares) == 3  # a skipped place owes nothing


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


async def test_grown_prompt_costs_the_difference(memory_store: Store, clock: ManualClock) -> None:
    callers = await Callers.limited(memory_store, input_tokens_per_minute=60_000, concurrency=1)
    assert await callers.may_call("first", worker="w1")
    assert not await callers.may_call("grows", worker="w1", tokens=(600, 0))
    await callers.settle("first", worker="w1")  # calls `grows`, for 600
    await pass_time(memory_store, clock, 2.0, worker_id="w1")
    assert await callers.may_call("grows", worker="w1", tokens=(700, 0))
    assert await left(callers) == pytest.approx(900.0)


async def test_quotas_of_models_are_in_different_shards() -> None:
    store = await open_store(MemoryConnection(), shards=64)
    await enter(store, "w1")
    homes = set()
    for number in range(20):
        text = f'[[quota]]\nmodel = "acme/{number}"\nrequests_per_minute = 1\nburst_seconds = 60'
        callers = Callers(store, governor(store, text), model=f"acme/{number}")
        assert await callers.may_call("aaa")
        home = store.find_home(callers.pool.name)
        assert await store.connection.call("HLEN", f"{home.quota(callers.pool.name)}:held") == 1
        homes.add(home)
    assert len(homes) > 10
    await store.aclose()


async def test_set_limit_replaces_the_published_one_until_it_is_removed(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")
    change = {"concurrency": 2, "requests": 1}
    assert await set_limits(store, callers.pool.name, "own", "", change) is None
    assert await callers.may_call("bbb"), "a limit of requests that the table does not have stays without one"
    assert not await callers.may_call("ccc")
    await callers.governor.publish()
    await callers.settle("bbb")
    assert await callers.may_call("ccc"), "a worker that starts keeps the set limit"
    assert await set_limits(store, callers.pool.name, "own", "", {"concurrency": 9}) == "requests=1 concurrency=2"
    assert await set_limits(store, callers.pool.name, "own", "requests=1 concurrency=2", {}) is None
    assert not await callers.may_call("ddd")
    await callers.settle("aaa")
    await callers.settle("ccc")
    assert await callers.may_call("ddd")
    assert not await callers.may_call("eee")


@pytest.mark.parametrize(
    ("key", "change"), [("other", {"concurrency": 2}), ("own", {"burst": 5}), ("own", {"requests": 0})]
)
async def test_unknown_key_or_limit_is_refused(store: Store, key: str, change: dict[str, int]) -> None:
    callers = await Callers.limited(store, concurrency=1)
    await callers.governor.publish()
    with pytest.raises(UsageError, match=r"no key other|cannot be set"):
        await set_limits(store, callers.pool.name, key, "", change)


@pytest.mark.parametrize("written", ["concurrency=x", "concurrency=1.2.3", "=", "burst=99 replica=1", "concurrency=0"])
async def test_damaged_set_limits_change_nothing(store: Store, written: str) -> None:
    callers = await Callers.limited(store, concurrency=1)
    await callers.governor.publish()
    home = store.find_home(callers.pool.name)
    await store.connection.call("HSET", f"{home.quota(callers.pool.name)}:set", "own", written)
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")
