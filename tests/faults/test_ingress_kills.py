"""Ingresses that are killed: every callback exactly once, and what an inbox has accepted is carried out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.result import AsyncResult

from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster, steps
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import unhurried, until

AGENTS = 20
PLACES = (
    "celery.taken",
    pytest.param("ingress.before_begin", marks=pytest.mark.soak),
    pytest.param("ingress.begun", marks=pytest.mark.soak),
    pytest.param("ingress.before_result", marks=pytest.mark.soak),
    "ingress.before_answered",
)


async def test_a_chord_survives_an_ingress_and_a_controller(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller("c1")
        cluster.start_controller("c2")
        cluster.start_tool()
        cluster.start_ingress("d1")
        await all_present(cluster)
        producer = Producer(cluster)
        header = [producer.signature(f"task {n}", [*steps(1)[:1], *saying(f"answer {n}")]) for n in range(AGENTS)]
        body = producer.signature("Summarise", saying("all of them"))
        body.link(producer.app.signature("shop.report", queue="shop", task_id="the-report"))
        result = chord(header, app=producer.app)(body)
        parts: list[AsyncResult] = list(result.parent.results)

        async def conversations() -> int:
            return len(await cluster.client.recent())

        async def some_have_begun() -> bool:
            return await conversations() >= AGENTS // 4

        await until(some_have_begun, limit=unhurried(60.0), what="a beginning of the crowd")
        cluster.kill("d1")
        cluster.kill("c1")
        cluster.start_ingress("d2")
        await until(lambda: any(part.ready() for part in parts), limit=unhurried(120.0), what="the first result")
        cluster.kill("d2")
        cluster.start_ingress("d3")
        summary = await producer.value(result, limit=unhurried(180.0))
        assert summary["message"] == "all of them"
        messages = [part.get(timeout=5)["message"] for part in parts]
        assert sorted(messages) == sorted(f"answer {n}" for n in range(AGENTS))
        assert await conversations() == AGENTS + 1
        (_, asked, *_) = await cluster.client.events(derive_task_conversation_id(result.id))
        assert all(f'"answer {n}"' in asked.content for n in range(AGENTS))  # type: ignore[attr-defined]
        await until(lambda: reports(producer), limit=unhurried(60.0), what="the report")
        assert {report["headers"]["id"] for report in reports(producer)} == {"the-report"}
        assert len(reports(producer)) == 1


@pytest.mark.parametrize("place", PLACES)
async def test_ingress_dying_between_halves_is_recovered(tmp_path: Path, place: str) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        cluster.start_ingress("victim", DECKHANDS_FAILPOINTS=f"{place}:kill@1:{tmp_path}/once")
        await all_present(cluster)
        producer = Producer(cluster)
        then = producer.app.signature("shop.report", queue="shop")
        result = producer.run(turns=saying("done"), link=then)
        await cluster.until_ended("victim", limit=unhurried(60.0))
        cluster.start_ingress("survivor")
        assert (await producer.value(result, limit=unhurried(120.0)))["message"] == "done"
        assert len(await cluster.client.recent()) == 1
        told = cluster.client.store.keys(derive_task_conversation_id(result.id)).caller

        async def is_answered() -> bool:
            return await cluster.client.store.connection.call("HGET", told, "answered") == b"1"

        await until(is_answered, limit=unhurried(90.0), what="an end of the waiting")
        assert len({report["headers"]["id"] for report in reports(producer)}) == 1  # a repeat has the same id


def reports(producer: Producer) -> list[dict[str, Any]]:
    """The callbacks that wait in the queue of the other application."""
    return [json.loads(entry) for entry in producer.app.backend.client.lrange("shop", 0, -1)]
