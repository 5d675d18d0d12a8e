"""Helpers for tests of the ingress: a Celery application that does not import Deckhands, and tasks for agents."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult, GroupResult

from broker.coordination.membership import list_members
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster, steps
from tests.polling import until

LIMIT_SECONDS = 60.0


class Producer:
    """A third-party application, and the cluster it sends tasks to."""

    numbers = itertools.count(1)

    def __init__(self, cluster: FaultCluster, celery_url: str = "") -> None:
        self.cluster = cluster
        url = celery_url or cluster.store.celery_url
        self.app = Celery("shop", broker=url, backend=url, set_as_current=False)
        self.app.conf.result_backend_thread_safe = True

    def close(self) -> None:
        """Stop listening. A result that is collected later would look for its server, which has ended by then."""
        gc.collect()  # results that an exception refers to, which refers to itself through its frames
        consumer = self.app.backend.result_consumer
        consumer.stop()
        consumer._pubsub = None

    def options(self, turns: list[dict[str, Any]] | None = None, *, latency: float = 0.0) -> dict[str, Any]:
        """Options of a run whose model follows a script, in a new directory."""
        number = next(self.numbers)
        script = self.cluster.root / f"ingress-{number}.json"
        script.write_text(json.dumps({"latency_seconds": latency, "turns": steps(1) if turns is None else turns}))
        folder = self.folder(number)
        folder.mkdir(parents=True)
        return {
            "model": f"scripted/{script}",
            "workspace": {"path": str(folder), "sandbox": "none"},
            "agent": {"enable_workspace_skills": False},  # some tests have no tool worker to read the workspace
        }

    def folder(self, number: int) -> Path:
        return self.cluster.root / "work" / f"ingress-{number}"

    def send(self, name: str, *arguments: Any, **further: Any) -> AsyncResult:
        return self.app.send_task(f"deckhands.{name}", args=arguments, queue="deckhands", **further)

    def run(self, task: str = "do it", turns: list[dict[str, Any]] | None = None, **further: Any) -> AsyncResult:
        latency = further.pop("latency", 0.0)
        return self.send("run", task, kwargs=self.options(turns, latency=latency), **further)

    def signature(self, task: str, turns: list[dict[str, Any]] | None = None, **options: Any) -> Any:
        arguments = {"task": task, **self.options(turns)}
        return self.app.signature("deckhands.run", kwargs=arguments, queue="deckhands", **options)

    async def value(self, result: AsyncResult, *, limit: float = LIMIT_SECONDS) -> Any:
        """Return the result of a task; raise its exception."""
        if isinstance(result, GroupResult):  # one that is waited for in another thread learns nothing
            await until(result.ready, limit=limit, what="the results of a group")
        return await asyncio.to_thread(result.get, timeout=limit, interval=0.05)

    async def begun(self, result: AsyncResult) -> str:
        """Wait until the conversation of a task exists, and return its id."""
        conversation_id = derive_task_conversation_id(result.id)
        meta = self.cluster.client.store.known_keys(conversation_id).meta
        connection = self.cluster.client.store.connection
        await until(lambda: connection.call("EXISTS", meta), limit=LIMIT_SECONDS, what="a conversation")
        return conversation_id

    async def until_taken(self) -> None:
        """Wait until ingresses have done with each message in their queue."""
        client = self.app.backend.client
        is_taken = lambda: not (client.llen("deckhands") or client.hlen("deckhands:unacked"))  # noqa: E731
        await until(is_taken, limit=LIMIT_SECONDS, what="acknowledgements")

    async def until_state(self, result: AsyncResult, *states: str, limit: float = LIMIT_SECONDS) -> None:
        """Wait until the result backend says one of these states."""
        await until(lambda: result.state in states, limit=limit, what=f"{states} of a task")


def saying(message: str) -> list[dict[str, Any]]:
    return [{"tool_calls": [{"name": "finish", "arguments": {"message": message}}]}]


async def all_present(cluster: FaultCluster) -> None:

    async def are_present() -> bool:
        return len(await list_members(cluster.client.store)) >= len(cluster.workers)

    await until(are_present, what="all workers")


@asynccontextmanager
async def producing(folder: Path, *, ingresses: Sequence[str] = ("d1",)) -> AsyncIterator[Producer]:
    """An application beside ingresses of these names and one worker of each other kind."""
    async with FaultCluster(folder).running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        for name in ingresses:
            cluster.start_ingress(name)
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


@pytest.fixture
async def producer(tmp_path: Path) -> AsyncIterator[Producer]:
    async with producing(tmp_path) as found:
        yield found
