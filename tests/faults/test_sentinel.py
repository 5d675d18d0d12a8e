"""Sentinel fails the store over: clients and workers follow, and events confirmed by a replica survive."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from celery import Celery
from celery.result import AsyncResult

from broker.celery.app import make_connection_settings
from broker.runtime import OutcomeUnknown, StoreError, StoreMisconfigured, StoreUnavailable, make_celery_url
from broker.store.connection import MultiplexedConnection
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.faults.harness import FaultCluster, steps
from tests.polling import unhurried, until
from tests.sentinels import PASSWORD, SERVICE, SentinelGroup, fail_over
from tests.stores import GROUPS_OF, running, server_program, valkey_program


@pytest.fixture(params=GROUPS_OF)
async def group(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SentinelGroup]:
    program = server_program(request.param)
    async with SentinelGroup(program, tmp_path).running() as group:
        yield group


async def test_waiting_read_leaves_a_stopped_primary_when_another_is_promoted(group: SentinelGroup) -> None:
    store = await open_store(group.url, patience_seconds=unhurried(60))
    reader = store.connection.another(reply_timeout_seconds=unhurried(300))
    await store.call("XADD", "deck:test", "1-1", "a", "b")
    reading = asyncio.create_task(reader.call("XREAD", "BLOCK", 0, "STREAMS", "deck:test", "1-1"))
    old = await group.primary()

    async def is_reading() -> bool:
        return b"blocked_clients:1" in await old.call("INFO", "clients")

    await until(is_reading, limit=60, what="blocked reader")
    old.send(signal.SIGSTOP)
    with pytest.raises(OutcomeUnknown, match="the primary is now"):  # far sooner than the reader's own limit
        await asyncio.wait_for(reading, unhurried(60))
    await store.call("SET", "deck:test:after", "1")
    old.send(signal.SIGCONT)
    assert await group.primary() is not old
    await reader.aclose()
    await store.aclose()


async def test_sentinel_that_missed_a_fail_over_misleads_only_once(group: SentinelGroup) -> None:
    """The first Sentinel names a server that is gone; then the next one is asked."""

    served: list[asyncio.Task[None] | None] = []

    async def mislead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        while chunk := await reader.read(4096):
            writer.write(b"+OK\r\n" * chunk.count(b"AUTH"))
            writer.write(b"*2\r\n$9\r\n127.0.0.1\r\n$1\r\n1\r\n" * chunk.count(b"GET-MASTER"))
            writer.write(b"*0\r\n" * chunk.count(b"REPLICAS"))
            writer.write(b"*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n" * chunk.count(b"SUBSCRIBE"))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(mislead, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = await open_store(group.url.replace("@", f"@127.0.0.1:{port},", 1), opening_seconds=unhurried(60))
    assert await store.call("SET", "deck:test", "1") == b"OK"
    await store.aclose()
    await asyncio.gather(*filter(None, served))
    server.close()
    await server.wait_closed()


async def test_a_stale_primary_confirms_nothing(group: SentinelGroup) -> None:
    old = await group.primary()
    stale = MultiplexedConnection(old.url, acks="replica")
    assert await stale.call("SET", "deck:before", "1") == b"OK"
    old.send(signal.SIGSTOP)
    new = await group.until_promoted(other_than=old)
    await group.until_replicated(new, count=1)  # the other replica has left the stale primary
    old.send(signal.SIGCONT)
    with pytest.raises((OutcomeUnknown, StoreUnavailable)):
        await stale.call("SET", "deck:stale", "1")
    await stale.aclose()
    assert await new.call("GET", "deck:before") == b"1"
    assert await group.primary() is new
    assert await new.call("GET", "deck:stale") is None


async def test_replica_of_a_replaced_primary_confirms_nothing(group: SentinelGroup) -> None:
    """One that is not promoted follows the replaced primary for a while; what both have in this time is lost."""
    old = await group.until_whole()
    await group.spare(next(server for server in group.servers if server is not old))
    store = await open_store(group.url, patience_seconds=unhurried(60), acks="replica")
    is_over, confirmed = asyncio.Event(), set[bytes]()

    async def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            with contextlib.suppress(StoreError):
                await store.connection.call("SADD", "deck:test", number)
                confirmed.add(b"%d" % number)

    writing = asyncio.create_task(write())
    await until(lambda: len(confirmed) > 10, limit=60, what="confirmed writes")
    new = await group.order(old, is_coordinated=False)
    after = len(confirmed)
    await until(lambda: len(confirmed) > after + 10, limit=60, what="confirmed writes of the new primary")
    is_over.set()
    await writing
    await store.aclose()
    assert confirmed - set(await new.call("SMEMBERS", "deck:test")) == set()


class SentinelCluster(FaultCluster):
    """Workers on a store, a broker and a result backend behind Sentinels."""

    group: SentinelGroup

    @contextlib.asynccontextmanager
    async def on(self, group: SentinelGroup) -> AsyncIterator[SentinelCluster]:
        self.group = group
        self.url_for_workers = group.url
        self.client = Client(await open_store(group.url, patience_seconds=unhurried(60)))
        try:
            yield self
        finally:
            await self.end_workers()


async def check_result(sent: AsyncResult) -> None:
    """Wait until a run has finished; ask for its result, because Celery's subscription may miss it in a fail-over."""
    await until(lambda: asyncio.to_thread(sent.ready), limit=unhurried(120), what=f"the result of {sent.id}")
    assert sent.result["state"] == "finished"


