"""The log's server dies, is slow, forgets how to answer, or loses the Celery side: conversations do not notice for long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from broker.runtime.child import EXIT_STORE_REPLACED
from broker.store.connection import MultiplexedConnection
from deckhands.chaos.proxy import StoreProxy
from tests.faults.harness import FaultCluster, steps
from tests.stores import LossyWire


async def test_store_killed_and_restarted(durable_cluster: FaultCluster) -> None:
    cluster = durable_cluster
    cluster.start()
    ids = await cluster.submit(steps(4, seconds=0.5), count=5)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    seen = {cid: await cluster.client.events(cid) for cid in ids}
    await cluster.restart_store()
    await cluster.check(ids, commands=4)
    for cid in ids:
        assert (await cluster.client.events(cid))[: len(seen[cid])] == seen[cid]


async def test_celery_broker_emptied(cluster: FaultCluster) -> None:
    cluster.start()
    ids = await cluster.submit(steps(4, seconds=0.3), count=3)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    celery_side = MultiplexedConnection(f"{cluster.store.url}?db=1")
    await celery_side.call("FLUSHDB")
    await celery_side.aclose()
    await cluster.settle(ids)
    more = await cluster.submit(steps(2))
    await cluster.settle(more)
    await cluster.check(ids, commands=4)
    await cluster.check(more, commands=2)


async def test_store_emptied_stops_the_workers_instead_of_beginning_anew(cluster: FaultCluster) -> None:
    cluster.start()
    ids = await cluster.submit(steps(1))
    await cluster.settle(ids)
    await cluster.call_each("FLUSHALL")
    assert await cluster.until_ended("c1") == EXIT_STORE_REPLACED
    assert await cluster.until_ended("t1") == EXIT_STORE_REPLACED
    assert "emptied or replaced" in cluster.log_of("c1")


async def test_store_refusing_writes_is_reported_once_and_awaited(cluster: FaultCluster) -> None:
    cluster.start()
    ids = await cluster.submit(steps(3, seconds=1.0), count=3)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    await cluster.call_each("CONFIG", "SET", "maxmemory", "1")
    for name in ("c1", "t1"):
        await cluster.until(lambda name=name: "the store is unavailable" in cluster.log_of(name), what="line")  # type: ignore[misc]
    await cluster.call_each("CONFIG", "SET", "maxmemory", "0")
    await cluster.check(ids, commands=3)
    for name in ("c1", "t1"):
        await cluster.until(lambda name=name: "the store is available again" in cluster.log_of(name), what="line")  # type: ignore[misc]
        assert cluster.log_of(name).count("the store is unavailable") == 1
        assert "OOM" in cluster.log_of(name)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_lost_replies_double_nothing(cluster: FaultCluster, seed: int) -> None:
    cluster.require_one_server()
    socket, seeded = Path(cluster.store.socket), random.Random(seed)
    async with LossyWire(socket, socket.parent) as wire:
        wire.swallow = lambda _: seeded.random() < 0.05
        cluster.url_for_workers = cluster.store.url.replace(str(socket), str(wire.path))
        cluster.start()
        ids = await cluster.submit(steps(6), count=10)
        await cluster.settle(ids, limit=90)
        await cluster.check(ids, commands=6)
        assert wire.swallowed >= 5
        for name in ("c1", "t1"):
            cluster.kill(name)


async def test_lost_late_and_doubled_wakeups(cluster: FaultCluster) -> None:
    """The streams that carry rings and actions are cut and doubled at random while conversations run."""
    seeded = random.Random(7)
    cluster.start()
    ids = await cluster.submit(steps(4, seconds=0.1), count=6)
    store = cluster.client.store
    call = store.connection.call
    names = store.all_shards[0]

    async def worry() -> bool:
        (_, keys) = await call("SCAN", 0, "MATCH", "deck:*mail", "COUNT", 1000)
        for key in [names.ready, names.actions("node:node1"), names.actions("pool:bash"), *keys]:
            if seeded.random() < 0.2:
                await call("XTRIM", key, "MAXLEN", 0)
            elif (entries := await call("XREVRANGE", key, "+", "-", "COUNT", 1)) and seeded.random() < 0.5:
                await call("XADD", key, "*", *entries[0][1])
        await call("XADD", names.ready, "*", "c", seeded.choice(ids))
        rows = [await cluster.client.row(cid) for cid in ids]
        return all(row.state == "finished" for row in rows)

    await cluster.until(worry, limit=90)
    await cluster.check(ids, commands=4)


@pytest.mark.parametrize(
    "round_trip_seconds",
    [
        pytest.param(1.0, marks=pytest.mark.soak),
        *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (0.5, 2.0, 4.0)),
    ],
)
async def test_live_workers_are_not_buried_while_the_store_is_slow(
    cluster: FaultCluster, round_trip_seconds: float
) -> None:
    """The store is slow from a moment on, and workers that start meanwhile find it so."""
    cluster.require_one_server()
    proxy = StoreProxy(cluster.store.url, Path(f"{cluster.store.socket}.proxy"))
    names = ["c1", "c2", "t1", "c3", "t2"]
    async with proxy:
        cluster.url_for_workers = f"{cluster.store.url}.proxy"
        cluster.start_controller("c1")
        cluster.start_controller("c2")
        cluster.start_tool("t1")
        ids = await cluster.submit(steps(2), count=4)
        await cluster.settle(ids)
        proxy.delay_seconds = round_trip_seconds / 2
        cluster.start_controller("c3")
        cluster.start_tool("t2")
        ids += await cluster.submit(steps(2), count=4)
        await cluster.settle(ids, limit=60 + 60 * round_trip_seconds)
        proxy.delay_seconds = 0.0
        ids += await cluster.submit(steps(2))
        await cluster.check(ids, commands=2)
        assert not [name for name in names if "presumed dead" in cluster.log_of(name)]
        for name in names:
            cluster.kill(name)
