"""A Redis Cluster as the store: commands find their node, and follow moved slots and promoted replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from broker.celery.app import make_connection_settings
from broker.log.conversations import Conversations
from broker.runtime import (
    BrokerSettings,
    OutcomeUnknown,
    StoreError,
    StoreMisconfigured,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from broker.store.cluster import HOME_SLOT, ClusterConnection
from broker.store.connection import Argument
from broker.store.function_library import LIBRARY, VERSION_FIELD
from broker.store.keys import INBOX, STORE, ShardKeys, replies_key
from broker.store.routing import find_slot
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.operations.monitoring.census import Census
from deckhands.operations.monitoring.queues import read_depths
from tests.broker_parts import enter
from tests.clusters import PRIMARIES, Cluster, lasting_port
from tests.faults.harness import FaultCluster, steps
from tests.faults.server_process import free_port, server
from tests.polling import unhurried, until
from tests.sentinels import PASSWORD, Server
from tests.server_parts import add_key
from tests.stores import GROUPS_OF, running, server_program, valkey_program
from tests.turns import finish

SHARDS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=GROUPS_OF)
async def lasting_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    async with Cluster(server_program(request.param), tmp_path_factory.mktemp("cluster")).running() as cluster:
        yield cluster


@pytest.fixture(params=GROUPS_OF)
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    program = server_program(request.param)
    async with Cluster(program, tmp_path).running() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: Cluster) -> AsyncIterator[Store]:
    opened = await open_store(cluster.url, shards=SHARDS, patience_seconds=unhurried(60))
    yield opened
    await opened.aclose()


@pytest.fixture
async def workers(cluster: Cluster, tmp_path: Path) -> AsyncIterator[FaultCluster]:
    root = tmp_path / "workers"
    root.mkdir()
    async with FaultCluster(root).running_on(cluster, SHARDS) as workers:
        yield workers


def keys_of_all_nodes(count: int) -> list[str]:
    return [f"deck:test:{number}" for number in range(count)]


class CountingConnection(ClusterConnection):
    """Counts how often something is sent to each node."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sent: Counter[tuple[str, int]] = Counter()

    async def _exchange(self, node: tuple[str, int], commands: Sequence[Sequence[Argument]]) -> list[Any]:
        self.sent[node] += 1
        return await super()._exchange(node, commands)


