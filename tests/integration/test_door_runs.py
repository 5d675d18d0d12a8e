"""Agents as Celery tasks, called by name from an application that does not import Deckhands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from celery.exceptions import TaskRevokedError

from deckhands.door.desk import conversation_of_task
from tests.door_parts import Producer, saying
from tests.faults.harness import FaultCluster, steps
from tests.polling import until


@pytest.fixture
async def producer(tmp_path: Path) -> AsyncIterator[Producer]:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        cluster.start_door()
        yield Producer(cluster)


async def test_a_run_is_a_task_whose_value_is_the_summary(producer: Producer) -> None:
    result = producer.run(turns=steps(1))
    summary = await producer.value(result)
    conversation_id = conversation_of_task(result.id)
    assert summary == (await producer.cluster.client.summary(conversation_id)).as_json()
    assert (summary["state"], summary["message"]) == ("finished", "all done")
    caller = producer.cluster.client.store.keys(conversation_id)

    async def is_told() -> bool:
        call = producer.cluster.client.store.connection.call
        return await call("HGET", caller.caller, "told") == b"1" and not await call("ZCARD", caller.shard.awaited)

    await until(is_told, what="end of the waiting")
