"""Calls that wait for a batch: sealed once, in one worker's hand, delivered once, on each kind of store."""

from __future__ import annotations

import pytest

from broker.limits.batches import Batch, BatchCallStatus, Batches
from broker.store.store import Store
from tests.broker_parts import begin, enter, lapse, notified


@pytest.fixture
async def batches(store: Store) -> Batches:
    for worker in ("w1", "w2"):
        await enter(store, worker)
    return Batches(store)


async def put(batches: Batches, cid: str, step: str = "1.1", *, lane: str = "lane", body: bytes = b"body") -> None:
    await batches.put(cid, step, seen_id=7, lane=lane, about_lane="about", body=body)


async def seal(batches: Batches, *, calls: int = 10, size: int = 1_000, seconds: float = 0.0) -> tuple[str, float]:
    return await batches.seal("lane", "w1", lease_seconds=60.0, max_calls=calls, max_bytes=size, gather_seconds=seconds)


async def sealed(batches: Batches, *ids: str) -> Batch:
    for cid in ids:
        await put(batches, cid)
    batch_id, _ = await seal(batches)
    batch = await batches.lease(batch_id, "w1", lease_seconds=60.0)
    assert batch is not None
    return batch


async def test_a_call_waits_and_is_sent_and_is_done(batches: Batches) -> None:
    batch = await sealed(batches, "aaa", "bbb")
    assert (batch.count, batch.provider, batch.sent_ms) == (2, "", 0)
    assert await batches.load_bodies(batch) == {"1": b"body", "2": b"body"}
    assert (await batches.load_call("aaa", "1.1")).status is BatchCallStatus.SENT
    assert (await batches.load_call("aaa", "2.1")).status is BatchCallStatus.NONE
    assert await batches.record_state(batch, "w1", provider="p-1")
    assert await batches.load_bodies(batch) == {}
    assert await batches.deliver(batch, "1", b"first") == "aaa"
    assert await batches.deliver(batch, "1", b"second") == "aaa"
    call = await batches.load_call("aaa", "1.1")
    assert (call.status, call.seen_id, call.result) == (BatchCallStatus.DONE, 7, b"first")
    assert await batches.list_provider_ids() == {"p-1"}
    assert await batches.list_numbers(batch) == ["1", "2"]
    await batches.close(batch, "w1")
    assert await batches.find_due() == []
    assert await batches.drop("aaa") is BatchCallStatus.DONE
    assert await batches.drop("aaa") is BatchCallStatus.NONE


async def test_batch_is_made_when_full_or_old_enough(batches: Batches) -> None:
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
    assert batch.count == 2


async def test_one_live_worker_has_a_batch_in_hand(store: Store, batches: Batches) -> None:
    batch = await sealed(batches, "aaa")
    assert await batches.find_due() == [batch.batch_id]
    assert await batches.lease(batch.batch_id, "w2", lease_seconds=60.0) is None
    await lapse(store, "w1")
    await (await enter(store, "undertaker")).beat(1)
    taken = await batches.lease(batch.batch_id, "w2", lease_seconds=60.0)
    assert taken is not None
    assert not await batches.record_state(batch, "w1", sent_ms=5)
    await batches.close(batch, "w1")
    assert await batches.record_state(taken, "w2", look_again_seconds=60.0, sent_ms=6)
    assert await batches.find_due() == []


async def test_abandoned_call_is_neither_sent_nor_delivered(batches: Batches) -> None:
    batch = await sealed(batches, "aaa", "bbb", "ccc")
    assert await batches.drop("aaa") is BatchCallStatus.SENT
    await put(batches, "bbb", "1.2")
    assert await batches.load_bodies(batch) == {"3": b"body"}
    assert await batches.deliver(batch, "1", b"late") is None
    assert await batches.deliver(batch, "2", b"late") is None
    assert await batches.drop("bbb", "1.1") is BatchCallStatus.NONE
    assert await batches.drop("bbb", "1.2") is BatchCallStatus.WAITING
    assert await batches.load_lanes() == {"lane": "about"}


async def test_a_call_that_is_lost_holds_up_nobody_behind_it(store: Store, batches: Batches) -> None:
    await put(batches, "aaa")
    await store.connection.call("DEL", f"{store.all_shards[0].root}:batch:call:aaa")
    await put(batches, "bbb")
    batch_id, left = await seal(batches, seconds=60.0)
    assert batch_id == ""
    assert 50.0 < left <= 60.0
    batch_id, _ = await seal(batches)
    assert batch_id
    assert (await batches.load_call("bbb", "1.1")).status is BatchCallStatus.SENT


