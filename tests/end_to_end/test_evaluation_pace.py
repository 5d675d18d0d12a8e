"""`-n auto` against a provider that refuses calls above so many a second: the limit is found, and costs no attempt.

Holds: the worker sees an idle machine, because a busy one would bind before the provider does; and the provider
serves what the first attempts want, and refuses more at a rate that a busy machine reaches, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deckhands.evaluation.attempts.pace import START
from deckhands.evaluation.attempts.plan import EvaluationPlan
from deckhands.evaluation.attempts.results import Results
from deckhands.evaluation.attempts.status import EvaluationStatus
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.evaluation import Evaluation
from tests.faults.harness import FaultCluster
from tests.model_server.running_server import RunningModelServer

MODEL = "openai/scripted"
ATTEMPTS, CALLS_PER_MINUTE = 80, 120
SECONDS_PER_CALL = START * 60 / CALLS_PER_MINUTE


def on_idle_machine(folder: Path) -> tuple[str, ...]:
    """Return a program prefix for which the kernel's load files report idle CPU, memory and disks."""
    (folder / "nothing").touch()
    files = [f"/proc/{name}" for name in ("stat", "meminfo", "pressure/cpu", "pressure/memory", "pressure/io")]
    hidden = [word for file in files if Path(file).exists() for word in ("--ro-bind", str(folder / "nothing"), file)]
    return ("bwrap", "--die-with-parent", "--dev-bind", "/", "/", *hidden)


@pytest.mark.asyncio
async def test_concurrency_limit_is_found_by_429s_of_a_server(tmp_path: Path) -> None:
    finish = {"name": "finish", "arguments": {"message": "FINAL ANSWER: 6"}}
    (tmp_path / "script.json").write_text(json.dumps({"turns": [{"tool_calls": [finish]}]}))
    limit = ("--requests-per-minute", str(CALLS_PER_MINUTE), "--burst-seconds", str(SECONDS_PER_CALL))
    options = ("--latency", str(SECONDS_PER_CALL), *limit, "--records", "0")
    server = RunningModelServer(("--script", str(tmp_path / "script.json"), *options))
    statuses: list[EvaluationStatus] = []
    plan = EvaluationPlan(
        "pace",
        [Instance(f"i{number}", "What is 2 * 3?", answer="6") for number in range(ATTEMPTS)],
        [MODEL],
        # A busy machine reports refusals late; many more at once would use up their retries until then.
        at_once=2 * START,
    )
    try:
        async with FaultCluster(tmp_path / "cluster").running() as cluster:
            cluster.started_by = on_idle_machine(tmp_path)
            cluster.start_controller(
                "c1", LLM_MODEL=MODEL, LLM_BASE_URL=f"{server.url}/v1", LLM_API_KEY="none", LLM_BACKEND="openai"
            )
            with Results(tmp_path / "results.jsonl") as results:
                await Evaluation(cluster.client, plan, results, on_status=statuses.append).run()
                rows = list(results.rows.values())
        counts = server.counts()
    finally:
        server.stop()
    assert [row.outcome for row in rows] == ["resolved"] * ATTEMPTS
    assert not [row.failures for row in rows if row.failures]
    assert counts["refused"] > 0  # the server did refuse
    last = statuses[-1]
    assert last.refused > 0
    found = [one for one in statuses if MODEL in one.found]
    assert found, "no limit was found"
    assert 1 <= last.found[MODEL] < ATTEMPTS
    assert any(f"429s: they came at {one.found[MODEL]} at once" in one.bound for one in found)
    grown = max(one.limits[MODEL] for one in statuses if not one.found)
    assert min(one.limits[MODEL] for one in found) < grown
    assert last.render_line.endswith(f"over; {MODEL} overloads at {last.found[MODEL]}")
