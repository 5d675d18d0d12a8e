"""What befalls a group of servers besides a death: partitions, lost tails, restarts, refusals, new names and logins."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker.runtime import BrokerSettings, OutcomeUnknown, StoreError, StoreUnavailable, make_celery_url
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from tests.certificates import Authority
from tests.conformance import test_turns as turns
from tests.faults.harness import steps
from tests.faults.test_lost_tail import check as check_gaps
from tests.faults.test_sentinel import SentinelCluster
from tests.polling import unhurried, until
from tests.sentinels import PASSWORD, SERVICE, SentinelGroup, Server, begin_fail_over, end_fail_over, fail_over
from tests.stores import GROUPS_OF, redis_program, server_program

USER, TOKENS = "worker", 8
LOADED_KEYS = 8_000
LOAD_DELAY_MICROSECONDS = 400


@pytest.fixture(params=GROUPS_OF)
async def group(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SentinelGroup]:
    async with SentinelGroup(server_program(request.param), tmp_path / "group").running() as group:
        yield group


@pytest.fixture(params=GROUPS_OF)
async def linked(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SentinelGroup]:
    async with SentinelGroup(server_program(request.param), tmp_path / "group", is_linked=True).running() as group:
        yield group


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Store]:
    store = await open_store(url, patience_seconds=unhurried(60), opening_seconds=unhurried(60), **options)
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.asynccontextmanager
async def writing(store: Store) -> AsyncIterator[list[int]]:
    """Write numbers all the time, each as a key; yield those that were acknowledged."""
    written: list[int] = []
    is_over = asyncio.Event()

    async def write() -> None:
        for number in itertools.count():
            await store.call("SET", f"deck:written:{number}", number)
            written.append(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), 0.005)
                return

    task = asyncio.create_task(write())
    try:
        yield written
    finally:
        is_over.set()
        await task


async def check_written(server: Server, written: list[int]) -> None:
    for number in written:
        assert await server.call("EXISTS", f"deck:written:{number}") == 1, number


async def error_count(server: Server, error: str) -> int:
    stats = (await server.call("INFO", "errorstats")).decode()
    found = [line for line in stats.splitlines() if line.startswith(f"errorstat_{error}:")]
    return int(found[0].rpartition("=")[2]) if found else 0


async def grow(written: list[int], by: int = 20) -> None:
    least = len(written) + by
    await until(lambda: len(written) >= least, limit=60, what="further writes")


async def test_a_partitioned_primary_confirms_nothing_and_returns_as_a_replica(linked: SentinelGroup) -> None:
    old = await linked.primary()
    async with opened(linked.url, acks="replica") as store, writing(store) as written:
        await grow(written)
        near, deaf = MultiplexedConnection(old.url), MultiplexedConnection(old.url, acks="replica")
        assert await deaf.call("SET", "deck:before", "1") == b"OK"
        new = await begin_fail_over(linked, old, "cut")
        assert await near.call("SET", "deck:near", "1") == b"OK"  # a client on its side, which demands nothing
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            await deaf.call("SET", "deck:deaf", "1")
        await grow(written)
        new = await end_fail_over(linked, old, new, "cut")
        with pytest.raises(StoreError):
            await near.call("SET", "deck:near:after", "1")  # it is a replica now
        await grow(written)
        for connection in (near, deaf):
            await connection.aclose()
    for server in (old, new):
        assert await server.call("EXISTS", "deck:near", "deck:deaf", "deck:near:after") == 0
        assert await server.call("GET", "deck:before") == b"1"
    await check_written(new, written)


async def test_a_lost_tail_is_named_and_all_conversations_end(group: SentinelGroup, tmp_path: Path) -> None:
    """With `acks` local, the replicas lose their link before the primary dies: what was acknowledged since is lost."""
    async with at_work(group, tmp_path, steps(8, seconds=0.3), count=4, acks="local") as (cluster, ids):
        old = await group.primary()
        replicas = [server for server in group.servers if server is not old]
        for server in replicas:
            await server.call("CONFIG", "SET", "masterauth", "wrong")
        await old.call("CLIENT", "KILL", "TYPE", "replica")
        counts = {cid: await cluster.client.log.load_last_id(cid) for cid in ids}

        async def have_grown() -> bool:
            return all([await cluster.client.log.load_last_id(cid) >= count + 4 for cid, count in counts.items()])

        await cluster.until(have_grown, limit=unhurried(60), what="a tail")
        new = await begin_fail_over(group, old, "kill")
        for server in replicas:
            await server.call("CONFIG", "SET", "masterauth", PASSWORD)
        new = await end_fail_over(group, old, new, "kill")
        await cluster.settle(ids, limit=unhurried(120))
        await check_gaps(cluster, ids)


async def test_a_rolling_restart_is_not_noticed(group: SentinelGroup, tmp_path: Path) -> None:
    async with at_work(group, tmp_path, steps(12, seconds=0.4), count=3, acks="replica") as (cluster, ids):
        first = await group.primary()
        for server in [server for server in group.servers if server is not first]:
            await restart(server, primary=first)
            first = await group.until_whole()
        first.send(signal.SIGTERM)
        await restart(first, primary=await group.until_promoted(other_than=first))
        await group.until_whole()
        await cluster.check(ids, commands=12, limit=unhurried(120))
        cluster.check_that_all_live()


async def restart(server: Server, *, primary: Server) -> None:
    assert server.process is not None
    server.send(signal.SIGTERM)
    await asyncio.to_thread(server.process.wait)
    server.start(primary=primary.known_port)


@contextlib.asynccontextmanager
async def at_work(
    group: SentinelGroup, folder: Path, turns: list[dict[str, Any]], *, count: int, acks: str
) -> AsyncIterator[tuple[SentinelCluster, list[str]]]:
    """Start workers, and yield them and their conversations once each has begun its first command."""
    root = folder / "cluster"
    root.mkdir()
    async with SentinelCluster(root).on(group) as cluster:
        cluster.start(DECKHANDS_CELERY_URL=make_celery_url(group.url), DECKHANDS_ACKS=acks)
        ids = await cluster.submit(turns, count=count)
        await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids), limit=unhurried(60))
        yield cluster, ids


async def test_actions_wait_for_no_entries_that_a_former_replica_miscounts(group: SentinelGroup) -> None:
    """In Redis 7.0 a replica knows the number of entries read from its first copy alone, so its lag is too large."""
    async with opened(group.url, acks="replica") as store:
        await turns.controllers(store)
        for name in ("copied", "followed", "promoted"):
            _, queue = await turns.tools(store)
            ids = turns.numbered(name, 30)
            await turns.start_all(store, ids)
            await turns.act(store, ids)
            assert sorted(await turns.performed(store, queue, len(ids))) == sorted(ids)
            if name == "copied":
                first = await group.primary()
                for server in [server for server in group.servers if server is not first]:
                    await restart(server, primary=first)
                    await group.until_whole()
            elif name == "followed":
                await fail_over(group)


async def test_a_primary_that_loads_is_waited_for(group: SentinelGroup) -> None:
    old = await group.primary()
    async with opened(group.url, acks="replica") as store:
        await store.call_many([("SET", f"deck:loaded:{number}", 1) for number in range(LOADED_KEYS)])
        old.kill()
        old.options = (
            "--key-load-delay",
            str(LOAD_DELAY_MICROSECONDS),
            "--loading-process-events-interval-bytes",
            "1024",
        )
        old.start()  # before a Sentinel regards it as down
        await store.call("SET", "deck:after", "1")
    assert await error_count(old, "LOADING") > 0
    assert await group.primary() is old
    assert await old.call("GET", "deck:after") == b"1"


async def test_a_demoted_primary_answers_readonly(group: SentinelGroup) -> None:
    """A connection that no Sentinel has warned learns it by the reply, and asks again."""
    old = await group.primary()
    async with opened(group.url) as store:
        await store.call("SET", "deck:before", "1")
        other = next(server for server in group.servers if server is not old)
        await old.call("REPLICAOF", "127.0.0.1", other.port)
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await store.connection.call("SET", "deck:while", "1")
        await old.call("REPLICAOF", "NO", "ONE")
        await store.call("SET", "deck:after", "1")


class UrlFile:
    """The file with the store's URL, as DECKHANDS_URL_FILE names it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.path = folder / "url"
        self.write(url)

    def write(self, url: str) -> None:
        draft = self.path.with_name("draft")
        draft.write_text(url)
        draft.replace(self.path)

    @property
    def url(self) -> str:
        return BrokerSettings.from_env({"DECKHANDS_URL_FILE": str(self.path)}).url


