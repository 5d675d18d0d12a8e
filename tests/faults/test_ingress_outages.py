"""The store, with Celery's broker in it, refuses for a while in the middle of a half: a run has its one result."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from celery import Celery
from celery.result import AsyncResult

from broker.store.embedded import EmbeddedValkey
from deckhands.ingress.ingress_app import CONCURRENCY
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import unhurried, until

LIMIT_SECONDS = 90.0


@pytest.fixture
async def producer(tmp_path: Path) -> AsyncIterator[Producer]:
    """An application beside a cluster whose store writes to disk before it answers."""
    async with FaultCluster(tmp_path, append_fsync="always").running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        cluster.start_ingress()
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


async def each_has_its_one_result(producer: Producer, sent: list[AsyncResult], queue: str) -> None:
    """Wait by looking, since a listener may have lost its connection, and count results and callbacks."""
    await until(lambda: all(one.ready() for one in sent), limit=unhurried(LIMIT_SECONDS), what="all results")
    assert [one.state for one in sent] == ["SUCCESS"] * len(sent)
    assert len(await producer.cluster.client.recent()) == len(sent)

    def followed() -> set[str]:
        entries = producer.app.backend.client.lrange(queue, 0, -1)
        return {json.loads(entry)["headers"]["parent_id"] for entry in entries}

    await until(lambda: followed() == {one.id for one in sent}, limit=unhurried(LIMIT_SECONDS), what="callbacks")
    entries = producer.app.backend.client.lrange(queue, 0, -1)
    assert len({json.loads(entry)["headers"]["id"] for entry in entries}) == len(sent)


@pytest.mark.parametrize("half", ["ingress.before_begin", "ingress.before_answered"])
async def test_the_store_refuses_in_the_middle_of_a_half(producer: Producer, tmp_path: Path, half: str) -> None:
    cluster, gate = producer.cluster, tmp_path / "gate"
    cluster.kill("d1")
    cluster.start_ingress("d2", DECKHANDS_FAILPOINTS=f"{half}:pause@1:{gate}")
    report = producer.app.signature("shop.report", queue="shop")
    sent = [producer.run(turns=saying("done"), link=report)]
    call = cluster.client.store.connection.call
    await until(gate.exists, limit=unhurried(LIMIT_SECONDS), what="the half")
    await call("CONFIG", "SET", "maxmemory", "1")
    gate.unlink()
    await until(lambda: "is unavailable" in cluster.log_of("d2"), limit=unhurried(30.0), what="a line in the log")
    await call("CONFIG", "SET", "maxmemory", "0")
    await each_has_its_one_result(producer, sent, "shop")


@pytest.mark.slow
async def test_absent_result_backend_takes_no_slot_or_result(tmp_path: Path) -> None:
    """More tasks than an ingress carries out at once end without a result; all of them have theirs in the end."""
    kept = EmbeddedValkey(tmp_path / "results")
    await kept.start()
    await kept.stop()
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        cluster.start_ingress(DECKHANDS_CELERY_RESULT_URL=kept.celery_url)
        await all_present(cluster)
        # It keeps no results itself: it could not even send a task while nobody answers there.
        sending = Celery("shop", broker=cluster.store.celery_url, set_as_current=False)
        names = [f"submit-{number}" for number in range(CONCURRENCY + 1)]
        options = {"task": "do it", "model": "scripted/nowhere", "workspace": {"sandbox": "none"}}
        for name in names:
            sending.send_task("deckhands.submit", kwargs=options, queue="deckhands", task_id=name)
        log = tmp_path / "d1.log"
        came_back = "a result was dropped"
        await until(lambda: log.read_text().count(came_back) >= len(names), limit=unhurried(120.0), what="failures")
        await kept.start()
        try:
            found = Celery("reading", backend=kept.celery_url, set_as_current=False).backend

            def are_there() -> bool:
                return all(found.get_state(name) == "SUCCESS" for name in names)

            await until(are_there, limit=unhurried(120.0), what="all results")
        finally:
            await kept.stop()
        assert len(await cluster.client.recent()) == len(names)
