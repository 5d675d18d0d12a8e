"""If more schedules are due than one run handles, and many of them cannot start, the others get their turns."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from broker.store.connection import Argument
from controller_worker.agents.registry import list_agents
from deckhands.operations.jobs.scheduler import DUE_AT_ONCE, STRIDE, TICK_SECONDS
from deckhands.operations.schedules.schedule import ScheduleStatus
from tests.integration.test_schedules import NAME, NOON, Cluster, cluster

__all__ = ["cluster"]

SPOILT = DUE_AT_ONCE + 44
LATER = "LaterAgent"


async def spoil(cluster: Cluster, number: int, *, standing: ScheduleStatus | None = None) -> None:
    """Store schedules that cannot start, and have been due for a while."""
    await cluster.add_of_agent("NobodyAgent")
    text = (await cluster.book.entry(NAME)).schedule.model_dump()
    await cluster.book.remove(NAME)
    names, due_ms = cluster.store.all_shards[0], int(NOON.timestamp() * 1000) - 60_000
    commands: list[tuple[Argument, ...]] = []
    for count in range(number):
        name = f"spoilt-{count}"
        commands.append(("HSET", names.schedules, name, json.dumps(text | {"name": name, "cron": "* * * * *"})))
        commands.append(("ZADD", names.schedules_due, due_ms, name))
        if standing is not None:
            commands.append(("HSET", names.schedules_status, name, standing.model_dump_json()))
    await cluster.store.connection.call_many(commands)


@pytest.mark.parametrize("is_queued", [False, True])
async def test_those_that_cannot_begin_keep_no_other_from_its_turn(cluster: Cluster, is_queued: bool) -> None:
    queued = ScheduleStatus(queued=(NOON,), error="x", failing_since=NOON) if is_queued else None
    await spoil(cluster, SPOILT, standing=queued)
    await cluster.add()
    await cluster.come_due()
    for _ in range(3):
        await cluster.tick(minutes_later=0.1)
    assert (await cluster.standing()).begun == 1


async def test_one_that_can_begin_again_does_although_others_cannot(cluster: Cluster) -> None:
    await spoil(cluster, SPOILT, standing=ScheduleStatus(error="nobody knows the agent"))
    await cluster.add_of_agent(LATER, catch_up_seconds=86_400.0)
    await cluster.come_due()
    for _ in range(2):
        await cluster.tick(minutes_later=0.1)
    assert (await cluster.standing()).begun == 0
    await cluster.replace_controllers(*list_agents(), LATER)
    for _ in range(40):
        await cluster.tick(minutes_later=1 / 12)
        if (await cluster.standing()).begun:
            return
    raise AssertionError("it was not come to")


async def test_waiting_ticks_do_not_delay_due_schedules(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    await cluster.tick()
    at_work = (await cluster.standing()).conversation_id
    await cluster.book.remove(NAME)
    await spoil(cluster, SPOILT, standing=ScheduleStatus(queued=(NOON,), conversation_id=at_work, last_tick=NOON))
    await cluster.store.connection.call("DEL", cluster.store.all_shards[0].schedules_due)
    due, seconds = NOON + timedelta(minutes=1), NOON.timestamp() + 120.0
    while not 0 < int(seconds / TICK_SECONDS) * STRIDE % (SPOILT + 1) <= SPOILT - DUE_AT_ONCE:
        seconds += TICK_SECONDS
    await cluster.add()
    await cluster.come_due(due)
    await cluster.tick(minutes_later=(seconds - NOON.timestamp()) / 60)
    assert (await cluster.standing()).begun == 1
