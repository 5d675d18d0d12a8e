"""An ingress, a jobs worker and a beat in one process: each works as it does alone, and all end together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from broker.celery import redis_url
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from deckhands.operations.jobs.table import JOBS
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, saying
from tests.polling import until

LIMIT_SECONDS = 60.0
LOCK = f"{BEAT_KEYS}:lock"


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path).running() as running:
        running.start_controller()
        yield running


@pytest.fixture
def producer(cluster) -> Iterator[Producer]:
    found = Producer(cluster)
    yield found
    found.close()


@pytest.fixture
def broker(cluster) -> Iterator[Redis]:
    with Redis.from_url(redis_url(cluster.store.celery_url), decode_responses=True) as connection:
        yield connection


async def test_one_process_serves_tasks_and_jobs_and_sends_periodic_jobs(cluster, producer, broker):
    process = cluster.start_services()
    run = producer.run(turns=saying("done"))
    job = producer.app.send_task("deckhands.jobs.orphans", queue="deckhands.jobs")
    assert (await producer.value(run))["state"] == "finished"
    assert await producer.value(job) == {"removed": 0, "completed": 0}
    await until(lambda: broker.exists(f"{BEAT_KEYS}retire"), limit=LIMIT_SECONDS, what="a beat")
    asked = producer.app.control.inspect(timeout=2.0)
    registered = {
        name.partition("-")[0]: set(tasks) for name, tasks in (await asyncio.to_thread(asked.registered)).items()
    }
    assert registered["jobs"] == {f"deckhands.jobs.{job.name}" for job in JOBS}
    assert "deckhands.run" in registered["ingress"]
    assert not registered["ingress"] & registered["jobs"]
    waiting = producer.run()  # there is no tool worker
    await producer.begun(waiting)

    async def shows_the_run() -> bool:
        active = await asyncio.to_thread(asked.active) or {}
        shown = {name.partition("-")[0]: [info["id"] for info in found] for name, found in active.items()}
        assert waiting.id not in shown.get("jobs", [])
        return shown.get("ingress") == [waiting.id]

    await until(shows_the_run, limit=LIMIT_SECONDS, what="the run among the active tasks of the ingress")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, LIMIT_SECONDS) == 0
    assert broker.get(LOCK) is None
    assert "Traceback" not in cluster.log_of("s1")


async def test_invalid_job_reaches_no_task_of_the_ingress(cluster, producer):
    cluster.start_services()
    for name, queue in (("jobs.orphans", "deckhands"), ("submit", "deckhands.jobs")):
        producer.app.send_task(f"deckhands.{name}", queue=queue)
    job = producer.app.send_task("deckhands.jobs.orphans", queue="deckhands.jobs")
    assert await producer.value(job) == {"removed": 0, "completed": 0}
    await producer.until_taken()
    assert not await cluster.client.recent()


async def test_shutdown_of_one_worker_ends_the_process(cluster, producer):
    process = cluster.start_services()

    async def names() -> list[str]:
        answers = await asyncio.to_thread(producer.app.control.inspect(timeout=1.0).ping)
        return [name for name in answers or () if name.startswith("jobs-")]

    await until(names, limit=LIMIT_SECONDS, what="the jobs worker")
    producer.app.control.shutdown(destination=await names())
    assert await asyncio.to_thread(process.wait, LIMIT_SECONDS) == 0