class TestWhole:
    """What leaves a cluster whole: all share one."""

    @pytest.fixture
    async def cluster(self, lasting_cluster: Cluster) -> Cluster:
        for node in lasting_cluster.nodes[:PRIMARIES]:
            for command in (("FLUSHALL",), ("FUNCTION", "FLUSH")):
                await node.call(*command)
        return lasting_cluster

    async def test_a_new_store_has_functions_everywhere_and_64_shards(self, cluster: Cluster) -> None:
        store = await open_store(cluster.url)
        assert store.shards == 64
        for node in cluster.nodes[:PRIMARIES]:
            (library,) = await node.call("FUNCTION", "LIST")
            assert LIBRARY.encode() in library
        times = [await store.now(names) for names in store.all_shards]
        assert (max(times) - min(times)).total_seconds() < unhurried(60)
        again = await open_store(cluster.url, shards=3)
        assert (again.shards, again.generation) == (64, store.generation)
        for opened in (store, again):
            await opened.aclose()

    async def test_what_concerns_all_shards_asks_each_node_once(self, cluster: Cluster) -> None:
        opened = await open_store(cluster.url, patience_seconds=unhurried(60))
        connection = CountingConnection(cluster.url)
        store = replace(opened, connection=connection)
        assert store.shards == 64
        client, index = Client(store), Conversations(store)
        for number in range(100):
            await client.submit("do it", conversation_id=f"conversation-{number}")
        membership = await enter(store, "w1", node="n1")
        works: list[tuple[int, Callable[[], Awaitable[Any]]]] = [
            (1, lambda: membership.beat(1)),
            (1, index.count),
            (2, lambda: index.list_recent(limit=50)),  # their ids, and their rows
            (3, lambda: Census(store).count()),  # their numbers, their ids, and their states
            (
                3,
                lambda: read_depths(store, ["pool:bash"], sees_inbox=False),
            ),  # which exist, their groups, first entries
        ]
        for most, work in works:
            await work()
            connection.sent.clear()
            found = await work()
            home = connection.sent.pop(await connection._find_node(HOME_SLOT))
            assert set(connection.sent.values()) <= {most}, (found, connection.sent)
            assert home <= most + 2  # facts of the store itself
        for each in (connection, opened):
            await each.aclose()

    async def test_a_batch_is_split_by_node_and_answered_in_order(self, store: Store) -> None:
        keys = keys_of_all_nodes(60)
        connection = store.connection
        assert isinstance(connection, ClusterConnection)
        assert await connection.call_many([("SET", key, number) for number, key in enumerate(keys)]) == [b"OK"] * 60
        found = await connection.call_many([*(("GET", key) for key in keys), ("TIME",), ("HGET", STORE, "shards")])
        assert [int(value) for value in found[:60]] == list(range(60))
        assert found[-1] == b"6"
        sizes = await connection.call_each("DBSIZE")
        assert len(sizes) == PRIMARIES
        assert min(sizes.values()) > 5
        assert connection.connects == PRIMARIES

    async def test_a_scan_finds_the_keys_of_all_nodes(self, store: Store) -> None:
        keys = keys_of_all_nodes(60)
        await store.call_many([("SET", key, "x") for key in keys])
        cursor, found = b"0", set[bytes]()
        for turn in itertools.count():
            cursor, some = await store.call("SCAN", cursor, "MATCH", "deck:test:*", "COUNT", 10)
            found |= set(some)
            if cursor == b"0":
                break
            assert turn < 1_000
        assert found == {key.encode() for key in keys}

    async def test_moved_and_ask_are_followed(self, cluster: Cluster, store: Store) -> None:
        key, missing = "deck:{moving}:a", "deck:{moving}:b"
        await store.call("SET", key, "before")
        source = await cluster.find_node(find_slot(key))
        target = next(node for node in cluster.nodes[:PRIMARIES] if node is not source)
        await cluster.start_move(find_slot(key), source, target)
        assert await store.call_many([("GET", key), ("SET", missing, "new"), ("GET", missing)]) == [
            b"before",
            b"OK",
            b"new",
        ]
        await source.call(*("MIGRATE", "127.0.0.1", target.port, key, 0, 5000, "AUTH", "correct-horse"))
        assert await store.connection.call("APPEND", key, "+after") == 12
        await cluster.end_move(find_slot(key), source, target)
        assert await store.connection.call("GET", key) == b"before+after"
        assert await cluster.find_node(find_slot(key)) is target

    async def test_a_function_waits_until_its_slot_has_moved(self, cluster: Cluster, store: Store) -> None:
        names = store.all_shards[3]
        slot = find_slot(names.root)
        await store.now(names)
        source = await cluster.find_node(slot)
        target = next(node for node in cluster.nodes[:PRIMARIES] if node is not source)
        await cluster.start_move(slot, source, target)
        with pytest.raises(StoreUnavailable, match="being moved"):
            await store.connection.call("FCALL", "deck_now", 1, names.root)
        waiting = asyncio.create_task(store.now(names))
        await cluster.end_move(slot, source, target)
        assert (await waiting).year > 2000

    async def test_a_write_is_confirmed_on_each_node(self, cluster: Cluster) -> None:
        store = await open_store(cluster.url, shards=SHARDS, acks="replica", patience_seconds=unhurried(60))
        await store.call_many([("SET", key, "x") for key in keys_of_all_nodes(30)])
        for node in cluster.nodes[PRIMARIES:]:
            found = await node.call("INFO", "keyspace")
            assert b"db0:keys=" in found
        await store.aclose()

    async def test_tasks_of_the_inbox_are_answered(self, workers: FaultCluster) -> None:
        model = workers.script(finish("all done"))
        workers.start(LLM_MODEL=model)
        workers.start_ingress(LLM_MODEL=model)
        store = workers.client.store
        for number in range(4):
            request = json.dumps({"id": str(number), "task": "do it"})
            await store.call("XADD", INBOX, "*", "v", "1", "request", request, "reply_to", "shop")
        settled: set[bytes] = set()

        async def is_answered() -> bool:
            for _, fields in await store.call("XRANGE", replies_key("shop"), "-", "+"):
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                settled.update([about[b"id"]] if about[b"event"] == b"settled" else [])
            return len(settled) == 4

        await until(is_answered, limit=unhurried(60), what="answers")
        workers.check_that_all_live()

    async def test_server_runs_a_task_and_shows_the_queues(self, workers: FaultCluster, tmp_path: Path) -> None:
        model = workers.script(*steps(1))
        workers.start(LLM_MODEL=model)
        key = await add_key(workers.client.store)
        port = free_port()
        environment = {"DECKHANDS_CELERY_URL": workers.store.celery_url, "LLM_MODEL": model}
        base = {"base_url": f"http://127.0.0.1:{port}", "headers": {"Authorization": f"Bearer {key}"}}
        async with (
            server(workers.url_for_workers, tmp_path / "home", port, environment=environment),
            httpx2.AsyncClient(**base, timeout=unhurried(120)) as client,
        ):
            task = {"task": "do it", "agent": {"llm": {"model": model}, "enable_workspace_skills": False}}
            result = await client.post("/runs/wait?timeout_seconds=100", json=task)
            assert (result.status_code, result.json()["summary"]["state"]) == (200, "finished"), result.text
            queues = (await client.get("/queues")).json()["queues"]
            assert {queue["shard"] for queue in queues} == set(range(SHARDS))
            listed = (await client.get("/conversations")).json()
            assert len(listed["conversations"]) == 1
            assert "deckhands_conversations" in (await client.get("/metrics")).text


