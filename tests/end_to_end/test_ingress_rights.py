"""An ingress and its producers have the rights that they need in both servers, and no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from celery import Celery, chord, group
from celery.result import AsyncResult, GroupResult
from kombu.exceptions import OperationalError

from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.policies import ConfirmationPolicy
from broker.coordination.membership import list_members
from deckhands.client.client import Client
from deckhands.evaluation.attempts.catalog import Catalog
from deckhands.evaluation.attempts.steering import EvaluationSteering, Requeue
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import steps
from tests.inbox_parts import put, replies
from tests.ingress_parts import saying
from tests.integration.command_line import run_command
from tests.polling import unhurried, until
from tests.served_stores import (
    LIMIT_SECONDS,
    PRODUCER,
    Server,
    allowed_of,
    environment_with,
    refusals,
    serving_both,
    worker,
)
from tests.turns import finish

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT = 2 * LIMIT_SECONDS
BEYOND_A_PRODUCER = (
    *("RPOP deckhands", "LRANGE deckhands 0 -1", "DEL deckhands", "LPUSH celery x", "LPUSH deckhands.controller x"),
    *("HGETALL deckhands:unacked", "DEL deckhands:unacked", "HGETALL unacked", "SET celery-task-meta-x {}"),
    *("PUBLISH /0.celery.pidbox {}", "PUBLISH /0.celeryev/task.failed {}", "SUBSCRIBE /0.celeryev/*", "PSUBSCRIBE *"),
    *("SADD _kombu.binding.celery.pidbox x", "SMEMBERS _kombu.binding.celery", "EVAL return{} 0", "KEYS *", "SCAN 0"),
    *("FLUSHALL", "CONFIG GET dir", "ACL LIST", "INFO", "MONITOR", "CLIENT LIST", "SET other 1", "GET other"),
    *("PUBLISH celery-task-meta-x {}", "SUBSCRIBE celery-taskset-meta-x", "LPUSH celery-taskset-meta-x y"),
)


@dataclass(frozen=True)
class Cluster:
    """A worker of each kind beside both servers, each with the rights that compose.yaml gives it.

    Attributes:
        client: of the operator.
        app: a producer's application.
    """

    log: Server
    queue: Server
    client: Client
    app: Celery
    folder: Path

    def options(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        """Options of a run whose model follows a script."""
        script = self.folder / f"{len(list(self.folder.glob('script-*')))}"
        script = script.with_name(f"script-{script.name}.json")
        script.write_text(json.dumps({"turns": turns}))
        return {"model": f"scripted/{script}"}

    def send(self, name: str, *arguments: Any, **further: Any) -> AsyncResult:
        return self.app.send_task(f"deckhands.{name}", args=arguments, queue="deckhands", **further)

    def signature(self, task: str) -> Any:
        arguments = {"task": task, **self.options(saying(task))}
        return self.app.signature("deckhands.run", kwargs=arguments, queue="deckhands")

    async def value(self, result: AsyncResult) -> Any:
        return await asyncio.to_thread(result.get, timeout=unhurried(LIMIT))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    tmp_path = tmp_path_factory.mktemp("rights")
    async with AsyncExitStack() as stack:
        log, queue, usual = await stack.enter_async_context(serving_both(tmp_path, environment_with(tmp_path)))
        environment = {
            **usual,
            "DECKHANDS_SANDBOX": "none",
            "LLM_SCRIPTS_DIR": "/",  # tests write scripts where they like
            "DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1",
            "DECKHANDS_EVALUATIONS": str(tmp_path / "evaluations"),
        }
        for module in ("controller_worker", "tool_worker", "deckhands.ingress"):
            await stack.enter_async_context(worker(module, environment, log, queue))
        client = await stack.enter_async_context(await Client.connect(log.operator))

        async def all_are_there() -> bool:
            return len(await list_members(client.store)) == 3

        await until(all_are_there, limit=LIMIT, what="three workers")
        url = queue.url(f"producer:{PRODUCER}")
        app = Celery("shop", broker=url, backend=url, set_as_current=False)
        yield Cluster(log, queue, client, app, tmp_path)
        app.close()


async def test_ingress_and_producers_work_with_their_rights(cluster: Cluster) -> None:
    done = cluster.send("run", "x" * 50_000, kwargs=cluster.options(steps(1)) | {"labels": {"a": "b"}}, priority=7)
    secret = cluster.send(
        "run", "do it", kwargs=cluster.options(saying("done")) | {"secrets": {"KEY": "correct-horse"}}
    )
    later = cluster.send("run", "do it", kwargs=cluster.options(saying("later")), countdown=1)
    never = cluster.send("run", "do it", kwargs=cluster.options(saying("never")), countdown=3600)
    for result in (done, secret, later):
        assert (await cluster.value(result))["state"] == "finished"
    header = group([cluster.signature(f"part {n}") for n in range(2)], app=cluster.app)
    crowd = chord(header, app=cluster.app)(cluster.signature("all of them"))
    assert (await cluster.value(crowd))["message"] == "all of them"
    chain = cluster.signature("first") | cluster.signature("second")
    assert (await cluster.value(chain.apply_async()))["message"] == "second"
    await _orders(cluster)
    Celery(broker=cluster.queue.queue, set_as_current=False).control.revoke(never.id)
    await until(lambda: never.state == "REVOKED", limit=LIMIT, what="revoked task")
    producer = await Client.connect(cluster.log.operator)
    async with producer:
        await put(producer.store, {"id": "1", "task": "do it", **cluster.options(saying("done"))})
        await put(producer.store, {"id": "2"})

        async def all_are_answered() -> bool:
            found = [reply.event for reply in await replies(producer.store)]
            return sorted(found) == ["accepted", "rejected", "settled"]

        await until(all_are_answered, limit=LIMIT, what="answers")
    assert await refusals(cluster.log) == []


async def _orders(cluster: Cluster) -> None:
    first, second = [await _asking(cluster) for _ in range(2)]
    await cluster.value(cluster.send("confirm", first))

    async def has_acted_and_asks_again() -> bool:
        acted = any(event.kind == "observation.run" for event in await cluster.client.events(first))
        return acted and (await cluster.client.summary(first)).state == "awaiting_user_confirmation"

    await until(has_acted_and_asks_again, limit=LIMIT, what="second question")
    await cluster.value(cluster.send("reject", first))
    fork = await cluster.value(cluster.send("fork", first, title="another"))
    await cluster.value(cluster.send("message", first, "and now?"))
    assert (await cluster.value(cluster.send("pause", second)))["conversation_id"] == second
    await cluster.value(cluster.send("resume", second))
    for name in (first, second, fork["conversation_id"]):
        await cluster.value(cluster.send("cancel", name))


async def _asking(cluster: Cluster) -> str:
    agent = AgentSpec(
        llm=LLMSpec(model=cluster.options(steps(2))["model"]), confirmation=ConfirmationPolicy(mode="always")
    )
    options = {"agent": agent.model_dump(mode="json"), "headless": False}
    found: str = await cluster.value(cluster.send("submit", "do it", kwargs=options))
    summary = await cluster.client.wait_until_settled(found, timeout_seconds=LIMIT)
    assert summary.state == "awaiting_user_confirmation"
    return found


async def test_evaluation_runs_and_is_scored_with_ingress_rights(cluster: Cluster) -> None:
    writes = run_command("cat given.txt > copy.txt; echo more >> copy.txt")
    model = cluster.options([writes, finish("It is 6.")])["model"]
    rows = [
        {
            "id": "copied",
            "task": "Copy it.",
            "workspace": {"given.txt": "given\n"},
            "setup": "echo ready > ready.txt",
            "hidden": {"expected.txt": "given\nmore\n"},
            "check": "test -e ready.txt && cmp copy.txt expected.txt",
        },
        {"id": "unlike", "task": "Copy it.", "check": "test -e none.txt"},
        {"id": "six", "task": "2 * 3?", "answer": "It is 6."},
    ]
    options = {"dataset": rows, "models": model, "out": "one", "attempts": 2, "budget_usd": 5.0, "until": "ci=1%"}
    summary = await cluster.value(cluster.send("evaluate", kwargs=options))
    out = cluster.folder / "evaluations" / "one"
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    outcomes = {(row["instance"], row["attempt"]): row["outcome"] for row in found}
    expected = {"copied": "resolved", "unlike": "unresolved", "six": "resolved"}
    assert outcomes == {(name, number): expected[name] for name in expected for number in (1, 2)}, found
    assert all("+more" in row["patch"] for row in found if row["instance"] == "copied")
    assert summary["models"][model]["infrastructure_failures"] == 0
    assert await cluster.value(cluster.send("evaluate", kwargs=options)) == summary  # it is found again
    assert await refusals(cluster.log) == []


async def test_evaluation_is_steered_with_ingress_rights(cluster: Cluster) -> None:
    model = cluster.options([{**run_command("true"), "latency_seconds": 1.0}, finish("6")])["model"]
    rows = [{"id": f"q{number}", "task": "2 * 3?", "answer": "6"} for number in range(3)]
    options = {"dataset": rows, "models": model, "out": "steered", "concurrency": 1}
    result = cluster.send("evaluate", kwargs=options)
    out = cluster.folder / "evaluations" / "steered"
    await until((out / "progress.jsonl").exists, limit=LIMIT, what="the command")
    name = json.loads((out / "evaluation.json").read_text())["name"]
    steering = EvaluationSteering(cluster.client.store, name)
    await steering.set_desired(at_once=3)
    await steering.requeue(Requeue(outcomes=("running",)))
    summary = await cluster.value(result)
    assert summary["models"][model]["outcomes"]["resolved"] == 3
    assert await Catalog(cluster.client.store).find(name) is not None
    assert await refusals(cluster.log) == []


async def test_a_producer_can_send_and_read_results_and_nothing_else(cluster: Cluster) -> None:
    url = cluster.queue.url(f"producer:{PRODUCER}")
    assert await allowed_of(BEYOND_A_PRODUCER, url) == []
    result = cluster.send("run", "do it", kwargs=cluster.options(saying("done")))
    with pytest.raises(OperationalError, match="No permissions to access a channel"):
        cluster.app.control.broadcast("shutdown")
    assert (await cluster.value(result))["conversation_id"] == derive_task_conversation_id(result.id)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's
async def test_a_producer_saves_and_restores_a_group_of_results(cluster: Cluster) -> None:
    header = [cluster.signature(f"part {n}") for n in range(2)]
    crowd = group(header, app=cluster.app).apply_async()
    crowd.save()
    found = GroupResult.restore(crowd.id, app=cluster.app)
    assert [result.id for result in found.results] == [result.id for result in crowd.results]
    assert [(await cluster.value(result))["state"] for result in found.results] == ["finished"] * 2
    found.delete()
    assert GroupResult.restore(crowd.id, app=cluster.app) is None
