"""Each role starts by its own command, from nothing; most tests fork their workers, see `tests.forked_workers`."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from broker.celery import redis_url
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import until


async def test_workers_that_their_commands_start_do_their_work_together(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.started_by = ("env",)
        cluster.start()
        cluster.start_ingress()
        cluster.start_jobs()
        await all_present(cluster)
        cluster.start_beat()
        producer = Producer(cluster)
        run = producer.signature("a task", saying("well done")).apply_async()
        job = producer.app.send_task("deckhands.jobs.orphans", queue="deckhands.jobs")
        assert (await producer.value(run))["message"] == "well done"
        assert await producer.value(job) == {"removed": 0, "completed": 0}
        with Redis.from_url(redis_url(cluster.store.celery_url)) as broker:
            await until(lambda: broker.get(f"{BEAT_KEYS}:lock"), limit=60.0, what="a beat at work")
        producer.close()
