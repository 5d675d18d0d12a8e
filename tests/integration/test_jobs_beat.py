"""Beats send the periodic jobs, one at a time; jobs are Celery tasks, and some are done alone; one process may be all.

That process is an ingress, a jobs worker and a beat: each works as it does alone, and all end together.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
from redis import Redis

from broker.celery import redis_url
from broker.store.keys import ShardKeys
from broker.store.store import Store
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from deckhands.operations.jobs.job import LOCK_MS, hold_lock
from deckhands.operations.jobs.table import JOBS
from tests.archive_parts import begin_ended
from tests.ingress_parts import Producer, saying
from tests.polling import until

LIMIT_SECONDS = 60.0
LOCK = f"{BEAT_KEYS}:lock"


@pytest.fixture
def producer(cluster) -> Iterator[Producer]:
    found = Producer(cluster)
    yield found
    found.close()


@pytest.fixture
def broker(cluster) -> Redis:
    """Celery's broker, as the beat sees it."""
    with Redis.from_url(redis_url(cluster.store.celery_url), decode_responses=True) as connection:
        yield connection


async def test_stalled_beat_waits_for_its_turn(cluster, broker):
    beat = cluster.start_beat("b1")
    await until(lambda: broker.get(LOCK), limit=LIMIT_SECONDS, what="a beat with the lock")
    broker.set(LOCK, "of-another-beat", px=2_000)
    await until(lambda: broker.get(LOCK) not in (None, "of-another-beat"), limit=LIMIT_SECONDS, what="its next turn")
    assert beat.poll() is None
    assert "Traceback" not in (cluster.root / "b1.log").read_text()


async def test_job_retries_until_its_archive_exists_and_restores(cluster, producer, tmp_path):
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    place.write_text("no directory yet")
    rules.write_text('[[rule]]\nage = "0s"\n')
    cluster.start_jobs(DECKHANDS_ARCHIVE=str(place), DECKHANDS_RETENTION=str(rules))
    await begin_ended(cluster.client, "one-of-us")
    cluster.forged.add("one-of-us")
    result = producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs")
    await until(lambda: result.state == "RETRY", limit=LIMIT_SECONDS, what="a job that is to be tried again")
    place.unlink()
    assert (await producer.value(result))["archived"] == 1
    rules.write_text("")
    for is_new in (True, False):
        back = producer.app.send_task("deckhands.jobs.restore", args=["one-of-us"], queue="deckhands.jobs")
        assert await producer.value(back) == {"conversation_id": "one-of-us", "restored": is_new}
    assert (await cluster.client.row("one-of-us")).state == "finished"


async def test_job_of_a_stopped_worker_returns_to_the_queue(cluster, producer, tmp_path):
    place, rules, gate = tmp_path / "archive", tmp_path / "retention.toml", tmp_path / "gate"
    rules.write_text('[[rule]]\nage = "0s"\n')
    environment = {"DECKHANDS_ARCHIVE": str(place), "DECKHANDS_RETENTION": str(rules)}
    first = cluster.start_jobs("j1", DECKHANDS_FAILPOINTS=f"archive.before_write:pause:{gate}", **environment)
    await begin_ended(cluster.client, "one-of-us")
    result = producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs")
    await until(gate.exists, limit=LIMIT_SECONDS, what="a job at work")
    first.send_signal(signal.SIGTERM)
    cluster.start_jobs("j2", **environment)
    assert (await producer.value(result))["archived"] == 1
    gate.unlink()
    assert await asyncio.to_thread(first.wait, LIMIT_SECONDS) == 0


async def test_job_is_run_by_its_worker_and_result_kept(cluster, producer):
    cluster.start_jobs()
    result = producer.app.send_task("deckhands.jobs.orphans", queue="deckhands.jobs")
    assert await producer.value(result) == {"removed": 0, "completed": 0}
    for name, arguments, said in [
        ("orphans", ["x", "y"], "The arguments do not fit: too many positional arguments"),
        ("restore", [], "The arguments do not fit: missing a required argument: 'conversation_id'"),
        ("restore", ["../../x"], "cannot be used"),
        ("restore", [["x"]], "is not a text"),
        ("restore", ["nobody-knows"], "nobody-knows"),
    ]:
        result = producer.app.send_task(f"deckhands.jobs.{name}", args=arguments, queue="deckhands.jobs")
        with pytest.raises(Exception, match=said):
            await producer.value(result)
    asked = producer.app.control.inspect(timeout=2.0)
    registered = await asyncio.to_thread(asked.registered)
    assert {name for names in registered.values() for name in names} >= {f"deckhands.jobs.{job.name}" for job in JOBS}


async def test_second_holder_is_not_alone_until_the_first_ends(valkey_store: Store) -> None:
    async with hold_lock(valkey_store, "retire") as first, hold_lock(valkey_store, "retire") as second:
        assert (first, second) == (True, False)
    async with hold_lock(valkey_store, "retire") as third:
        assert third


async def test_lock_of_another_is_neither_kept_nor_released(valkey_store: Store) -> None:
    names, connection = ShardKeys(0), valkey_store.connection
    async with hold_lock(valkey_store, "retire"):
        await connection.call("SET", names.job_lock("retire"), "another", "PX", 1_000)  # its own has lapsed meanwhile
        place = (names.job_lock("retire"), names.root)
        assert await valkey_store.call_function("deck_hold_job", place, "keep", "mine", LOCK_MS) == ["other"]
        assert 0 < await connection.call("PTTL", names.job_lock("retire")) <= 1_000
    assert await connection.call("EXISTS", names.job_lock("retire")) == 1


@pytest.mark.parametrize(
    "forged", [("SET", "for ever"), ("SET", "for years", "PX", 10**12), ("HSET", "of another type", "")]
)
async def test_a_forged_place_keeps_no_job_from_being_done(valkey_store: Store, forged: tuple[str | int, ...]) -> None:
    what, *rest = forged
    await valkey_store.connection.call(what, ShardKeys(0).job_lock("retire"), *rest)
    async with hold_lock(valkey_store, "retire") as is_alone:
        assert is_alone


async def test_one_process_serves_tasks_and_jobs_and_sends_periodic_jobs(cluster, producer, broker):
    cluster.start_controller()
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