def of_batch(store: Store, name: str, batch: Batch | None = None) -> str:
    return f"{store.all_shards[0].root}:batch:{name}" + (f":{batch.batch_id}" if batch else "")


@pytest.mark.parametrize("damage", ["lost", "half", "overwritten"])
async def test_lost_batch_ends_and_its_calls_are_repeated(store: Store, batches: Batches, damage: str) -> None:
    for cid in ("aaa", "bbb", "ccc"):
        await begin(store, cid)
        await store.connection.call("HDEL", store.known_keys(cid).meta, "rung")
    batch = await sealed(batches, "aaa", "bbb", "ccc")
    await batches.deliver(batch, "3", b"result")
    await store.connection.call("DEL", store.all_shards[0].ready)
    about = of_batch(store, "about", batch)
    if damage == "half":
        await store.connection.call("HDEL", about, "count")
    else:
        await store.connection.call("DEL", about)
    if damage == "overwritten":
        await store.connection.call("SET", about, "a string")
    assert await batches.lease(batch.batch_id, "w1", lease_seconds=60.0) is None
    assert await batches.find_due() == []
    assert sorted(await notified(store)) == ["aaa", "bbb"]  # they put their calls again
    assert (await batches.load_call("aaa", "1.1")).status is BatchCallStatus.NONE
    assert (await batches.load_call("ccc", "1.1")).result == b"result"
    assert await batches.list_numbers(batch) == []


@pytest.mark.parametrize("name", ["open", "queue:lane", "lanes"])
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_call_with_lost_parts_is_repeated(store: Store, batches: Batches, name: str, is_sealed: bool) -> None:
    await put(batches, "aaa")
    if is_sealed:
        assert (await seal(batches))[0]
    await store.connection.call("DEL", of_batch(store, name))
    is_lost = (name == "open") is is_sealed
    kept = BatchCallStatus.SENT if is_sealed else BatchCallStatus.WAITING
    assert (await batches.load_call("aaa", "1.1")).status is (BatchCallStatus.NONE if is_lost else kept)
    await put(batches, "aaa")
    assert (await batches.load_call("aaa", "1.1")).status is (BatchCallStatus.WAITING if is_lost else kept)


@pytest.mark.parametrize("name", ["open", "queue:lane", "lanes", "call:aaa"])
async def test_overwritten_batch_keys_delay_no_call(store: Store, batches: Batches, name: str) -> None:
    await store.connection.call("SET", of_batch(store, name), "a string")
    assert await batches.load_lanes() == {}
    assert (await batches.load_call("aaa", "1.1")).status is BatchCallStatus.NONE
    await put(batches, "aaa")
    batch_id, _ = await seal(batches)
    assert await batches.find_due() == [batch_id]


async def test_a_lane_in_which_nobody_waits_is_forgotten(batches: Batches) -> None:
    batch = await sealed(batches, "aaa")
    for number in range(20):  # invented model names
        await put(batches, f"c{number}", lane=f"lane-{number}")
        await batches.drop(f"c{number}")
    for lane in await batches.load_lanes():
        await batches.seal(lane, "w1", lease_seconds=60.0, max_calls=10, max_bytes=1_000, gather_seconds=0.0)
    assert await batches.load_lanes() == {}
    taken = await batches.lease(batch.batch_id, "w1", lease_seconds=60.0)
    assert taken.lane_description == "about"  # the worker that looks after it may have started since


@pytest.mark.parametrize("field", ["body", "step", "all", "number"])
async def test_unusable_call_blocks_no_other_of_its_batch(store: Store, batches: Batches, field: str) -> None:
    batch = await sealed(batches, "aaa", "bbb")
    if field == "number":
        await store.connection.call("HSET", of_batch(store, "calls", batch), "x", "rubbish")
    elif field == "all":
        await store.connection.call("DEL", of_batch(store, "call:aaa"))
        await store.connection.call("SET", of_batch(store, "call:aaa"), "a string")
    elif field == "body":
        await store.connection.call("HSET", of_batch(store, "call:aaa"), "body", "not compressed")
    else:
        await store.connection.call("HDEL", of_batch(store, "call:aaa"), "step")
    assert (await batches.load_bodies(batch))["2"] == b"body"
    assert await batches.record_state(batch, "w1", provider="p-1")
    assert await batches.list_numbers(batch) == ["1", "2"]
    for number in await batches.list_numbers(batch):
        await batches.deliver(batch, number, b"result")
    assert (await batches.load_call("bbb", "1.1")).result == b"result"
