"""`deckhands doctor` on the store of a running cluster, with the rights of one who may only read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.coordination.membership import BEATS_PER_FACTS
from broker.store.keys import STORE
from broker.store.store import Store
from deckhands.operations.diagnosis.diagnostics import Finding
from deckhands.operations.diagnosis.examination import examine_cluster
from deckhands.operations.diagnosis.worker_findings import read_workers
from tests.broker_parts import CID, act, begin, claim, enter, lapse
from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer, emptied

READER, PASSWORD = "reader", "reader-0123456789"
RIGHTS = ("~deck:*", "-@all", "+@read", "+@connection", "+info", "+time", "+function|list", "-scan")


@pytest.fixture
async def reader(valkey_store: Store, valkey_server: RealServer) -> AsyncIterator[str]:
    """The URL of a store user that may read and nothing else."""
    keys = ("%R~deck:*", *RIGHTS[1:])
    await valkey_store.connection.call("ACL", "SETUSER", READER, "reset", "on", f">{PASSWORD}", *keys)
    scheme, _, place = valkey_server.url.partition("://")
    yield f"{scheme}://{READER}:{PASSWORD}@{place}"
    await valkey_store.connection.call("ACL", "DELUSER", READER)


def bad(findings: list[Finding]) -> dict[str, Finding]:
    assert all(finding.remedy for finding in findings if not finding.is_good)
    return {finding.name: finding for finding in findings if not finding.is_good}


async def test_healthy_cluster_is_diagnosed_without_writing(valkey_store: Store, reader: str) -> None:
    store = valkey_store
    for name, node in (("controller-1", ""), ("tool-1", "n1")):
        membership = await enter(store, name, node=node)
        await store.connection.call(
            "HSET", store.all_shards[0].worker_facts(name), "role", "tool" if node else "controller"
        )
        assert membership is not None
    await begin(store)
    await claim(store, "controller-1")
    before = await store.connection.call("DBSIZE"), await store.connection.call("HGETALL", store.known_keys(CID).meta)
    findings = await examine_cluster(reader, sample=100)
    assert (
        await store.connection.call("DBSIZE"),
        await store.connection.call("HGETALL", store.known_keys(CID).meta),
    ) == before
    assert {name: one.detail for name, one in bad(findings).items()} == {
        "orphans": "this store user may not search for orphaned keys"
    }
    told = {finding.name: finding.detail for finding in findings}
    assert told["invariants"] == "1 of 1 log checked"
    assert "alive: 1 controller, 1 tool" in told["workers"]


async def test_broken_parts_are_found_and_named(valkey_store: Store, valkey_server: RealServer) -> None:
    store, url = valkey_store, valkey_server.url
    await begin(store)
    await enter(store, "controller-1")
    await act(store, "controller-1")
    names = store.all_shards[0]
    await lapse(store, "controller-1")
    await store.connection.call("HSET", names.worker_facts("controller-1"), "version", "0.0.1 3", "wall_ms", 1)
    await store.connection.call("XDEL", store.known_keys(CID).events, "1-0")
    await store.connection.call("HSET", STORE, "functions", "9:abc:2")
    await store.connection.call("HSET", store.known_keys(CID).meta, "owner", "nobody")
    found = bad(await examine_cluster(url, sample=None))
    assert found["invariants"].is_needed
    assert CID in found["invariants"].detail
    assert "the store has version 9 (abc); this build has " in found["store functions"].detail
    assert "controller-1" in found["workers"].detail or found["workers"].is_needed
    assert found["orphans"].detail == f"1 conversation owned by no worker: {CID}"
    await store.connection.call("ZADD", names.workers, 4_000_000_000_000, "controller-1")
    found = bad(await examine_cluster(url, sample=0))
    assert "0.0.1" in found["workers' versions"].detail
    assert "controller-1 (-" in found["workers' clocks"].detail


async def test_lost_functions_and_garbage_in_the_place_of_facts(valkey_store: Store, valkey_server: RealServer) -> None:
    store, url = valkey_store, valkey_server.url
    await begin(store)
    await store.connection.call("FUNCTION", "FLUSH")
    assert bad(await examine_cluster(url, sample=1))["store functions"].is_needed
    for key in (f"{store.all_shards[0].root}:clock", store.all_shards[0].workers, store.all_shards[0].index):
        await store.connection.call("DEL", key)
        await store.connection.call("SET", key, "garbage")
    assert "store functions" in bad(await examine_cluster(url, sample=1))
    await store.connection.call("DEL", STORE)
    await store.connection.call("SET", STORE, "garbage")
    assert await examine_cluster(url, sample=1) == []
    assert await examine_cluster(await emptied(url), sample=1) == []


async def test_workers_say_their_version_and_clock_with_their_beats(valkey_store: Store) -> None:
    membership = await enter(valkey_store, "controller-1")
    await valkey_store.connection.call(
        "HDEL", valkey_store.all_shards[0].worker_facts("controller-1"), "version", "wall_ms"
    )
    for _ in range(BEATS_PER_FACTS):
        await membership.beat(1)
    (seen,) = await read_workers(valkey_store)
    assert seen.version
    assert seen.clock_seconds is not None
    assert abs(seen.clock_seconds) < 60
    assert seen.left_seconds > 0


async def test_doctor_exits_with_1_for_errors_and_strictly_for_everything(
    valkey_store: Store, valkey_server: RealServer, tmp_path: Path
) -> None:
    env = environment(tmp_path, DECKHANDS_URL=valkey_server.url)
    done = await asyncio.to_thread(deckhands, "doctor", "--json", env=env)
    found = {each["name"]: each for each in done.json}
    assert (done.code, found["workers"]["is_good"]) == (0, False)
    assert found["workers"]["remedy"].startswith("Start one: ")
    strict = await asyncio.to_thread(deckhands, "doctor", "--strict", env=env)
    assert strict.code == 1
    assert "found   workers" in strict.out
    await begin(valkey_store)
    await valkey_store.connection.call("HSET", valkey_store.known_keys(CID).meta, "busy", "1")
    broken = await asyncio.to_thread(deckhands, "doctor", "--all-logs", env=env)
    assert broken.code == 1
    assert "broken  workers" in broken.out
