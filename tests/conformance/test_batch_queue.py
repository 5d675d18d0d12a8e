"""Calls that wait for a batch: sealed once, in one worker's hand, delivered once, on each kind of store."""

from __future__ import annotations

from broker.limits.batches import Batch, Batches, CallStands
from broker.store.store import Store
from tests.broker_parts import enter, lapse


async def put(batches: Batches, cid: str, step: str = "1.1", *, lane: str = "lane", body: bytes = b"body") -> None:
    await batches.put(cid, step, seen_id=7, lane=lane, about_lane="about", body=body)


async def seal(batches: Batches, *, calls: int = 10, size: int = 1_000, seconds: float = 0.0) -> tuple[str, float]:
    return await batches.seal("lane", "w1", lease_seconds=60.0, max_calls=calls, max_bytes=size, gather_seconds=seconds)


async def sealed(store: Store, *ids: str) -> tuple[Batches, Batch]:
    for worker in ("w1", "w2"):
        await enter(store, worker)
    batches = Batches(store)
    for cid in ids:
        await put(batches, cid)
    batch_id, _ = await seal(batches)
    batch = await batches.lease(batch_id, "w1", lease_seconds=60.0)
    assert batch is not None
    return batches, batch


async def test_a_call_waits_and_is_sent_and_is_done(store: Store) -> None:
    batches, batch = await sealed(store, "aaa", "bbb")
    assert (batch.count, batch.provider, batch.sent_ms) == (2, "", 0)
    assert await batches.bodies(batch) == {"1": b"body", "2": b"body"}
    assert (await batches.ask("aaa", "1.1")).stands is CallStands.SENT
    assert (await batches.ask("aaa", "2.1")).stands is CallStands.NONE
    assert await batches.note(batch, "w1", provider="p-1")
    assert await batches.bodies(batch) == {}
    assert await batches.deliver(batch, "1", b"first") == "aaa"
    assert await batches.deliver(batch, "1", b"second") == "aaa"
    call = await batches.ask("aaa", "1.1")
    assert (call.stands, call.seen_id, call.result) == (CallStands.DONE, 7, b"first")
    assert await batches.known() == {"p-1"}
    assert await batches.numbers(batch) == ["1", "2"]
    await batches.close(batch, "w1")
    assert await batches.due() == []
    assert await batches.drop("aaa") is CallStands.DONE
    assert await batches.drop("aaa") is CallStands.NONE


async def test_a_batch_is_made_when_it_is_full_or_has_waited(store: Store) -> None:
    await enter(store, "w1")
    batches = Batches(store)
    assert await seal(batches) == ("", -1.0)
    for cid in ("aaa", "bbb", "ccc"):
        await put(batches, cid, body=b"12345")
        await put(batches, cid, body=b"another")  # the same step is put once
    batch_id, left = await seal(batches, seconds=60.0)
    assert batch_id == ""
    assert 50.0 < left <= 60.0
    full, _ = await seal(batches, calls=2, seconds=60.0)
    assert full
    large, _ = await seal(batches, size=4, seconds=60.0)
    assert large == ""  # one alone is sent, however large it is, but it has not waited long enough
    for cid in ("ddd", "eee"):
        await put(batches, cid, body=b"12345")
    two, _ = await seal(batches, size=11, seconds=60.0)
    batch = await batches.lease(two, "w1", lease_seconds=60.0)
    assert batch is not None
    assert batch.count == 2


async def test_one_live_worker_has_a_batch_in_hand(store: Store) -> None:
    batches, batch = await sealed(store, "aaa")
    assert await batches.due() == [batch.batch_id]
    assert await batches.lease(batch.batch_id, "w2", lease_seconds=60.0) is None
    await lapse(store, "w1")
    await (await enter(store, "undertaker")).tick(1)
    taken = await batches.lease(batch.batch_id, "w2", lease_seconds=60.0)
    assert taken is not None
    assert not await batches.note(batch, "w1", sent_ms=5)
    await batches.close(batch, "w1")
    assert await batches.note(taken, "w2", look_again_seconds=60.0, sent_ms=6)
    assert await batches.due() == []


async def test_a_call_that_is_given_up_is_not_sent_and_not_delivered(store: Store) -> None:
    batches, batch = await sealed(store, "aaa", "bbb", "ccc")
    assert await batches.drop("aaa") is CallStands.SENT
    await put(batches, "bbb", "1.2")
    assert await batches.bodies(batch) == {"3": b"body"}
    assert await batches.deliver(batch, "1", b"late") is None
    assert await batches.deliver(batch, "2", b"late") is None
    assert await batches.drop("bbb", "1.1") is CallStands.NONE
    assert await batches.drop("bbb", "1.2") is CallStands.WAITING
    assert await batches.lanes() == {"lane": "about"}


async def test_a_call_that_is_lost_holds_up_nobody_behind_it(store: Store) -> None:
    await enter(store, "w1")
    batches = Batches(store)
    await put(batches, "aaa")
    await store.connection.call("DEL", f"{store.all_shards[0].root}:batch:call:aaa")
    await put(batches, "bbb")
    batch_id, left = await seal(batches, seconds=60.0)
    assert batch_id == ""
    assert 50.0 < left <= 60.0
    batch_id, _ = await seal(batches)
    assert batch_id
    assert (await batches.ask("bbb", "1.1")).stands is CallStands.SENT
