"""Schedules with two beats and two jobs workers, some of which die: each tick begins one conversation."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from broker.coordination.membership import list_members
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.jobs.scheduler import derive_tick_conversation_id
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import LABEL, Schedule
from tests.faults.harness import FaultCluster

NAMES = [f"s{n}" for n in range(20)]
LIMIT_SECONDS = 90.0


async def test_whichever_beat_and_worker_die_each_tick_begins_one_conversation(cluster: FaultCluster) -> None:
    cluster.start_controller()
    for number in (1, 2):
        cluster.start_jobs(f"j{number}")
        cluster.start_beat(f"b{number}")
    client = cluster.client
    book = ScheduleRepository(client.store, client.secrets)
    await cluster.until(lambda: are_there(cluster), limit=LIMIT_SECONDS, what="the workers")
    for name in NAMES:
        request = TaskSpec.parse({"task": "x", "labels": {LABEL: name}, "model": "scripted/nowhere"})
        await book.add(Schedule(name=name, cron="* * * * *", overlap="enqueue"), request)
    due = (await book.now()).replace(second=0, microsecond=0)
    schedules_due = client.store.all_shards[0].schedules_due
    for name in NAMES:
        await client.store.connection.call("ZADD", schedules_due, int(due.timestamp() * 1000), name)
    await cluster.until(lambda: have_begun(book, 1), limit=LIMIT_SECONDS, what="the first tick")
    cluster.kill("b1")
    cluster.kill("j1")
    await cluster.until(lambda: have_begun(book, len(NAMES)), limit=LIMIT_SECONDS, what="the first tick of all")
    ids = {row.conversation_id for row in await client.recent(limit=10 * len(NAMES))}
    # A tick that had begun two would have begun one under another id.
    possible = {
        name: {derive_tick_conversation_id(name, due + timedelta(minutes=n)) for n in range(10)} for name in NAMES
    }
    assert ids <= set().union(*possible.values())
    assert all(ids & possible[name] for name in NAMES)  # its first tick is a later one if a minute has begun meanwhile


async def are_there(cluster: FaultCluster) -> bool:
    roles = Counter(member.role for member in await list_members(cluster.client.store))
    return roles["jobs"] >= 2 and roles["controller"] >= 1


async def have_begun(book: ScheduleRepository, number: int) -> bool:
    return sum(entry.status.begun > 0 for entry in await book.all()) >= number
