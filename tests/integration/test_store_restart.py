"""A store whose server is restarted or killed: everybody continues, nothing acknowledged is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from broker.coordination.wakeups import ReadyStream
from broker.log.append_call import Appended, Duplicate
from broker.store.store import open_store
from tests.broker_parts import CID, begin, enter, message
from tests.stores import RealServer, redis_program, running, valkey_program


@pytest.fixture(params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server of this test alone, which writes every command to disk before it answers."""
    program = valkey_program() if request.param == "valkey" else redis_program()
    yield from running(program, "--appendfsync", "always")


async def test_a_restart_is_waited_for(own_server: RealServer) -> None:
    store = await open_store(own_server.url, patience_seconds=20)
    log = await begin(store, CID, message("before"))
    own_server.stop()
    waiting = asyncio.create_task(log.append(CID, [message("after")]))
    await asyncio.sleep(0)
    own_server.start()
    assert await asyncio.wait_for(waiting, 60) == Appended(3, 3)
    await store.check_generation()
    assert [event.id for event in await log.read(CID)] == [1, 2, 3]
    await store.aclose()


async def test_a_killed_server_keeps_what_it_has_acknowledged(own_server: RealServer) -> None:
    store = await open_store(own_server.url, patience_seconds=20)
    log = await begin(store)
    acknowledged = 1
    for _ in range(3):
        under_way = [
            asyncio.create_task(log.append(CID, [message(str(n))], key=f"{acknowledged}.{n}")) for n in range(40)
        ]
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        own_server.kill()
        own_server.start()
        outcomes = await asyncio.wait_for(asyncio.gather(*under_way), 60)
        assert all(isinstance(outcome, Appended | Duplicate) for outcome in outcomes)
        assert sorted(outcome.first_id for outcome in outcomes) == list(range(acknowledged + 1, acknowledged + 41))
        acknowledged += 40
    assert [event.id for event in await log.read(CID)] == list(range(1, 122))
    await store.aclose()


async def test_a_blocked_reader_hears_of_news_after_the_restart(own_server: RealServer) -> None:
    store = await open_store(own_server.url, patience_seconds=20)
    await enter(store, "w1")
    stream = ReadyStream(store, store.all_shards[0], "w1")
    reading = asyncio.create_task(stream.read(limit=1))
    await asyncio.sleep(0)
    own_server.kill()
    own_server.start()
    await begin(store)
    found = await asyncio.wait_for(reading, 60)
    while not found:
        found = await asyncio.wait_for(stream.read(limit=1), 60)
    assert [cid for cid, _ in found] == [CID]
    await stream.aclose()
    await store.aclose()