@pytest.mark.parametrize("program", ["valkey", "redis"])
async def test_replica_that_joined_later_has_to_confirm(program: str, tmp_path: Path) -> None:
    # No replica is regarded as failed in the meantime, however busy the machine is.
    nodes = Cluster(server_program(program), tmp_path, node_timeout_ms=int(1_000 * unhurried(60)))
    async with nodes.running():
        store = await open_store(nodes.url, shards=1, patience_seconds=0.0, acks="replica")
        await until_confirmed(store, "1")
        primary = await nodes.find_node(find_slot("deck:{0}:test"))
        first = nodes.nodes[PRIMARIES + nodes.nodes.index(primary)]
        second = await nodes.add_replica(primary)
        for late in (first, second):
            late.send(signal.SIGSTOP)
            with pytest.raises(OutcomeUnknown, match="to its 2 replicas"):
                await store.connection.call("SET", "deck:{0}:test", "2")
            late.send(signal.SIGCONT)
            await until_confirmed(store, "3")
        await store.aclose()


@pytest.mark.parametrize("program", ["valkey", "redis"])
async def test_paused_primary_and_its_replica_confirm_nothing(program: str, tmp_path: Path) -> None:
    """Both continue after another replica was promoted: what only they have is lost."""
    nodes = Cluster(server_program(program), tmp_path, replicas=2)
    async with nodes.running():
        store = await open_store(nodes.url, shards=1, patience_seconds=unhurried(60), acks="replica")
        is_over, confirmed = asyncio.Event(), set[bytes]()

        async def write(writer: int) -> None:
            for number in itertools.count():
                with contextlib.suppress(StoreError):
                    await store.connection.call("SADD", "deck:{0}:test", f"{writer}-{number}")
                    confirmed.add(b"%d-%d" % (writer, number))
                if is_over.is_set():
                    return

        writing = asyncio.gather(*(write(number) for number in range(4)))
        await until(lambda: len(confirmed) > 20, limit=60, what="confirmed writes")
        slot = find_slot("deck:{0}:test")
        old = await nodes.find_node(slot)
        follower = nodes.nodes[PRIMARIES + nodes.nodes.index(old)]
        for paused in (old, follower):
            paused.send(signal.SIGSTOP)
        await until(partial(nodes.is_served, slot, other_than=old), limit=60, what="promotion")
        for paused in (follower, old):
            paused.send(signal.SIGCONT)
        new = await nodes.until_promoted(slot, other_than=old)
        before = len(confirmed)
        await until(lambda: len(confirmed) > before + 20, limit=60, what="confirmed writes of the new primary")
        is_over.set()
        await writing
        await store.aclose()
        assert confirmed - set(await new.call("SMEMBERS", "deck:{0}:test")) == set()


