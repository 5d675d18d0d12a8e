"""The store's primary is demoted (F52): no worker ends, and all connect to the new one when its name leads there."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import StoreError, StoreMisconfigured
from broker.store.connection import MultiplexedConnection
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.faults.harness import FaultCluster, steps
from tests.faults.proxy import Name
from tests.faults.server_process import free_port
from tests.faults.test_lost_tail import check
from tests.polling import unhurried
from tests.stores import GROUPS_OF, RealServer, running, server_program, valkey_program


class Pair(FaultCluster):
    """A cluster on a primary and its replica behind one name."""

    primary: RealServer
    replica: RealServer
    name: Name

    @contextlib.asynccontextmanager
    async def on(self, program: str) -> AsyncIterator[Pair]:
        folder = Path(tempfile.mkdtemp(prefix="deck-"))
        servers = []
        for letter in "ab":
            (folder / letter).mkdir()
            port = free_port()
            servers.append(RealServer(program, folder / letter, ("--port", str(port))))
            self.ports[servers[-1].socket] = port
            servers[-1].start()
        self.primary, self.replica = servers
        try:
            async with Name(folder / "name", self.primary.socket).running() as self.name:
                await self.to(self.replica, "REPLICAOF", "127.0.0.1", self.ports[self.primary.socket])
                await self.until(lambda: self.says(self.replica, b"master_link_status:up"), what="replication")
                self.client = Client(await open_store(f"unix://{folder}/name", patience_seconds=60))
                try:
                    yield self
                finally:
                    await self.end_workers()
        finally:
            for server in servers:
                server.stop()
            shutil.rmtree(folder)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ports: dict[Path, int] = {}

    def start_everybody(self) -> None:
        url = f"unix://{self.name.path}"
        self.url_for_workers = url
        environment = {"DECKHANDS_CELERY_URL": f"redis+socket://{self.name.path}?virtual_host=1"}
        self.start_controller(**environment)
        self.start_tool(**environment)
        self.start_ingress(**environment)
        self.start_jobs(**environment)

    async def to(self, server: RealServer, *command: str | int) -> Any:
        connection = MultiplexedConnection(server.url)
        try:
            return await connection.call(*command)
        finally:
            await connection.aclose()

    async def says(self, server: RealServer, line: bytes) -> bool:
        return line in await self.to(server, "INFO", "replication")


@pytest.fixture(params=GROUPS_OF)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path).on(server_program(request.param)) as pair:
        yield pair


async def test_workers_follow_a_promoted_replica(pair: Pair) -> None:
    pair.start_everybody()
    ids = await pair.submit(steps(6, seconds=0.5), count=4)
    await pair.until(lambda: all("begin-0" in pair.effects(cid) for cid in ids))
    await pair.to(pair.primary, "FAILOVER")
    await pair.until(lambda: pair.says(pair.primary, b"role:slave"), what="demotion")
    for worker in ("c1", "t1"):  # until the name leads elsewhere
        await pair.until(lambda worker=worker: "the store is unavailable" in pair.log_of(worker), what="line")  # type: ignore[misc]
    pair.name.upstream = pair.replica.socket
    await pair.check(ids, commands=6)
    await pair.until(lambda: all("is available again" in pair.log_of(worker) for worker in ("c1", "t1")), what="line")
    more = await pair.submit(steps(2))
    await pair.settle(more)
    pair.check_that_all_live()


async def test_events_of_a_stale_primary_are_named_as_lost(pair: Pair) -> None:
    pair.start_everybody()
    ids = await pair.submit(steps(8, seconds=0.3), count=3)
    await pair.until(lambda: all("begin-1" in pair.effects(cid) for cid in ids))
    await pair.to(pair.replica, "REPLICAOF", "NO", "ONE")
    last_ids = {cid: await pair.client.log.load_last_id(cid) for cid in ids}

    async def have_grown() -> bool:
        return all([await pair.client.log.load_last_id(cid) >= last_id + 2 for cid, last_id in last_ids.items()])

    await pair.until(have_grown)
    pair.name.upstream = pair.replica.socket
    await pair.to(pair.primary, "REPLICAOF", "127.0.0.1", pair.ports[pair.replica.socket])
    await pair.settle(ids)
    await check(pair, ids)
    pair.check_that_all_live()


async def test_a_node_of_a_cluster_is_refused_with_a_remedy() -> None:
    options = ("--port", str(free_port()), "--cluster-enabled", "yes")
    with contextlib.contextmanager(running)(valkey_program(), *options) as server:
        with pytest.raises(StoreMisconfigured, match=r"is a node of a Redis Cluster.* Use redis\+cluster://"):
            await open_store(server.url)
        connection = MultiplexedConnection(server.url)
        with pytest.raises(StoreError) as refused:
            await connection.call("GET", "deck:store")
        assert "8975" not in str(refused.value)
        await connection.aclose()


async def test_a_sentinel_is_refused_with_a_remedy(tmp_path: Path) -> None:
    port = free_port()
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n")
    sentinel = await asyncio.create_subprocess_exec(
        *(valkey_program(), str(settings), "--sentinel"), stdout=asyncio.subprocess.DEVNULL
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with pytest.raises(
            StoreMisconfigured,
            match=r"names a Sentinel as if it were a store\. Use redis\+sentinel://",
        ):
            await open_store(url, opening_seconds=unhurried(10))
    finally:
        sentinel.kill()
        await sentinel.wait()
