"""`deckhands.evaluate` as a Celery task: its result is the summary, however the door and the driver fare meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from celery.result import AsyncResult

from tests.door_parts import Producer, all_present
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, script
from tests.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = [{"id": "six", "task": "2 * 3?", "answer": "6"}, {"id": "eight", "task": "2 * 4?", "answer": "8"}]
LIMIT_SECONDS = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Producer]:
    async with FaultCluster(tmp_path_factory.mktemp("evaluations")).running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        cluster.start_door("d1", DECKHANDS_EVALUATIONS=str(cluster.root / "evaluations"))
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


async def result_of(result: AsyncResult) -> Any:
    return await asyncio.to_thread(result.get, timeout=LIMIT_SECONDS)


async def test_the_result_is_the_summary_and_a_second_task_finds_it(producer: Producer) -> None:
    model = script(producer.cluster.root / "slow.json", finish("6"), latency_seconds=2.0)
    options = {"dataset": ROWS, "models": model, "out": "one", "concurrency": 1}
    result = producer.send("evaluate", kwargs=options)
    out = producer.cluster.root / "evaluations" / "one"
    await until((out / "task.json").exists, limit=LIMIT_SECONDS, what="the first half")
    producer.cluster.kill("d1")  # the evaluation does not need the door; its answer does
    producer.cluster.start_door("d2", DECKHANDS_EVALUATIONS=str(out.parent))
    summary = await result_of(result)
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = (out / "results.jsonl").read_bytes()
    assert await result_of(producer.send("evaluate", kwargs=options)) == summary
    assert (out / "results.jsonl").read_bytes() == rows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"out": "../elsewhere"}, "out: "),
        ({"dataset": "../../etc/passwd"}, "not below the directory of evaluations"),
        ({"dataset": "/etc/passwd"}, "not below the directory of evaluations"),
        ({"dataset": "inspect:tasks.py@one"}, "cannot be read"),
        ({"dataset": [{**ROWS[0], "workspace": "/etc"}]}, "row 1: workspace is a path"),
        ({"dataset": [{**ROWS[0], "images": ["/etc/passwd"]}]}, "row 1: images is a path"),
        ({"dataset": [{"id": "a", "task": "t"}]}, "line 1: it has neither a check nor an answer"),
        ({"repositories": "/etc"}, "not below the directory of evaluations"),
        ({"redo": ["six"]}, "redo: "),
    ],
)
async def test_what_a_producer_may_not_ask_for_begins_nothing(
    producer: Producer, changes: dict[str, Any], why: str
) -> None:
    options = {"dataset": ROWS, "models": "scripted/none", "out": "refused"} | changes
    result = producer.send("evaluate", kwargs=options)
    with pytest.raises(Exception, match=why):
        await result_of(result)
    assert not Path(producer.cluster.root, "evaluations", "refused", "evaluation.json").exists()
