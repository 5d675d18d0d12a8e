"""Each role starts by its own command, from nothing; most tests fork their workers, see `tests.forked_programs`.

A controller worker loads the library of its default model before the first conversation needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from broker.celery import redis_url
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.integration.command_line import environment
from tests.polling import until
from tests.stores import RealServer


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


PROGRAM = """
import asyncio, sys
from controller_worker.loop.consumer import ControllerConsumer
from controller_worker.settings import load_controller_settings

async def work():
    assert "aiohttp" not in sys.modules
    stop = asyncio.Event()
    running = asyncio.create_task(ControllerConsumer(load_controller_settings()).run(stop))
    while {wanted!r} not in sys.modules and not running.done():
        await asyncio.sleep(0.05)
    stop.set()
    await running
    print(sorted({{"aiohttp", "openai", "litellm", "anthropic"}} & set(sys.modules)))

asyncio.run(work())
"""


@pytest.mark.parametrize(
    ("variables", "wanted", "loaded"),
    [
        ({"LLM_MODEL": "openai/gpt-4o", "LLM_BASE_URL": "http://127.0.0.1:1/v1"}, "aiohttp", "['aiohttp']"),
        ({}, "broker.coordination.heartbeat_thread", "[]"),
        ({"LLM_MODEL": "scripted//no/such.json"}, "broker.coordination.heartbeat_thread", "[]"),
    ],
)
def test_a_worker_without_conversations_prepares_for_its_default_model(
    tmp_path: Path, valkey_server: RealServer, variables: dict[str, str], wanted: str, loaded: str
) -> None:
    env = environment(tmp_path, DECKHANDS_URL=valkey_server.url, LLM_API_KEY="k", **variables)
    program = [sys.executable, "-c", PROGRAM.format(wanted=wanted)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done
    assert done.stdout.strip() == loaded