async def until_confirmed(store: Store, value: str) -> None:
    """Repeat a write until the replicas have it, which need long on a busy machine."""

    async def is_confirmed() -> bool:
        try:
            return bool(await store.connection.call("SET", "deck:{0}:test", value) == b"OK")
        except OutcomeUnknown:
            return False

    await until(is_confirmed, limit=unhurried(60), what="confirmed write")


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True)
async def test_a_slot_that_moves_atomically_delays_no_function(cluster: Cluster, store: Store) -> None:
    names = store.all_shards[1]
    slot = find_slot(names.root)
    source = await cluster.find_node(slot)
    target = next(node for node in cluster.nodes[:PRIMARIES] if node is not source)
    await store.call_many([("SET", f"{names.root}:test:{number}", "x" * 1_000) for number in range(1_000)])
    await source.call(
        *("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", (await target.call("CLUSTER", "MYID")).decode())
    )

    async def has_moved() -> bool:
        await store.connection.call("FCALL", "deck_now", 1, names.root)  # without a repetition
        return await cluster.find_node(slot) is target

    await until(has_moved, limit=60, what="moved slot")
    assert await store.call("GET", f"{names.root}:test:999") == b"x" * 1_000


async def test_a_new_primary_gets_the_functions_with_its_first_call(cluster: Cluster, store: Store) -> None:
    names = store.all_shards[2]
    node = await cluster.add_node()
    assert await node.call("FUNCTION", "LIST") == []
    await cluster.move_slot(find_slot(names.root), node)
    calls = [asyncio.ensure_future(store.connection.call("FCALL", "deck_now", 1, names.root))]
    while not calls[0].done():  # others meet the node before, while and after the first one loads
        calls.append(asyncio.ensure_future(store.connection.call("FCALL", "deck_now", 1, names.root)))
        await asyncio.sleep(0)
    assert len(await asyncio.gather(*calls)) > 1
    assert len(await node.call("FUNCTION", "LIST")) == 1
    assert b"cmdstat_function|load:calls=1," in await node.call("INFO", "commandstats")
    with pytest.raises(StoreRefused, match="Function not found"):
        await store.connection.call("FCALL", "deck_no_such", 1, names.root)
    assert await store.call("HEXISTS", STORE, VERSION_FIELD) == 1


class MovingConnection(ClusterConnection):
    """A connection during which a slot moves on, just after the functions were loaded for it."""

    def __init__(self, cluster: Cluster, slot: int, target: Server) -> None:
        super().__init__(cluster.url)
        self.loaded = 0
        self._move = lambda: cluster.move_slot(slot, target)

    async def _load_functions(self, node: tuple[str, int]) -> bool:
        has_loaded = await super()._load_functions(node)
        self.loaded += 1
        if self.loaded == 1:
            await self._move()
        return has_loaded


async def test_moved_call_gets_the_functions_of_a_second_new_primary(cluster: Cluster, store: Store) -> None:
    names = store.all_shards[2]
    slot = find_slot(names.root)
    first, second = await cluster.add_node(), await cluster.add_node()
    for moved in (slot, find_slot(store.all_shards[3].root)):  # a primary without slots would become a replica
        await cluster.move_slot(moved, first)
    connection = MovingConnection(cluster, slot, second)
    outcome, _ = await connection.call("FCALL", "deck_now", 1, names.root)
    assert (outcome, connection.loaded) == (b"now", 2)
    for node in (first, second):
        assert len(await node.call("FUNCTION", "LIST")) == 1
    with pytest.raises(StoreRefused, match="Function not found"):
        await connection.call("FCALL", "deck_no_such", 1, names.root)
    await connection.aclose()


