"""Replicas of one model: who calls which engine, and who waits for room in a cache, on each kind of store."""

from __future__ import annotations

import pytest

from broker.limits.governor import CallGranted, CallOutcome, Governor
from broker.limits.quotas import QuotaPool, QuotaTable
from broker.store.store import Store
from tests.broker_parts import begin_unnotified, enter, notified

WORKER = "w1"
MODEL = "openai/policy"
A, B = "at_a_8000_v1", "at_b_8000_v1"


def write_table(*hosts: str, **limits: int) -> str:
    """Return a quota table with a replica at each host."""
    further = "".join(f"{name} = {value}\n" for name, value in limits.items())
    return "\n".join(f'[[quota]]\nmodel = "{MODEL}"\nbase_url = "http://{host}:8000/v1"\n{further}' for host in hosts)


class Engines:
    """Conversations that call the replicas of a model."""

    def __init__(self, store: Store, table: str) -> None:
        self.governor = Governor(store, QuotaTable.parse(table))

    @classmethod
    async def start(cls, store: Store, *hosts: str, **limits: int) -> Engines:
        await enter(store, WORKER)
        return cls(store, write_table(*(hosts or ("a", "b")), **limits))

    @property
    def pool(self) -> QuotaPool:
        pool = self.governor.find_pool(MODEL, "")
        assert pool is not None
        return pool

    async def reserve(self, cid: str, *, tokens: int = 100, tenant: str = "", prefix: str = "") -> str:
        """Return the replica that a call may go to now; empty if it waits."""
        answer = await self.governor.reserve(
            self.pool, cid, WORKER, input_tokens=tokens, output_tokens=0, tenant=tenant, prefix=prefix
        )
        return answer.key if isinstance(answer, CallGranted) else ""

    async def settle(
        self, cid: str, outcome: CallOutcome = CallOutcome.OK, *, tokens: int = 100, seconds: float = 1.0
    ) -> None:
        await self.governor.settle(
            self.pool, cid, WORKER, outcome, input_tokens=tokens, output_tokens=10, took_seconds=seconds
        )

    async def call(self, cid: str, *, tokens: int = 100, tenant: str = "", prefix: str = "") -> str:
        """Make a whole call. Return the replica."""
        key = await self.reserve(cid, tokens=tokens, tenant=tenant, prefix=prefix)
        if key:
            await self.settle(cid, tokens=tokens)
        return key

    async def end(self, cid: str) -> None:
        await self.governor.withdraw(self.pool, cid, WORKER, is_over=True)

    async def report(self, key: str, *, is_up: bool = True, cache: int | None = None, use: float | None = None) -> None:
        await self.governor.report_engine(self.pool, key, WORKER, is_up=is_up, cache_tokens=cache, use=use)


async def test_new_conversations_spread_and_then_stay(store: Store) -> None:
    engines = await Engines.start(store, concurrency=8, cache_tokens=10_000)
    homes = {f"c{n}": await engines.call(f"c{n}") for n in range(6)}
    assert sorted(homes.values()) == [A, A, A, B, B, B]
    for _ in range(3):
        assert {cid: await engines.call(cid, tokens=200) for cid in homes} == homes


async def test_siblings_go_where_their_prompt_is(store: Store) -> None:
    engines = await Engines.start(store, concurrency=8, cache_tokens=10_000)
    groups = [{await engines.call(f"{group}{n}", prefix=group) for n in range(4)} for group in ("g", "h")]
    assert sorted(groups, key=str) == [{A}, {B}]


async def test_a_new_conversation_waits_for_room_in_a_cache(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8, cache_tokens=300)
    await begin_unnotified(store, "third")
    assert [await engines.call(cid) for cid in ("first", "second")] == [A, A]
    assert not await engines.reserve("third")
    assert await engines.call("first", tokens=110) == A, "a resident goes before it"
    await engines.end("second")
    assert await notified(store) == ["third"]
    assert await engines.reserve("third") == A


async def test_smaller_prompts_do_not_overtake_a_larger_one(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8, cache_tokens=320)
    assert await engines.call("first") == A
    assert not await engines.reserve("large", tokens=250)
    assert not await engines.reserve("small", tokens=10)
    await engines.end("first")
    assert await engines.reserve("large", tokens=250) == A
    assert await engines.reserve("small", tokens=10) == A


async def test_a_prompt_beyond_the_cache_is_served_alone(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8, cache_tokens=300)
    assert await engines.call("huge", tokens=5_000) == A


async def test_calls_leave_a_replica_that_does_not_answer(store: Store) -> None:
    engines = await Engines.start(store, concurrency=8, cache_tokens=10_000)
    home = await engines.reserve("first")
    await engines.settle("first", CallOutcome.DOWN)
    other = B if home == A else A
    assert [await engines.call(cid) for cid in ("first", "second", "third")] == [other] * 3


