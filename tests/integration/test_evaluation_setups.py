"""Set-ups of evaluations in a real sandbox: one that fails is outside the score, and its agent does no work."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deckhands.client.client import Client
from deckhands.evaluation.attempts.plan import EvaluationPlan
from deckhands.evaluation.attempts.record import PROGRESS, ProgressRecord
from deckhands.evaluation.attempts.results import Results
from deckhands.evaluation.attempts.status import EvaluationStatus
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.directory import write_report
from deckhands.evaluation.evaluation import Evaluation
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, run_command, script

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="without a sandbox, no set-up runs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with FaultCluster(tmp_path_factory.mktemp("cluster")).running() as cluster:
        cluster.start_controller("c1")
        cluster.start_tool("t1", DECKHANDS_SANDBOX="bwrap")
        yield cluster.client


@pytest.mark.asyncio(loop_scope="module")
async def test_failing_set_up_is_outside_the_score(client: Client, results: Results, tmp_path: Path) -> None:
    setups = {
        "fails": "echo no compiler; false",
        "leaves": "echo gone; exit 3",
        "cut": "if",
        "works": "export MADE=1",
    }
    instances = [Instance(name, "Say 6.", setup=text, answer="6") for name, text in setups.items()]
    says = script(tmp_path / "m.json", run_command('until [ -n "$MADE" ]; do sleep 1; done'), finish("6"))  # or endless
    statuses: list[EvaluationStatus] = []
    with ProgressRecord(tmp_path) as record:
        evaluation = Evaluation(
            client,
            EvaluationPlan("broken", instances, [says]),
            results,
            on_row=record.add_row,
            on_status=statuses.append,
        )
        await evaluation.run()
    rows = {row.instance: row for row in results.rows.values()}
    assert {name: (row.outcome, row.cause, row.tries) for name, row in rows.items()} == {
        "fails": ("setup_failed", "exit_code_1", 1),
        "leaves": ("setup_failed", "exit_code_3", 1),
        "cut": ("setup_failed", "exit_code_2", 1),
        "works": ("resolved", "", 1),
    }
    assert "no compiler" in rows["fails"].evidence
    assert "gone" in rows["leaves"].evidence
    assert statuses[-1].outcomes == {"setup_failed": 3, "resolved": 1}
    assert "3 setup_failed" in statuses[-1].render_line
    summary = write_report(tmp_path)
    figures = summary["models"][says]
    assert (figures["pass@1"], figures["outcomes"]["setup_failed"], figures["infrastructure_failures"]) == (1.0, 3, 0)
    assert figures["causes"] == {"exit_code_1": 1, "exit_code_2": 1, "exit_code_3": 1}
    assert "The set-up failed: exit_code_1. no compiler" in (tmp_path / "report.html").read_text()
    ended = [json.loads(line) for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [line["outcome"] for line in ended if line["kind"] == "ended"].count("setup_failed") == 3