async def test_conversations_and_celery_tasks_go_on_over_fail_overs(group: SentinelGroup, tmp_path: Path) -> None:
    root = tmp_path / "cluster"
    root.mkdir()
    async with SentinelCluster(root).on(group) as cluster:
        celery_url = make_celery_url(group.url)
        turns = steps(8, seconds=0.4)
        model = cluster.script(*turns)
        environment = {"DECKHANDS_CELERY_URL": celery_url, "DECKHANDS_ACKS": "replica", "LLM_MODEL": model}
        for start in (cluster.start_controller, cluster.start_tool, cluster.start_ingress, cluster.start_jobs):
            start(**environment)
        cluster.start_beat(**environment)
        app = Celery("producer", set_as_current=False)
        app.conf.update(make_connection_settings(celery_url, celery_url))
        sent = await asyncio.to_thread(app.send_task, "deckhands.run", ["do it"], {}, queue="deckhands")
        ids = await cluster.submit(turns, count=3, model=model)
        await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids), limit=unhurried(60))
        old, _ = await fail_over(group)
        await cluster.check(ids, commands=8, limit=unhurried(120))
        await check_result(sent)
        late = await asyncio.to_thread(app.send_task, "deckhands.run", ["again"], {}, queue="deckhands")
        await check_result(late)
        cluster.check_that_all_live()
        assert await group.primary() is not old


@pytest.mark.parametrize("appends", ["yes", "no"])
async def test_disk_confirms_only_with_an_append_only_file(appends: str) -> None:
    with contextlib.contextmanager(running)(valkey_program(), "--appendonly", appends) as server:
        connection = MultiplexedConnection(server.url, acks="disk")
        if appends == "yes":
            assert await connection.call_many([("SET", "deck:test", "1"), ("GET", "deck:test")]) == [b"OK", b"1"]
        else:
            with pytest.raises(StoreMisconfigured, match="cannot confirm writes"):
                await connection.call("SET", "deck:test", "1")
        await connection.aclose()


async def test_writes_at_once_share_confirmations() -> None:
    with contextlib.contextmanager(running)(valkey_program()) as server:
        connection = MultiplexedConnection(server.url, acks="disk")
        await asyncio.gather(*(connection.call("SET", f"deck:{number}", number) for number in range(500)))
        stats = (await connection.call("INFO", "commandstats")).decode()
        (asked,) = [line for line in stats.splitlines() if line.startswith("cmdstat_waitaof:")]
        assert int(asked.partition("calls=")[2].partition(",")[0]) <= 20
        await connection.aclose()


async def test_sentinels_that_are_away_or_refuse_are_named(group: SentinelGroup) -> None:
    wrong = group.url.replace("sentinel_password=", "sentinel_password=x")
    with pytest.raises(StoreMisconfigured, match=r"The Sentinel at .* answered: WRONGPASS"):
        await open_store(wrong)
    with pytest.raises(StoreUnavailable, match="monitors no other"):
        await open_store(group.url.replace(f"/{SERVICE}", "/other"))
    with pytest.raises(StoreError) as refused:
        await open_store(group.url.replace(PASSWORD, "not-it"))
    assert "not-it" not in str(refused.value)
    with pytest.raises(StoreUnavailable, match="No Sentinel names a primary of deck"):
        await open_store("redis+sentinel://127.0.0.1:1,127.0.0.1:2/deck")
