"""Evaluations whose model does not answer: they stop at once, name the cause, and continue after a repair."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from deckhands.client.client import Client
from deckhands.evaluation.attempts.driver import ModelSilent
from deckhands.evaluation.attempts.plan import LABEL, EvaluationPlan
from deckhands.evaluation.attempts.record import PROGRESS, ProgressRecord
from deckhands.evaluation.attempts.results import AttemptRow, Results
from deckhands.evaluation.attempts.status import EvaluationStatus, parse_status
from deckhands.evaluation.attempts.steering import EvaluationSteering
from deckhands.evaluation.evaluation import Evaluation
from tests.evaluation_parts import questions
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, run_command, script
from tests.model_server.running_server import RunningModelServer
from tests.polling import until

pytest_plugins = ("tests.model_server.fixtures",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with FaultCluster(tmp_path_factory.mktemp("cluster")).running() as cluster:
        cluster.start_controller("c1", LLM_NUM_RETRIES="3", LLM_RETRY_MIN_WAIT="0", LLM_RETRY_MAX_WAIT="0")
        cluster.start_tool("t1")
        yield cluster.client


def failing(code: str) -> dict[str, object]:
    """A turn whose every call fails."""
    return {"error": {"code": code, "times": None}}


async def started(client: Client, name: str) -> list[str]:
    """The states of the conversations that an evaluation has started."""
    return [row.state for row in await client.recent(limit=100) if row.labels.get(LABEL) == name]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("code", "conversations"), [("authentication", 1), ("not_found", 1), ("service_unavailable", 1), ("bad_request", 3)]
)
async def test_unanswered_first_attempts_stop_the_evaluation(
    client: Client, results: Results, tmp_path: Path, code: str, conversations: int
) -> None:
    model = script(tmp_path / "m.json", failing(code))
    statuses: list[EvaluationStatus] = []
    plan = EvaluationPlan(f"dead-{code}", questions(*"abcdef"), [model], at_once=6, retries=0)
    with pytest.raises(ModelSilent, match=f"every call fails: {code}"):
        await Evaluation(client, plan, results, on_status=statuses.append).run()
    assert results.rows == {}
    assert len(await started(client, plan.name)) == conversations
    last = parse_status((await EvaluationSteering(client.store, plan.name).read()).status)
    assert last is not None
    assert (last.state, last.in_flight, last.pending) == ("stopped", 0, 6)
    assert code in last.render_line


@pytest.mark.asyncio(loop_scope="module")
async def test_stopped_evaluation_continues_after_a_repair(client: Client, results: Results, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    plan = EvaluationPlan("repaired", questions("a", "b"), [f"scripted/{path}"])  # there is no such script yet
    with pytest.raises(ModelSilent, match="llm_config"):
        await Evaluation(client, plan, results).run()
    script(path, finish("6"))
    await Evaluation(client, plan, results).run()
    assert [(row.outcome, row.failures) for row in results.rows.values()] == [("resolved", [])] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_other_models_finish_before_it_stops(client: Client, results: Results, tmp_path: Path) -> None:
    dead = script(tmp_path / "dead.json", failing("authentication"))
    good = script(tmp_path / "good.json", finish("6"))
    plan = EvaluationPlan("both", questions("a", "b", "c"), [dead, good], at_once=2)
    with pytest.raises(ModelSilent, match=r"dead.json: every call fails"):
        await Evaluation(client, plan, results).run()
    assert [(row.model, row.outcome) for row in results.rows.values()] == [(good, "resolved")] * 3


@pytest.mark.asyncio(loop_scope="module")
async def test_attempts_wait_for_the_first_reply(client: Client, results: Results, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = run_command(f"until [ -e {gate} ]; do sleep 0.05; done")
    model = script(tmp_path / "m.json", waits | {"latency_seconds": 3.0}, finish("6"))
    statuses: list[EvaluationStatus] = []
    plan = EvaluationPlan("first", questions(*"abc"), [model], at_once=3)
    running = asyncio.create_task(Evaluation(client, plan, results, on_status=statuses.append).run())
    await until(lambda: statuses and statuses[-1].in_flight == 3, what="attempts after the first reply")
    assert any(status.in_flight == 1 and "its first reply" in status.bound for status in statuses)
    gate.touch()
    await asyncio.wait_for(running, 60)
    assert [row.outcome for row in results.rows.values()] == ["resolved"] * 3


@pytest.mark.asyncio(loop_scope="module")
async def test_attempts_in_flight_name_their_failure_and_conversation(
    client: Client, results: Results, tmp_path: Path
) -> None:
    model = script(tmp_path / "m.json", failing("bad_request"))
    statuses: list[EvaluationStatus] = []
    plan = EvaluationPlan("named", questions("a", "b"), [model])
    with ProgressRecord(tmp_path) as record:

        def keep(status: EvaluationStatus) -> None:
            statuses.append(status)
            record.add_status(status)

        with pytest.raises(ModelSilent):
            await Evaluation(client, plan, results, on_status=keep).run()
    shown = [one for status in statuses for one in status.attempts if one.cause]
    assert shown
    assert shown[0].cause == "bad_request: The script fails with bad_request."
    assert shown[0].cause in shown[0].render_line
    assert shown[0].conversation_id in shown[0].render_line
    lines = [json.loads(line) for line in (tmp_path / PROGRESS).read_text().splitlines()]
    named = [line for line in lines if line["kind"] == "attempt"]
    assert (shown[0].conversation_id, shown[0].cause) in {(line["conversation_id"], line["cause"]) for line in named}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failed_attempt_of_a_working_model_stops_nothing(
    client: Client, results: Results, tmp_path: Path
) -> None:
    model = script(tmp_path / "m.json", run_command("true"), failing("authentication"))
    plan = EvaluationPlan("late", questions("a"), [model], retries=0)
    await Evaluation(client, plan, results).run()
    assert [(row.outcome, row.cause) for row in results.rows.values()] == [("infra-abandoned", "authentication")]


async def test_provider_that_dies_later_stops_the_evaluation(
    results: Results, tmp_path: Path, model_server: Callable[..., RunningModelServer]
) -> None:
    path = tmp_path / "m.json"
    script(path, finish("6"))
    server = model_server("--script", str(path))
    plan = EvaluationPlan("dies", questions(*"abcdefg"), ["openai/mine"], at_once=1, retries=0)

    def kill_server(_: AttemptRow) -> None:
        if len(results.rows) == 2:
            os.kill(server.pid, signal.SIGKILL)

    async with FaultCluster(tmp_path / "cluster").running() as cluster:
        cluster.start_controller(
            LLM_BASE_URL=f"{server.url}/v1", LLM_API_KEY="k", LLM_NUM_RETRIES="1", LLM_RETRY_MIN_WAIT="0"
        )
        cluster.start_tool()
        with pytest.raises(ModelSilent, match="every call fails: service_unavailable") as stopped:
            await Evaluation(cluster.client, plan, results, on_row=kill_server).run()
        assert (stopped.value.code, "deckhands eval attach" in stopped.value.remedy) == ("model_silent", True)
        # Two attempts had a provider, and two failed before a third showed that all will.
        assert [(row.instance, row.outcome, row.cause) for row in results.rows.values()] == [
            *[(name, "resolved", "") for name in "ab"],
            *[(name, "infra-abandoned", "service_unavailable") for name in "cd"],
        ]
        assert len(await started(cluster.client, plan.name)) == 5
        last = parse_status((await EvaluationSteering(cluster.client.store, plan.name).read()).status)
        assert last is not None
        assert (last.state, last.in_flight, last.pending) == ("stopped", 0, 3)
        model_server("--script", str(path), "--port", server.url.rpartition(":")[2])
        await Evaluation(cluster.client, plan, results).run()
    assert [results.rows["openai/mine", name, 1].outcome for name in "efg"] == ["resolved"] * 3
