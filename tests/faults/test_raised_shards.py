"""The number of shards is raised while conversations run: nothing is lost, doubled or left standing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from broker.coordination.membership import list_members
from broker.log.conversations import Conversations
from deckhands.client.client import Client
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import LABEL, Schedule
from tests.clusters import Cluster
from tests.faults.harness import FaultCluster, steps
from tests.ingress_parts import Producer, all_present
from tests.polling import unhurried, until
from tests.stores import server_program

LIMIT_SECONDS = 120.0
COUNT = 24
KILLED_AT = ("shards.before_raise", "shards.raised")
ARMED = (
    "import runpy; from broker.runtime import BrokerSettings; from broker.runtime.failpoints import arm;"
    "arm(BrokerSettings.from_env()); runpy.run_module('deckhands', run_name='__main__', alter_sys=True)"
)
"""The command `deckhands` with failpoints."""


@contextlib.asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[FaultCluster]:
    root = folder / "workers"
    root.mkdir()
    if kind == "server":
        async with FaultCluster(root).running() as cluster:
            yield cluster
    else:
        nodes = Cluster(server_program("valkey"), folder)
        async with nodes.running(), FaultCluster(root).running_on(nodes, 8) as cluster:
            yield cluster


async def call(cluster: FaultCluster, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a command of `deckhands`; return its exit status and its output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DECKHANDS_", "LLM_"))}
    env |= {
        "DECKHANDS_URL": cluster.url_for_workers or cluster.store.url,
        "DECKHANDS_CELERY_URL": cluster.store.celery_url,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", ARMED, *arguments),
        env=env | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), unhurried(LIMIT_SECONDS))
    assert process.returncode is not None
    return process.returncode, output.decode()


async def until_due_again(book: ScheduleRepository, name: str, before: int) -> None:
    async def has_begun() -> bool:
        runs = [row for row in await Client(book._store).recent(limit=1_000) if (row.labels or {}).get(LABEL) == name]
        return len(runs) > before

    await until(has_begun, limit=unhurried(LIMIT_SECONDS), what="a run of the schedule")


@pytest.mark.parametrize(("kind", "before", "after"), [("server", 1, 4), ("cluster", 8, 16)])
async def test_shards_are_raised_under_conversations(kind: str, before: int, after: int, tmp_path: Path) -> None:
    archive, rules = tmp_path / "archive", tmp_path / "retention.toml"
    archive.mkdir()
    rules.write_text('[[rule]]\nage = "0s"\nlabels = { doomed = "yes" }\n')
    environment = {"DECKHANDS_ARCHIVE": str(archive), "DECKHANDS_RETENTION": str(rules)}
    async with running(kind, tmp_path) as cluster:
        store = cluster.client.store
        cluster.start()
        cluster.start_controller("c2")
        cluster.start_ingress()
        cluster.start_jobs(**environment)
        await all_present(cluster)
        producer = Producer(cluster)
        old = await cluster.submit(steps(4, seconds=0.5), count=COUNT)
        results = [producer.run(turns=steps(3, seconds=0.4)) for _ in range(6)]
        await cluster.until(
            lambda: all("begin-0" in cluster.effects(cid) for cid in old), limit=unhurried(LIMIT_SECONDS)
        )
        for step in KILLED_AT:
            status, output = await call(cluster, "store", "shards", str(after), DECKHANDS_FAILPOINTS=f"{step}:kill")
            assert status == -signal.SIGKILL, output
            old += await cluster.submit(steps(2, seconds=0.3), count=4)
            results.append(producer.run(turns=steps(2)))
        status, output = await call(cluster, "store", "shards", str(after))
        assert (status, f"has {after} shards" in output) == (0, True), output
        await store.refresh()  # this client has not called it for a moment
        assert store.layout.numbers == (before, after)
        new = await cluster.submit(steps(4), count=COUNT, task={"labels": {"doomed": "yes"}})
        results += [producer.run(turns=steps(2)) for _ in range(6)]
        assert len({(await store.locate(cid)).shard.shard for cid in new}) > 2
        await cluster.check(old, commands=2, limit=unhurried(LIMIT_SECONDS))
        await cluster.check(new, commands=4, limit=unhurried(LIMIT_SECONDS))
        for result in results:
            assert (await producer.value(result, limit=unhurried(LIMIT_SECONDS)))["state"] == "finished"
        ids = {row.conversation_id for row in await cluster.client.recent(limit=1_000)}
        assert {*old, *new} <= ids
        assert len(ids) == len(old) + len(new) + len(results)
        assert await Conversations(store).count() == len(ids)
        status, output = await call(cluster, "verify", "--all")
        assert (status, re.search(rf"\b{len(ids)} (?:logs|conversations)", output) is not None) == (0, True), output
        status, output = await call(cluster, "metrics", "--once")
        assert status == 0
        found = re.findall(r'^deckhands_conversations\{[^}]*state="finished"[^}]*\} ([0-9.]+)', output, re.MULTILINE)
        assert sum(map(float, found)) == len(ids), output
        status, output = await call(cluster, "store", "shards", str(before))
        assert (status, "cannot be lowered" in output) == (2, True), output

        book = ScheduleRepository(store, cluster.client.secrets)
        request = TaskSpec.parse({"task": "x", "model": cluster.script(*steps(1))})
        await book.add(Schedule(name="tick", cron="* * * * *", overlap="enqueue"), request)
        now = await book.now() - timedelta(minutes=1)
        await store.call("ZADD", store.find_home("tick").schedules_due, int(now.timestamp() * 1000), "tick")
        await until_due_again(book, "tick", 0)

        async def are_archived() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not {row.conversation_id for row in await cluster.client.recent(limit=1_000)} & set(new)

        await until(are_archived, limit=unhurried(LIMIT_SECONDS), what="archived conversations of new shards")
        reader = Client(store, str(archive))
        for cid in new:
            assert len(await reader.events(cid)) > 8
        for cid in old[:2]:
            await cluster.client.delete(cid)
            assert await store.call("EXISTS", (await store.locate(cid)).meta) == 0
        for cid in old[2:4]:
            await cluster.client.send_message(cid, "continue")
        await cluster.settle(old[2:4], limit=unhurried(LIMIT_SECONDS))
        members = await list_members(store)
        assert {member.about["shards"] for member in members} == {str(after)}
        cluster.kill("c1")
        last = await cluster.submit(steps(1), count=after)
        await cluster.check(last, commands=1, limit=unhurried(LIMIT_SECONDS))
        cluster.check_that_all_live()
        producer.close()
