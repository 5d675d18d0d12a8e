"""Celery's events of agents, as a monitor such as Flower receives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.faults.harness import steps
from tests.ingress_parts import Producer, saying
from tests.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_ARGUMENT_CHARS = 250
"""200 characters, and what says that there were more."""


@asynccontextmanager
async def watched(producer: Producer) -> AsyncIterator[list[dict[str, Any]]]:
    """The events of tasks, in the order in which they arrive."""
    events: list[dict[str, Any]] = []
    with producer.app.connection_for_read() as connection:
        receiver = producer.app.events.Receiver(connection, handlers={"*": events.append})

        def receive() -> None:
            receiver.capture(limit=None, timeout=None, wakeup=False)

        receiving = asyncio.create_task(asyncio.to_thread(receive))
        try:
            yield events
        finally:
            receiver.should_stop = True
            await asyncio.wait_for(receiving, 30)


def kinds(events: list[dict[str, Any]], task_id: str) -> list[str]:
    return [event["type"] for event in events if event.get("uuid") == task_id]


async def test_a_monitor_sees_how_agents_begin_and_end(producer: Producer) -> None:
    value = "correct-horse-battery"
    options = {**producer.options(saying(f"done with {value}")), "secrets": {"KEY": value}}
    async with watched(producer) as events:
        await until(lambda: any(event["type"] == "worker-heartbeat" for event in events), what="the beat of an ingress")
        done = producer.send("run", "do it " * 100, kwargs=options)
        failed = producer.send("run", "x", kwargs={"no_such_field": 1})
        revoked = producer.run(turns=steps(1, seconds=60.0))
        await producer.begun(revoked)
        revoked.revoke(terminate=True)
        ends = {done.id: "task-succeeded", failed.id: "task-failed", revoked.id: "task-revoked"}
        for task_id, end in ends.items():
            await until(lambda: end in kinds(events, task_id), limit=60.0, what=f"{end}")  # noqa: B023
    assert kinds(events, done.id) == ["task-received", "task-started", "task-succeeded"]
    assert kinds(events, failed.id) == ["task-received", "task-failed"]
    received, *started, end = kinds(events, revoked.id)  # the revocation may have come before the start
    assert (received, end) == ("task-received", "task-revoked")
    assert started in ([], ["task-started"])
    for event in [event for event in events if event["type"] == "task-received" and event["uuid"] == done.id]:
        assert event["name"] == "deckhands.run"
        assert "do it do it" in event["args"]
        assert len(event["args"]) <= MAX_ARGUMENT_CHARS
    assert value not in str(events)


async def test_events_tell_when_an_agent_works(producer: Producer) -> None:
    async with watched(producer) as events:
        await until(lambda: any(event["type"] == "worker-heartbeat" for event in events), what="the beat of an ingress")
        turns = [{"text": "a step", "latency_seconds": 2.0, **saying("done")[0]}]
        later = producer.run(turns=turns, countdown=3)
        revoked = producer.run(turns=saying("never"), countdown=600)
        await until(lambda: kinds(events, revoked.id) == ["task-received"], limit=60.0, what="the message of a task")
        at_work = producer.run(turns=steps(1, seconds=60.0))
        await until(lambda: "task-started" in kinds(events, at_work.id), limit=60.0, what="the start of an agent")
        for task in (revoked, at_work):
            task.revoke(terminate=True)
            await until(lambda: "task-revoked" in kinds(events, task.id), limit=60.0, what="the end")  # noqa: B023
        await until(lambda: "task-succeeded" in kinds(events, later.id), limit=60.0, what="the end of an agent")
        producer.run(turns=turns, task_id=later.id)  # delivered again
        last = producer.run(turns=saying("last"))
        await until(lambda: "task-succeeded" in kinds(events, last.id), limit=60.0, what="the end of an agent")
    assert kinds(events, revoked.id) == ["task-received", "task-revoked"]
    assert kinds(events, at_work.id) == ["task-received", "task-started", "task-revoked"]
    assert kinds(events, later.id) == ["task-received", "task-started", "task-succeeded"]
    _, started, ended = (event for event in events if event.get("uuid") == later.id)
    assert ended["runtime"] >= 2.0
    assert ended["timestamp"] - started["timestamp"] >= 2.0


async def test_inspect_shows_agents_at_work_and_those_that_wait(producer: Producer) -> None:
    value, long = "correct-horse-battery", [{"latency_seconds": 600.0, **saying("too late")[0]}]
    at_work = producer.send("run", f"use {value}", kwargs={**producer.options(long), "secrets": {"KEY": value}})
    waits = producer.run(turns=saying("later"), countdown=600)
    conversation_id = await producer.begun(at_work)
    await producer.begun(waits)
    (ingress,) = [
        name
        for answer in producer.app.control.ping(timeout=30.0, limit=3)
        for name in answer
        if name.startswith("ingress-")
    ]
    inspect = producer.app.control.inspect(destination=[ingress], limit=1, timeout=30.0)

    async def shown(command: str, *arguments: Any) -> Any:
        """The answer of the ingress."""
        return (await asyncio.to_thread(getattr(inspect, command), *arguments))[ingress]

    async def is_at_work() -> bool:
        return at_work.id in [info["id"] for info in await shown("active") or ()]

    await until(is_at_work, limit=60.0, what="an agent among the active tasks")
    (active,), (reserved,) = await shown("active"), await shown("reserved")
    assert (active["name"], active["conversation_id"]) == ("deckhands.run", conversation_id)
    assert "use <secret_hidden>" in active["args"]
    assert active["time_start"] > 0
    assert active["hostname"] == ingress
    assert (reserved["id"], reserved["time_start"]) == (waits.id, None)
    queried = await shown("query_task", at_work.id, waits.id, "no-such-task")
    assert {name: state for name, (state, _) in queried.items()} == {at_work.id: "active", waits.id: "reserved"}
    assert value not in str((active, queried))
    for task in (at_work, waits):
        task.revoke(terminate=True)
        await producer.until_state(task, "REVOKED")

    async def have_ended() -> bool:
        return not await shown("active") and not await shown("reserved")

    await until(have_ended, limit=60.0, what="an answer without agents")
