"""Ingresses that are killed, or whose store refuses for a while: one result, one answer and one callback of each task.

Each accepted entry of an inbox or a Celery queue is handled exactly once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord
from celery.result import AsyncResult

from broker.celery.taken_entries import TAKEN
from broker.store.embedded import EmbeddedValkey
from deckhands.ingress.context import derive_task_conversation_id
from deckhands.ingress.ingress_app import CONCURRENCY
from tests.faults.harness import FaultCluster, steps
from tests.inbox_parts import answers, put, replies
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
        told = cluster.client.store.known_keys(derive_task_conversation_id(result.id)).caller

        async def is_answered() -> bool:
            return await cluster.client.store.connection.call("HGET", told, "answered") == b"1"

        await until(is_answered, limit=unhurried(90.0), what="an end of the waiting")
        assert len({report["headers"]["id"] for report in reports(producer)}) == 1  # a repeat has the same id


def reports(producer: Producer) -> list[dict[str, Any]]:
    """The callbacks that wait in the queue of the other application."""
    return [json.loads(entry) for entry in producer.app.backend.client.lrange("shop", 0, -1)]


MESSAGES_A_KILL = 20


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, id="some", marks=[pytest.mark.soak, pytest.mark.timeout(1_200)]),
        pytest.param(200, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3_600)]),
    ],
)
async def test_a_killed_ingress_loses_nothing(tmp_path: Path, kills: int) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        for name in ("d0", "d1"):
            cluster.start_ingress(name)
        await all_present(cluster)
        producer = Producer(cluster)
        broker = producer.app.backend.client
        model = producer.options(saying("done"))["model"]
        sent: list[str] = []
        for kill in range(kills):
            before = len(sent)
            for n in range(MESSAGES_A_KILL):
                sent.append(f"task-{before + n}")
                producer.send("submit", "do it", kwargs={"model": model}, task_id=sent[-1], ignore_result=True)
            left = MESSAGES_A_KILL - kill % MESSAGES_A_KILL  # each kill meets another moment of the same work
            await until(lambda left=left: broker.llen("deckhands") < left, limit=unhurried(60.0), what="work")  # type: ignore[misc]
            name = f"d{kill % 2}"
            cluster.kill(name)
            cluster.start_ingress(name)

        def is_drained() -> bool:
            taken = broker.keys(f"{TAKEN}*")
            return not (broker.llen("deckhands") or broker.hlen("deckhands:unacked") or taken)

        await until(is_drained, limit=unhurried(120.0), what="an end of all messages")
        store = cluster.client.store
        metas = [store.known_keys(derive_task_conversation_id(task_id)).meta for task_id in sent]
        there = await store.connection.call_many([("EXISTS", meta) for meta in metas])
        lost = there.count(0)
        print(f"{kills} ingresses killed, {len(sent)} messages sent, {lost} lost")
        assert lost == 0
        assert len(await cluster.client.recent(limit=2 * len(sent))) == len(sent)


LIMIT_SECONDS = 90.0


@pytest.fixture
async def producer(tmp_path: Path) -> AsyncIterator[Producer]:
    """An application beside a cluster whose store writes to disk before it answers."""
    async with FaultCluster(tmp_path, append_fsync="always").running() as cluster:
        cluster.start()
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
    """More tasks than an ingress handles at once end without a result; all of them have theirs in the end."""
    kept = EmbeddedValkey(tmp_path / "results")
    await kept.start()
    await kept.stop()
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start()
        cluster.start_ingress(DECKHANDS_CELERY_RESULT_URL=kept.celery_url)
        await all_present(cluster)
        # It keeps no results itself: it could not even send a task while that backend is silent.
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


SEED = 20261123


@pytest.mark.parametrize(
    ("entries", "kills"),
    [
        pytest.param(300, 6, id="some"),
        pytest.param(10_000, 200, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(7_200)]),
    ],
)
async def test_no_accepted_entry_is_lost_or_doubled(tmp_path: Path, entries: int, kills: int) -> None:
    chance = random.Random(SEED)
    async with FaultCluster(tmp_path).running() as cluster:
        starts = {"c": cluster.start_controller, "d": cluster.start_ingress}
        for kind, start in starts.items():
            start(f"{kind}1")
            start(f"{kind}2")
        store = cluster.client.store
        options = Producer(cluster).options(saying("done"))
        options = {"model": options["model"]}
        sent, killed = 0, 0
        while sent < entries or killed < kills:
            for _ in range(max(1, entries // kills)):
                if sent < entries:
                    await put(store, {"id": f"entry-{sent}", "task": "do it", **options})
                    sent += 1
            if killed < kills:
                before = await answers(store)

                async def got_on(before: int = before) -> bool:
                    return await answers(store) > before

                await until(got_on, limit=unhurried(120.0), what="one more answer")
                name = f"{chance.choice('cd')}{chance.choice('12')}"
                cluster.kill(name)
                starts[name[0]](name)
                killed += 1

        async def all_are_told() -> bool:
            if await answers(store) < 2 * entries:
                return False
            return len({(reply.request_id, reply.event) for reply in await replies(store)}) == 2 * entries

        await until(all_are_told, limit=unhurried(120.0 + entries / 5), what="both answers to all entries")
        told = await replies(store)
        by_entry = {(reply.request_id, reply.event): reply.conversation_id for reply in told}
        assert Counter(event for _, event in by_entry) == {"accepted": entries, "settled": entries}
        assert all(by_entry[name, "accepted"] == by_entry[name, "settled"] for name, _ in by_entry)
        assert len({*by_entry.values()}) == entries
        rows = await cluster.client.recent(limit=2 * entries)
        assert {row.conversation_id for row in rows} == {*by_entry.values()}
        # One that killed three workers in a row has failed, and its producer has that answer.
        assert {row.state for row in rows} <= {"finished", "error"}