async def test_a_renamed_service_is_found_by_the_new_url(group: SentinelGroup, tmp_path: Path) -> None:
    file, primary = UrlFile(tmp_path, group.url), await group.primary()
    async with opened(file.url, acks="replica") as store, writing(store) as written:
        await grow(written)
        await group.call_sentinels("SENTINEL", "REMOVE", SERVICE)
        await group.call_sentinels("SENTINEL", "MONITOR", "renamed", "127.0.0.1", primary.port, 2)
        await group.call_sentinels("SENTINEL", "SET", "renamed", "auth-pass", PASSWORD)
        file.write(group.url_of(service="renamed").replace("127.0.0.1", "localhost"))
        await primary.call("CLIENT", "KILL", "TYPE", "normal")
        await grow(written)
    await check_written(primary, written)


async def test_credentials_that_expire_are_read_from_the_file(group: SentinelGroup, tmp_path: Path) -> None:
    """Each token is accepted for a short time; then the server ends the connections that used it."""
    tokens = [f"token-{number}" for number in range(TOKENS)]

    async def set_user(*rules: str) -> None:
        for server in group.servers:
            await server.call("ACL", "SETUSER", USER, "on", "~*", "&*", "+@all", *rules)

    await set_user(f">{tokens[0]}")
    file = UrlFile(tmp_path, group.url_of(login=f"{USER}:{tokens[0]}"))
    async with opened(file.url, acks="replica") as store, writing(store) as written:
        for earlier, later in itertools.pairwise(tokens):
            await grow(written)
            await set_user(f">{later}")
            file.write(group.url_of(login=f"{USER}:{later}"))
            await set_user(f"<{earlier}")
            for server in group.servers:
                await server.call("CLIENT", "KILL", "USER", USER)
        await grow(written)
        old = await group.primary()
        new = await begin_fail_over(group, old, "kill")
        await grow(written)
    await check_written(new, written)


