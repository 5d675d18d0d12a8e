"""Jobs workers and beats that die or wait for slow receivers: schedules, webhooks and the archive lose and repeat nothing."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from broker.contract.events import Event, Parent
from broker.contract.specs import Tenancy
from broker.coordination.membership import list_members
from broker.runtime.errors import DeckhandsError
from broker.runtime.settings import BrokerSettings
from broker.store.keys import ShardKeys
from deckhands.client.archive.archive import Archive
from deckhands.client.client import Client
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.scheduler import derive_tick_conversation_id
from deckhands.operations.jobs.webhook_jobs import open_repository
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import LABEL, Schedule
from tests.archive_parts import begin_ended, delegate_ended
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer
from tests.polling import until
from tests.webhook_parts import begin_worked, receiving

LIMIT_SECONDS = 90.0
STEPS = (
    "archive.before_write",
    "archive.written",
    "archive.checked",
    "retire.begun",
    "deletion.texts_gone",
    "deletion.before_end",
    "retire.deleted",
)
ROUND = ("alone-1", "alone-2", "parent", "child")


async def begin_round(client: Client, number: int) -> dict[str, list[Event]]:
    """Start two conversations, and one with a delegate; returns their logs."""
    alone_1, alone_2, parent, child = (f"{name}-{number}" for name in ROUND)
    await begin_ended(client, alone_1)
    await begin_ended(client, alone_2)
    await begin_ended(client, child, parent=Parent(conversation_id=parent, delegate_id=2))
    await begin_ended(client, parent, delegate_ended(child))
    names = (alone_1, alone_2, parent, child)
    return {name: await client.events(name, is_whole=True) for name in names}


async def whole_in_one(client: Client, name: str, log: list[Event]) -> bool:
    """Return whether a conversation is complete in the store or in the archive, and so reads as before."""
    assert client.archive is not None
    try:
        archived = await client.archive.read_checked(name)
    except DeckhandsError:  # not there, or a part
        archived = None
    if archived is None:
        return await Client(client.store).events(name, is_whole=True) == log
    return archived == log


@pytest.mark.parametrize("steps", [STEPS, pytest.param(STEPS * 5, marks=pytest.mark.slow)], ids=["once", "often"])
async def test_conversation_is_present_or_archived_after_any_step(tmp_path: Path, steps) -> None:
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    rules.write_text('[[rule]]\nage = "0s"\n')
    environment = {"DECKHANDS_ARCHIVE": str(place), "DECKHANDS_RETENTION": str(rules)}
    logs: dict[str, list[Event]] = {}
    async with FaultCluster(tmp_path).running() as cluster:
        producer = Producer(cluster)
        client = Client(cluster.client.store, str(place))
        for number, step in enumerate(steps, 1):
            logs |= await begin_round(client, number)
            await client.store.connection.call(
                "DEL", ShardKeys(0).job_lock("retire")
            )  # of the worker before; it would lapse
            hit = 1 if step == "retire.begun" else 1 + number % 2
            worker = cluster.start_jobs(f"j{number}", DECKHANDS_FAILPOINTS=f"{step}:kill@{hit}", **environment)
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            assert await asyncio.to_thread(worker.wait, LIMIT_SECONDS) == -signal.SIGKILL, step
            for name, log in logs.items():
                assert await whole_in_one(client, name, log), f"{name} after {step}"
                assert await client.events(name, is_whole=True) == log, f"{name} after {step}"
        cluster.start_jobs("last", **environment)

        async def retired() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not await client.recent()

        await until(retired, limit=LIMIT_SECONDS, what="an empty store")
        archive = Archive(str(place))
        for name, log in logs.items():
            assert await archive.read_checked(name) == log, name
        assert await cluster.find_keys("deck:*:c:*") == []
        drafts = place / ".drafts"
        for draft in drafts.iterdir():  # of the workers that were killed
            os.utime(draft, (0, 0))

        async def swept() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not [*drafts.iterdir()]

        await until(swept, limit=LIMIT_SECONDS, what="an archive without drafts")
        producer.close()


NAMES = [f"s{n}" for n in range(20)]


@pytest.mark.parametrize("are_together", [False, True])
async def test_whichever_beat_and_worker_die_each_tick_begins_one_conversation(
    cluster: FaultCluster, are_together: bool
) -> None:
    cluster.start_controller()
    for number in (1, 2):
        if are_together:
            cluster.start_services(f"j{number}")
        else:
            cluster.start_jobs(f"j{number}")
            cluster.start_beat(f"b{number}")
    client = cluster.client
    book = ScheduleRepository(client.store, client.secrets)
    await cluster.until(lambda: are_there(cluster), limit=LIMIT_SECONDS, what="the workers")
    for name in NAMES:
        request = TaskSpec.parse({"task": "x", "labels": {LABEL: name}, "model": "scripted/nowhere"})
        await book.add(Schedule(name=name, cron="* * * * *", overlap="enqueue"), request)
    due = (await book.now()).replace(second=0, microsecond=0)
    for name in NAMES:
        schedules_due = client.store.find_home(name).schedules_due
        await client.store.connection.call("ZADD", schedules_due, int(due.timestamp() * 1000), name)
    await cluster.until(lambda: have_begun(book, 1), limit=LIMIT_SECONDS, what="the first tick")
    for name in {"b1", "j1"} & cluster.workers.keys():
        cluster.kill(name)
    await cluster.until(lambda: have_begun(book, len(NAMES)), limit=LIMIT_SECONDS, what="the first tick of all")
    ids = {row.conversation_id for row in await client.recent(limit=10 * len(NAMES))}
    # A tick that had started two would have started one under another id.
    possible = {
        name: {derive_tick_conversation_id(name, due + timedelta(minutes=n)) for n in range(10)} for name in NAMES
    }
    assert ids <= set().union(*possible.values())
    assert all(ids & possible[name] for name in NAMES)  # its first tick is later if a new minute has started


async def are_there(cluster: FaultCluster) -> bool:
    roles = Counter(member.role for member in await list_members(cluster.client.store))
    return roles["jobs"] >= 2 and roles["controller"] >= 1


async def have_begun(book: ScheduleRepository, number: int) -> bool:
    return sum(entry.status.begun > 0 for entry in await book.all()) >= number


EVENTS = ("conversation.state_changed", "conversation.settled")
SECRET_KEY = base64.b64encode(bytes(32)).decode()
TOLD = ["running", "finished"]


@pytest.mark.parametrize("place", [pytest.param("jobs.planned", marks=pytest.mark.slow), "jobs.delivered"])
async def test_a_worker_that_dies_loses_nothing_that_has_settled(
    cluster: FaultCluster, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.client
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", SECRET_KEY)
    async with receiving() as receiver:
        book = open_repository(JobServices(client.store, BrokerSettings.from_env()))
        await book.add("acme", receiver.url, EVENTS)
        names = [f"one-{number}" for number in range(3)]
        cluster.forged.update(names)
        for name in names:
            await begin_worked(client, name, tenancy=Tenancy(tenant="acme"))
        private = {"DECKHANDS_WEBHOOK_PRIVATE": "127.0.0.1", "DECKHANDS_SECRET_KEY": SECRET_KEY}
        cluster.start_jobs("j1", **private, DECKHANDS_FAILPOINTS=f"{place}:kill")
        await cluster.until_ended("j1", limit=LIMIT_SECONDS)
        for due in [f"{shard.webhooks}:due" for shard in client.store.all_shards]:
            for line in await client.store.connection.call("ZRANGE", due, 0, -1):
                await client.store.connection.call("ZADD", due, 1, line)  # as if the minute of the dead were over
        cluster.start_jobs("j2", **private)

        async def are_told() -> bool:
            return all(receiver.states(name) == TOLD for name in names)

        await cluster.until(are_told, limit=LIMIT_SECONDS, what="what has settled")
        repeated = len(receiver.requests) - len({headers["webhook-id"] for headers, _ in receiver.requests})
        assert repeated in ((1, 2, 3) if place == "jobs.delivered" else (0,))


CONVERSATIONS = 24
SOON_SECONDS = 12.0
"""Shorter than one of the requests takes."""


async def test_silent_receiver_delays_no_schedule_or_other_tenant(
    cluster: FaultCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, taken = cluster.client, []
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", SECRET_KEY)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    async with receiving() as receiver:
        book = open_repository(JobServices(client.store, BrokerSettings.from_env()))
        await book.add("slow", f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/", ("conversation.settled",))
        await book.add("quick", receiver.url, ("conversation.settled",))
        slow = [f"slow-{number}" for number in range(CONVERSATIONS)]
        cluster.forged.update(slow, ("quick-1",))
        for name in slow:
            await begin_worked(client, name, tenancy=Tenancy(tenant="slow"))
        cluster.start_jobs("j1", DECKHANDS_WEBHOOK_PRIVATE="127.0.0.1", DECKHANDS_SECRET_KEY=SECRET_KEY)
        await cluster.until(lambda: len(taken) >= 4, what="requests to the silent receiver")
        schedules = ScheduleRepository(client.store, client.secrets)
        await schedules.add(Schedule(name="honest", cron="* * * * *"), TaskSpec(task="look", model="scripted/x"))
        names = client.store.find_home("honest")
        now = await schedules.now()
        due_ms = int(now.replace(second=0, microsecond=0).timestamp() * 1000)
        await client.store.connection.call("ZADD", names.schedules_due, due_ms, "honest")
        await begin_worked(client, "quick-1", tenancy=Tenancy(tenant="quick"))

        async def is_looked_at() -> bool:
            standing = (await schedules.entry("honest")).status
            return bool(standing.begun or standing.error)

        await cluster.until(is_looked_at, limit=SOON_SECONDS, what="a look at a schedule")
        await cluster.until(lambda: receiver.states("quick-1"), limit=SOON_SECONDS, what="a delivery")
        assert len(taken) <= 16  # of one tenant at once
    for writer in taken:
        writer.close()
    silent.close()
