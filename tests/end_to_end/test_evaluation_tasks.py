"""`deckhands.evaluate` as a Celery task: its result is the summary, however the ingress and the driver fare meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from deckhands.ingress.evaluations import MAX_STARTS
from deckhands.ingress.waiting_tasks import list_waiting
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present
from tests.polling import until
from tests.turns import finish, script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = [{"id": "six", "task": "2 * 3?", "answer": "6"}, {"id": "eight", "task": "2 * 4?", "answer": "8"}]
LIMIT_SECONDS = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Producer]:
    async with FaultCluster(tmp_path_factory.mktemp("evaluations")).running() as cluster:
        cluster.start()
        cluster.start_ingress("d1", DECKHANDS_EVALUATIONS=str(cluster.root / "evaluations"))
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


async def result_of(result: AsyncResult) -> Any:
    return await asyncio.to_thread(result.get, timeout=LIMIT_SECONDS)


async def test_result_is_the_summary_and_second_task_finds_it(producer: Producer) -> None:
    model = script(producer.cluster.root / "slow.json", finish("6"), latency_seconds=2.0)
    options = {"dataset": ROWS, "models": model, "out": "one", "concurrency": 1}
    result = producer.send("evaluate", kwargs=options)
    out = producer.cluster.root / "evaluations" / "one"
    await until(lambda: any(out.glob("tasks/*.json")), limit=LIMIT_SECONDS, what="the first half")
    producer.cluster.kill("d1")  # the evaluation does not need the ingress; its answer does
    producer.cluster.start_ingress("d2", DECKHANDS_EVALUATIONS=str(out.parent))
    summary = await result_of(result)
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = (out / "results.jsonl").read_bytes()
    assert await result_of(producer.send("evaluate", kwargs=options)) == summary
    assert (out / "results.jsonl").read_bytes() == rows


async def test_evaluation_started_in_time_outlives_its_expired_message(producer: Producer) -> None:
    model = script(producer.cluster.root / "late.json", finish("6"), latency_seconds=2.0)
    options = {"dataset": ROWS, "models": model, "out": "late", "concurrency": 1}
    result = producer.send("evaluate", kwargs=options, task_id="late")
    out = producer.cluster.root / "evaluations" / "late"
    await until(lambda: list_waiting(out), limit=LIMIT_SECONDS, what="the first half")
    now = producer.cluster.client.store.clock.now()
    producer.send("evaluate", kwargs=options, task_id="late", expires=now)
    too_late = producer.send("evaluate", kwargs={**options, "out": "never"}, expires=now)
    with pytest.raises(TaskRevokedError):
        await result_of(too_late)
    assert not out.with_name("never").exists()
    assert (await result_of(result))["models"][model]["outcomes"]["resolved"] == 1


async def test_a_command_that_is_killed_is_started_again(producer: Producer) -> None:
    model = script(producer.cluster.root / "killed.json", finish("6"), latency_seconds=5.0)
    options = {"dataset": ROWS, "models": model, "out": "killed", "concurrency": 2}
    result = producer.send("evaluate", kwargs=options)
    out = producer.cluster.root / "evaluations" / "killed"
    await until((out / "progress.jsonl").exists, limit=LIMIT_SECONDS, what="the command")
    for pid in commands_in(out):
        os.kill(pid, signal.SIGKILL)
    summary = await result_of(result)
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert len((out / "results.jsonl").read_bytes().splitlines()) == 2
    await until(lambda: not list_waiting(out), what="the end of the waiting")


async def test_repeatedly_early_ending_command_is_given_up(producer: Producer) -> None:
    model = script(producer.cluster.root / "lost.json", finish("6"), latency_seconds=60.0)
    out = producer.cluster.root / "evaluations" / "lost"
    result = producer.send("evaluate", kwargs={"dataset": ROWS, "models": model, "out": "lost"})
    await until((out / "progress.jsonl").exists, limit=LIMIT_SECONDS, what="the command")
    ((asker, _),) = list_waiting(out)
    asker.model_copy(update={"starts": MAX_STARTS}).write(out)
    os.utime(next(out.glob("tasks/*.json")), (0, 0))
    for pid in commands_in(out):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception, match="too early too often"):
        await result_of(result)
    await until(lambda: not list_waiting(out), what="the end of the waiting")


async def test_the_id_of_a_task_names_no_file(producer: Producer) -> None:
    model = script(producer.cluster.root / "named.json", finish("6"))
    options = {"dataset": ROWS, "models": model, "out": "named", "concurrency": 2}
    summary = await result_of(producer.send("evaluate", kwargs=options, task_id="../../../no-name-of-a-task"))
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert not list(producer.cluster.root.parent.rglob("no-name-of-a-task*"))


def commands_in(directory: Path) -> list[int]:
    """Return the processes that drive the evaluation of a directory."""
    found = [one for one in psutil.process_iter(["cmdline"]) if str(directory) in (one.info["cmdline"] or ())]
    return [one.pid for one in found]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"out": "../elsewhere"}, "out: "),
        ({"dataset": "../../etc/passwd"}, "not below the directory of evaluations"),
        ({"dataset": "/etc/passwd"}, "not below the directory of evaluations"),
        ({"dataset": "inspect:tasks.py@one"}, "cannot be read"),
        ({"dataset": [{**ROWS[0], "workspace": "/etc"}]}, "row 1: workspace is a path"),
        ({"dataset": [{**ROWS[0], "images": ["/etc/passwd"]}]}, "row 1: images is a path"),
        ({"dataset": [{"id": "a", "task": "t"}]}, "line 1: it has no check, no tests and no answer"),
        ({"repositories": "/etc"}, "not below the directory of evaluations"),
        ({"redo": ["six"]}, "redo: "),
    ],
)
async def test_forbidden_evaluation_request_starts_nothing(
    producer: Producer, changes: dict[str, Any], why: str
) -> None:
    options = {"dataset": ROWS, "models": "scripted/none", "out": "refused"} | changes
    result = producer.send("evaluate", kwargs=options)
    with pytest.raises(Exception, match=why):
        await result_of(result)
    assert not Path(producer.cluster.root, "evaluations", "refused", "evaluation.json").exists()