async def test_a_reported_replica_serves_again(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8, cache_tokens=10_000)
    await engines.report(A, is_up=False)
    await begin_unnotified(store, "first")
    assert not await engines.reserve("first")
    await engines.report(A)
    assert await notified(store) == ["first"]
    assert await engines.reserve("first") == A


async def test_a_reported_cache_bounds_residents(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8)
    await engines.report(A, cache=250)
    assert [await engines.call(cid) for cid in ("first", "second")] == [A, A]
    assert not await engines.reserve("third")


async def test_a_full_cache_admits_no_new_conversation(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=8)
    assert await engines.call("first") == A
    await engines.report(A, cache=10_000, use=0.99)
    assert not await engines.reserve("second")
    assert await engines.reserve("first") == A


async def test_one_worker_asks_for_a_report_at_a_time(store: Store) -> None:
    engines = await Engines.start(store)
    claims = [await engines.governor.claim_report(engines.pool, A, worker, 60.0) for worker in ("w1", "w2", "w1")]
    assert claims == [True, False, False]


async def test_a_late_tenant_gets_its_share_of_turns(store: Store) -> None:
    engines = await Engines.start(store, "a", concurrency=4, cache_tokens=800)
    early, late = [f"e{n}" for n in range(16)], [f"l{n}" for n in range(16)]
    turns = {"early": 0, "late": 0}

    async def play(rounds: int, conversations: list[tuple[str, str]]) -> None:
        for _ in range(rounds):
            for cid, tenant in conversations:
                if await engines.reserve(cid, tenant=tenant):
                    await engines.settle(cid)
                    turns[tenant] += 1

    await play(20, [(cid, "early") for cid in early])
    assert turns["early"] >= 100
    turns["early"] = 0
    await play(60, [*((cid, "early") for cid in early), *((cid, "late") for cid in late)])
    assert min(turns.values()) >= 0.4 * sum(turns.values()), turns


async def test_refusals_shrink_a_window_that_grew_before(store: Store) -> None:
    engines = await Engines.start(store, "a")

    async def fill() -> int:
        """Make as many calls at once as the replica takes; return their number."""
        cids = [f"probe{n}" for n in range(200)]
        granted = [cid for cid in cids if await engines.reserve(cid)]
        for cid in granted:
            await engines.settle(cid)
        for cid in cids:
            await engines.end(cid)
        return len(granted)

    counts = [await fill() for _ in range(4)]
    assert counts == sorted(set(counts)), "it grows while it is used"
    level = f"{store.find_home(engines.pool.name).quota(engines.pool.name)}:level:{A}"
    before = float(await store.connection.call("HGET", level, "window"))
    for cid in ("first", "second"):
        assert await engines.reserve(cid)
    for cid in ("first", "second"):
        await engines.settle(cid, CallOutcome.LIMITED)
    after = float(await store.connection.call("HGET", level, "window"))
    assert after == pytest.approx(0.8 * before, rel=0.01), "refusals of one wave count once"


async def test_a_slow_engine_ends_the_growth_of_its_window(store: Store) -> None:
    engines = await Engines.start(store, "a")
    level = f"{store.find_home(engines.pool.name).quota(engines.pool.name)}:level:{A}"
    windows = []
    for seconds in (1.0, 1.0, 100.0, 100.0, 100.0):
        cids = [f"probe{n}" for n in range(8)]
        for cid in cids:
            assert await engines.reserve(cid)
        for cid in cids:
            await engines.settle(cid, seconds=seconds)
        windows.append(float(await store.connection.call("HGET", level, "window")))
    assert windows[1] > windows[0]
    assert windows[4] < windows[3] < windows[1] + 1


async def test_a_removed_replica_gets_no_further_calls(store: Store) -> None:
    engines = await Engines.start(store, concurrency=8, cache_tokens=10_000)
    homes = {f"c{n}": await engines.reserve(f"c{n}") for n in range(4)}
    await engines.governor.use(QuotaTable.parse(write_table("b", concurrency=8, cache_tokens=10_000)))
    for cid in homes:
        await engines.settle(cid)
    assert {await engines.call(cid) for cid in homes} == {B}
    await engines.governor.use(QuotaTable.parse(write_table("a", "b", concurrency=8, cache_tokens=10_000)))
    assert A in {await engines.reserve(f"new{n}") for n in range(6)}


@pytest.mark.parametrize("part", ["sizes", "warm", "prefixes"])
async def test_overwritten_keys_of_a_replica_are_moved_away(store: Store, part: str) -> None:
    engines = await Engines.start(store, "a", concurrency=8, cache_tokens=10_000)
    assert await engines.call("first", prefix="g") == A
    key = f"{store.find_home(engines.pool.name).quota(engines.pool.name)}:{part}:{A}"
    await store.connection.call("SET", key, "not this type")
    assert await engines.call("first", prefix="g") == A
    assert await engines.call("second", prefix="g") == A
