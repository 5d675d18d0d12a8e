"""Clusters and Sentinels with certificates and a restricted user for each role: workers work, and survive a fail-over."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from broker.runtime import DeckhandsError, StoreMisconfigured
from broker.store.routing import find_slot
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.certificates import Authority
from tests.clusters import Cluster
from tests.faults.harness import FaultCluster, steps
from tests.ingress_parts import Producer, all_present
from tests.polling import unhurried
from tests.sentinels import SentinelGroup, Server, begin_fail_over, end_fail_over
from tests.source_code import ROOT
from tests.stores import server_program

LIMIT_SECONDS = 120.0
SHARDS = 8
ROLES = ("operator", "controller", "tool", "ingress", "jobs")
RULE = re.compile(r"\([^)]*\)|\S+")


def rules_of(role: str) -> list[str]:
    """Return the rules of a role in `deploy/store.acl`."""
    lines = [line.split(None, 1) for line in (ROOT / "deploy/store.acl").read_text().splitlines() if line[:1].isalpha()]
    return [rule for roles, rules in lines if role in roles.split(",") for rule in RULE.findall(rules)]


async def add_users(servers: Iterable[Server]) -> None:
    for server in servers:
        for role in ROLES:
            await server.call("ACL", "SETUSER", role, "on", f">{role}-password", *rules_of(role))


@contextlib.asynccontextmanager
async def secured(
    kind: str, folder: Path, files: Path
) -> AsyncIterator[tuple[Callable[[str], str], Cluster | SentinelGroup]]:
    """Run a cluster, or a group with Sentinels, with TLS and users; yield the URL of each role, and the servers."""
    program = server_program("redis")
    if kind == "cluster":
        cluster = Cluster(program, folder, tls=files)
        async with cluster.running():
            await (await open_store(cluster.url, shards=SHARDS)).aclose()
            await add_users(cluster.nodes)
            yield lambda role: cluster.url_of(f"{role}:{role}-password"), cluster
    else:
        async with SentinelGroup(program, folder, tls=files).running() as group:
            await (await open_store(group.url, shards=SHARDS)).aclose()
            await add_users(group.servers)
            yield lambda role: group.url_of(login=f"{role}:{role}-password"), group


async def replace_primary(servers: Cluster | SentinelGroup, slot: int) -> None:
    if isinstance(servers, SentinelGroup):
        old = await servers.primary()
        new = await begin_fail_over(servers, old, "kill")
        await end_fail_over(servers, old, new, "kill")
    else:
        old = await servers.find_node(slot)
        old.kill()
        await servers.until_promoted(slot, other_than=old)
        old.start()


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_each_role_works_over_tls_and_a_fail_over(kind: str, tmp_path: Path) -> None:
    files, root = tmp_path / "files", tmp_path / "workers"
    for folder in (files, root, tmp_path / "servers"):
        folder.mkdir()
    Authority().sign_in(files)
    async with secured(kind, tmp_path / "servers", files) as (url_of, servers):
        workers = FaultCluster(root)
        workers.url_for_workers = servers.url
        await workers.store.start()
        workers.client = Client(await open_store(url_of("operator"), deploys=False, patience_seconds=unhurried(60)))
        store = workers.client.store
        try:
            environment = {"DECKHANDS_ACKS": "replica"}
            workers.start_controller(DECKHANDS_URL=url_of("controller"), **environment)
            workers.start_tool(DECKHANDS_URL=url_of("tool"), **environment)
            workers.start_ingress(DECKHANDS_URL=url_of("ingress"), **environment)
            workers.start_jobs(DECKHANDS_URL=url_of("jobs"), **environment)
            await all_present(workers)
            producer = Producer(workers)
            ids = await workers.submit(steps(6, seconds=0.4), count=SHARDS)
            results = [producer.run(turns=steps(2)) for _ in range(3)]
            await workers.until(lambda: all("begin-1" in workers.effects(cid) for cid in ids), limit=LIMIT_SECONDS)
            await replace_primary(servers, find_slot((await store.locate(ids[0])).events))
            await workers.check(ids, commands=6, limit=LIMIT_SECONDS)
            for result in results:
                assert (await producer.value(result, limit=unhurried(LIMIT_SECONDS)))["state"] == "finished"
            workers.check_that_all_live()
            producer.close()
            await check_refusals(url_of)
        finally:
            await workers.end_workers()
            await workers.store.stop()


async def check_refusals(url_of: Callable[[str], str]) -> None:
    """A wrong password and a server without its authority are refused, and a tool worker reads no snapshot."""
    with pytest.raises(StoreMisconfigured, match=r"WRONGPASS|password"):
        await open_store(url_of("controller").replace("controller-password", "wrong"), deploys=False)
    with pytest.raises(DeckhandsError, match=r"(?i)certificate"):
        await open_store(re.sub(r"ssl_ca_certs=[^&]*", "ssl_cert_reqs=required", url_of("controller")), deploys=False)
    tool = await open_store(url_of("tool"), deploys=False)
    for names in tool.all_shards:
        with pytest.raises(StoreMisconfigured, match="NOPERM"):
            await tool.call("GET", f"{names.root}:c:x:snapshot")
    await tool.aclose()