async def test_a_promoted_replica_is_found(cluster: Cluster, store: Store) -> None:
    names = store.all_shards[0]
    slot = find_slot(names.root)
    reader = store.connection.another(reply_timeout_seconds=unhurried(300))
    await store.call("XADD", f"{names.root}:test", "1-1", "a", "b")
    reading = asyncio.create_task(reader.call("XREAD", "BLOCK", 0, "STREAMS", f"{names.root}:test", "1-1"))
    old = await cluster.find_node(slot)

    async def is_reading() -> bool:
        return b"blocked_clients:1" in await old.call("INFO", "clients")

    await until(is_reading, limit=60, what="blocked reader")
    connects = store.connection.connects
    old.send(signal.SIGSTOP)
    await store.call_many([("SET", f"{one.root}:test2", "x") for one in store.all_shards])
    new = await cluster.until_promoted(slot, other_than=old)
    assert store.connection.connects > connects
    assert await new.call("GET", f"{names.root}:test2") == b"x"
    with pytest.raises(OutcomeUnknown, match="no longer a primary"):
        await asyncio.wait_for(reading, unhurried(60))
    assert len(await reader.call("XREAD", "BLOCK", 100, "STREAMS", f"{names.root}:test", "0")) == 1
    await reader.aclose()


async def test_restarted_primary_with_an_old_map_is_not_believed(cluster: Cluster, store: Store) -> None:
    key = store.all_shards[0].root
    old = await cluster.find_node(find_slot(key))
    old.kill()
    new = await cluster.until_promoted(find_slot(key), other_than=old)
    # It reaches no other node, so it does not learn that it was replaced.
    nodes = old.folder / "nodes.conf"
    nodes.write_text(re.sub(r"^((?!.*myself).*)@\d+", r"\1@1", nodes.read_text(), flags=re.MULTILINE))
    at = old.options.index("--cluster-port") + 1
    old.options = (*old.options[:at], str(lasting_port()), *old.options[at + 1 :])
    old.start()

    async def tells_the_old_map() -> bool:
        return await cluster.find_replicas(old, find_slot(key)) is not None

    await until(tells_the_old_map, limit=unhurried(30), what="an old map")
    for seeds in ([new, old], [old, new]):
        places = ",".join(f"127.0.0.1:{node.port}" for node in seeds)
        connection = ClusterConnection(f"redis+cluster://:{PASSWORD}@{places}")
        assert await connection.call("EXISTS", key) == 0
        await connection.aclose()


async def test_single_server_and_unusable_url_are_refused_with_a_remedy() -> None:
    port = free_port()
    with (
        contextlib.contextmanager(running)(valkey_program(), "--port", str(port)),
        pytest.raises(StoreMisconfigured, match=r"is not a node of a cluster\. Use redis://host"),
    ):
        await open_store(f"redis+cluster://127.0.0.1:{port}")
    for url, text in {"redis+cluster://": "names no node", "redis+cluster://h:1/3": "no database other than 0"}.items():
        with pytest.raises(StoreMisconfigured, match=text):
            await open_store(url)
    with pytest.raises(StoreUnavailable, match="No node of the store's cluster"):
        await open_store(f"redis+cluster://127.0.0.1:{free_port()}")


