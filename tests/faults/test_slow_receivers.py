"""Receivers of webhooks that take a request and never answer: other jobs, and other tenants, do not wait for them."""

from __future__ import annotations

import asyncio
import base64

import pytest
from celery import Celery

from broker.contract.specs import Tenancy
from broker.runtime.settings import BrokerSettings
from deckhands.client.client import Client
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.jobs.celery_app import JOBS_PREFIX, JOBS_QUEUE
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import open_repository
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from tests.faults.harness import FaultCluster
from tests.webhook_parts import begin_worked, receiving

SECRET_KEY = base64.b64encode(bytes(32)).decode()
CONVERSATIONS = 24
LIMIT_SECONDS = 12.0
"""Shorter than one of the requests takes."""


async def is_free(client: Client, place: str) -> bool:
    return not await client.store.connection.call("EXISTS", place)


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
        for number in range(CONVERSATIONS):
            await begin_worked(client, f"slow-{number}", tenancy=Tenancy(tenant="slow"))
        cluster.start_jobs("j1", DECKHANDS_WEBHOOK_PRIVATE="127.0.0.1", DECKHANDS_SECRET_KEY=SECRET_KEY)
        with Celery(broker=cluster.store.celery_url, set_as_current=False) as app:
            app.send_task(f"{JOBS_PREFIX}webhooks", queue=JOBS_QUEUE, ignore_result=True)
            await cluster.until(lambda: len(taken) >= 4, what="requests to the silent receiver")
            schedules = ScheduleRepository(client.store, client.secrets)
            await schedules.add(Schedule(name="honest", cron="* * * * *"), TaskSpec(task="look", model="scripted/x"))
            names = client.store.all_shards[0]
            now = await schedules.now()
            due_ms = int(now.replace(second=0, microsecond=0).timestamp() * 1000)
            await client.store.connection.call("ZADD", names.schedules_due, due_ms, "honest")
            await begin_worked(client, "quick-1", tenancy=Tenancy(tenant="quick"))
            app.send_task(f"{JOBS_PREFIX}schedules", queue=JOBS_QUEUE, ignore_result=True)

            async def is_looked_at() -> bool:
                standing = (await schedules.entry("honest")).status
                return bool(standing.begun or standing.error)

            await cluster.until(is_looked_at, limit=LIMIT_SECONDS, what="a look at a schedule")
            place = client.store.all_shards[0].job_lock("webhooks")
            await cluster.until(lambda: is_free(client, place), what="the end of the first job")
            app.send_task(f"{JOBS_PREFIX}webhooks", queue=JOBS_QUEUE, ignore_result=True)
            await cluster.until(lambda: receiver.states("quick-1"), limit=LIMIT_SECONDS, what="a delivery")
        assert len(taken) <= 16  # of one tenant at once
    for writer in taken:
        writer.close()
    silent.close()
