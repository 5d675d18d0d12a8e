"""A Celery task as a tool, with an application and a worker of the user's own, and a tool worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.celery.dispatch import TaskSender
from broker.contract.actions import ToolCallAction
from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation, ToolCallObservation
from tests.faults.harness import FaultCluster
from tool_worker.worker.steps.action_run import compute_fingerprint


def refund(order: int, amount: float) -> list[dict[str, Any]]:
    return [
        {"tool_calls": [{"name": "refund", "arguments": {"order": order, "amount": amount}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]


@pytest.fixture
def environment(cluster: FaultCluster) -> dict[str, str]:
    return {
        "EXAMPLE_CELERY_URL": cluster.store.celery_url,
        "EXAMPLE_TOOLS_TRACE": str(cluster.root / "trace"),
        "DECKHANDS_TOOLS": "tests.example_celery:refund_tool",
    }


@pytest.fixture
async def shop(cluster: FaultCluster, environment: dict[str, str]) -> AsyncIterator[subprocess.Popen[bytes]]:
    with user_worker(cluster, environment, "--pool=solo") as worker:
        yield worker


@contextmanager
def user_worker(cluster: FaultCluster, environment: dict[str, str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The user's own worker."""
    command = [sys.executable, "-m", "celery", "-A", "tests.example_celery", "worker", "-Q", "shop", *options]
    with (cluster.root / "shop.log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--without-gossip", "--without-mingle"],
            env=os.environ | environment | {"TMPDIR": str(cluster.root)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield worker
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


async def answer_of(cluster: FaultCluster, conversation_id: str) -> Observation:
    events = await cluster.client.events(conversation_id)
    (action,) = [event for event in events if event.kind == "action.call_tool"]
    (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
    return answer


def trace(environment: dict[str, str]) -> list[str]:
    path = Path(environment["EXAMPLE_TOOLS_TRACE"])
    return path.read_text().splitlines() if path.exists() else []


async def test_what_a_task_returns_or_raises_is_the_answer(
    cluster: FaultCluster, environment: dict[str, str], shop: subprocess.Popen[bytes]
) -> None:
    cluster.start_controller()
    cluster.start_tool(**environment)
    (paid,) = await cluster.submit(refund(7, 2.5), tools=["refund"])
    (missing,) = await cluster.submit(refund(13, 1.0), tools=["refund"])
    await cluster.settle([paid, missing])
    answer = await answer_of(cluster, paid)
    assert isinstance(answer, ToolCallObservation)
    assert answer.outputs == {"order": 7, "paid": 2.5}
    failure = await answer_of(cluster, missing)
    assert isinstance(failure, ErrorObservation)
    assert failure.content == "The task shop.tasks.refund failed: ValueError: no such order"
    assert sorted(trace(environment)) == ["refund 13", "refund 7"]


async def test_killed_workers_task_is_awaited_not_resent(
    cluster: FaultCluster, environment: dict[str, str], shop: subprocess.Popen[bytes]
) -> None:
    gate = Path(environment["EXAMPLE_TOOLS_TRACE"] + ".gate")
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool("victim", **environment)
    (conversation_id,) = await cluster.submit(refund(99, 4.0), tools=["refund"])
    await cluster.until(lambda: trace(environment) == ["refund 99"], what="the task")
    cluster.kill("victim")
    cluster.start_tool("survivor", **environment)
    gate.write_text("continue\n")
    await cluster.settle([conversation_id])
    answer = await answer_of(cluster, conversation_id)
    assert isinstance(answer, ToolCallObservation)
    assert answer.outputs == {"order": 99, "paid": 4.0}
    assert trace(environment) == ["refund 99", "through the gate"]


@pytest.mark.soak
async def test_stopped_conversations_task_is_ended_if_allowed(
    cluster: FaultCluster, environment: dict[str, str]
) -> None:
    gate = Path(environment["EXAMPLE_TOOLS_TRACE"] + ".gate")
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool(**{**environment, "DECKHANDS_TOOLS": "tests.example_celery:stoppable_refund"})
    with user_worker(cluster, environment, "--pool=prefork", "-c", "1"):
        (turn, finish) = refund(99, 4.0)
        turn["tool_calls"][0]["name"] = "stoppable_refund"
        (conversation_id,) = await cluster.submit([turn, finish], tools=["stoppable_refund"])
        await cluster.until(lambda: trace(environment) == ["refund 99"], what="the task")
        await cluster.client.cancel(conversation_id)
        await cluster.settle([conversation_id])
        state = TaskSender(broker_url=cluster.store.celery_url, backend_url=cluster.store.celery_url).load_state
        (action,) = [e for e in await cluster.client.events(conversation_id) if e.kind == "action.call_tool"]
        assert isinstance(action, ToolCallAction)
        task_id = f"deckhands-{conversation_id}-{action.id}-{compute_fingerprint(action)}"
        await cluster.until(lambda: "TaskRevokedError" in state(task_id).error, what="end of the task")
        assert trace(environment) == ["refund 99"]
        assert (await answer_of(cluster, conversation_id)).kind == "observation.error"