async def test_node_whose_port_was_taken_starts_on_another(tmp_path: Path) -> None:
    cluster = Cluster(valkey_program(), tmp_path, primaries=1, replicas=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster.nodes[0].port = taken.getsockname()[1]
        async with cluster.running():
            assert cluster.nodes[0].port != taken.getsockname()[1]


def test_celery_needs_a_broker_beside_a_cluster() -> None:
    for url in ("", "redis+cluster://h:1"):
        with pytest.raises(UsageError, match="Set DECKHANDS_CELERY_URL to a single server"):
            make_connection_settings(url)
    settings = BrokerSettings.from_env({"DECKHANDS_URL": "redis+cluster://:secret@h:1,i:2"})
    assert settings.celery_url == ""


def test_shards_spread_over_slots() -> None:
    assert len({find_slot(ShardKeys(shard).root) for shard in range(1_024)}) > 1_000


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_server_becomes_the_first_node_of_a_cluster(kind: str, tmp_path: Path) -> None:
    cluster = Cluster(server_program(kind), tmp_path, primaries=1, replicas=0)
    (node,) = cluster.nodes
    options, node.options = node.options, ()
    node.start()
    single = Client(await open_store(node.url, shards=SHARDS, opening_seconds=unhurried(60)))
    ids = [await single.submit(f"task {number}") for number in range(4 * SHARDS)]
    before = [await single.events(one) for one in ids]
    await single.aclose()
    node.send(signal.SIGTERM)
    assert node.process is not None
    node.process.wait()
    node.options = options
    async with cluster.running():  # the same files; it owns the slots of their keys
        store = await open_store(cluster.url, patience_seconds=unhurried(60))
        client = Client(store)
        assert (store.shards, store.generation) == (SHARDS, single.store.generation)
        other = await cluster.add_node()
        for names in store.all_shards[::2]:
            await cluster.move_slot(find_slot(names.root), other)
        assert [await client.events(one) for one in ids] == before
        for one in ids:
            await client.send_message(one, "continue")
        assert await other.call("DBSIZE") > len(ids)
        await client.aclose()


async def test_a_stopped_primary_stops_no_worker_elsewhere(cluster: Cluster, workers: FaultCluster) -> None:
    workers.start()
    store = workers.client.store
    old = await cluster.find_node(find_slot(store.all_shards[0].root))
    ids = await workers.submit(steps(6, seconds=0.4), count=3 * SHARDS)
    await workers.until(lambda: all("begin-0" in workers.effects(cid) for cid in ids), limit=unhurried(60))
    old.send(signal.SIGSTOP)
    await cluster.until_promoted(find_slot(store.all_shards[0].root), other_than=old)
    await workers.check(ids, commands=6, limit=unhurried(120))
    assert not [takeover.conversation_id for takeover in await Conversations(store).list_takeovers()]
    workers.check_that_all_live()


async def test_conversations_survive_a_killed_primary(cluster: Cluster, workers: FaultCluster) -> None:
    workers.start(DECKHANDS_ACKS="replica")
    ids = await workers.submit(steps(8, seconds=0.4), count=SHARDS)
    await workers.until(lambda: all("begin-1" in workers.effects(cid) for cid in ids), limit=unhurried(60))
    slot = find_slot(workers.client.store.known_keys(ids[0]).events)
    old = await cluster.find_node(slot)
    old.kill()
    await cluster.until_promoted(slot, other_than=old)
    old.start()  # as a replica: until then, nothing confirms what the promoted one writes
    await workers.check(ids, commands=8, limit=unhurried(120))
    workers.check_that_all_live()


async def test_conversations_survive_moved_slots(cluster: Cluster, workers: FaultCluster) -> None:
    workers.start()
    ids = await workers.submit(steps(8, seconds=0.4), count=2 * SHARDS)
    await workers.until(lambda: all("begin-0" in workers.effects(cid) for cid in ids), limit=unhurried(60))
    node = await cluster.add_node()
    for names in workers.client.store.all_shards[::2]:
        await cluster.move_slot(find_slot(names.root), node)
    await cluster.move_slot(find_slot(STORE), node)
    assert await node.call("DBSIZE") > len(ids)
    await workers.until(lambda: all("begin-4" in workers.effects(cid) for cid in ids), limit=unhurried(60))
    for at, key in enumerate([STORE, *(names.root for names in workers.client.store.all_shards[::2])]):
        await cluster.move_slot(find_slot(key), cluster.nodes[at % PRIMARIES])
    await cluster.remove_node(node)
    await workers.check(ids, commands=8, limit=unhurried(120))
    for conversation_id in ids[:2]:
        assert len(await workers.client.events(conversation_id)) > 16
    workers.check_that_all_live()
