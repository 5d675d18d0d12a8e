"""Celery's events of agents, as a monitor such as Flower receives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.door_parts import Producer, saying
from tests.faults.harness import steps
from tests.polling import until

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
        await until(lambda: any(event["type"] == "worker-heartbeat" for event in events), what="the beat of a door")
        done = producer.send("run", "do it " * 100, kwargs=options)
        failed = producer.send("run", "x", kwargs={"model": "no/such-model"})
        revoked = producer.run(turns=steps(1, seconds=60.0))
        await producer.begun(revoked)
        revoked.revoke(terminate=True)
        ends = {done.id: "task-succeeded", failed.id: "task-failed", revoked.id: "task-revoked"}
        for task_id, end in ends.items():
            await until(lambda: end in kinds(events, task_id), limit=60.0, what=f"{end}")  # noqa: B023
    for task_id, end in ends.items():
        assert {"task-received", "task-started", end} == set(kinds(events, task_id))
        assert kinds(events, task_id).count(end) == 1
    received = [event for event in events if event["type"] == "task-received" and event["uuid"] == done.id]
    for event in received:
        assert event["name"] == "deckhands.run"
        assert "do it do it" in event["args"]
        assert len(event["args"]) <= MAX_ARGUMENT_CHARS
    assert value not in str(events)