async def test_rotated_certificates_are_trusted_over_a_fail_over(tmp_path: Path) -> None:
    """Servers and Sentinels by TLS; the servers get other certificates of the same authority, the first ones are gone."""
    files, others = tmp_path / "files", tmp_path / "others"
    authority = Authority()
    for folder in (files, others):
        folder.mkdir()
        authority.sign_in(folder)
    async with SentinelGroup(redis_program(), tmp_path / "group", tls=files).running() as group:
        async with opened(group.url, acks="replica") as store, writing(store) as written:
            await grow(written)
            for server in group.servers:
                await server.call(
                    *("CONFIG", "SET", "tls-cert-file", str(others / "cert.pem")),
                    *("tls-key-file", str(others / "key.pem")),
                )
                await server.call("CLIENT", "KILL", "TYPE", "normal")
                server.tls = others  # a restart keeps it
            await grow(written)
            _, new = await fail_over(group)
            await grow(written)
        await check_written(new, written)


async def test_a_client_follows_when_it_starts_during_a_fail_over(group: SentinelGroup) -> None:
    old = await group.primary()
    old.kill()
    async with opened(group.url, acks="replica") as store:
        client = Client(store)
        conversation_id = await client.submit("do it")
        new = await group.until_promoted(other_than=old)
        assert await new.call("XLEN", store.known_keys(conversation_id).events) == 2
        await client.aclose()
