"""Siblings that a critic judges: a model over HTTP that reads the files of each, and gives it a score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.contract.observations import CmdOutputObservation
from broker.contract.specs import Tenancy
from deckhands.client.client import Client
from deckhands.client.forking import ForkPoint
from deckhands.evaluation.attempts.plan import LABEL, EvaluationPlan
from deckhands.evaluation.attempts.results import AttemptRow, Results
from deckhands.evaluation.datasets.file_trees import MemoryFiles, TreeFile
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.evaluation import Evaluation
from deckhands.evaluation.siblings import compare_siblings
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, run_command, script
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)


def verdict(score: int, reason: str, *, accepted: bool = True) -> dict[str, Any]:
    """A turn that gives a verdict."""
    output = {"score": score, "accepted": accepted, "reason": reason}
    return {"tool_calls": [{"name": "finish", "arguments": {"message": "Judged.", "output": output}}]}


JUDGE = "anthropic/judge"
SOUGHT = {"tool_calls": [{"name": "grep", "arguments": {"pattern": "four|two"}}]}


@pytest.fixture(scope="module")
def critic(
    tmp_path_factory: pytest.TempPathFactory, shared_model_server: Callable[..., RunningModelServer]
) -> RunningModelServer:
    """A model that looks at a file and judges by the changes: `four` is better than `two`, `none` is wrong."""
    folder = tmp_path_factory.mktemp("critic")
    says = {
        "+four": (SOUGHT, verdict(9, "It is clear.")),
        "+two": (SOUGHT, verdict(5, "It is clumsy.")),
        "+none": (verdict(1, "Nothing is done.", accepted=False),),
        "+odd": (finish("I will not judge."),) * 5,
    }
    options: list[str] = []
    for number, (text, turns) in enumerate(says.items()):
        script(path := folder / f"{number}.json", *turns)
        options += ["--by-text", text, str(path)]
    return shared_model_server(*options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory, critic: RunningModelServer) -> AsyncIterator[Client]:
    folder = tmp_path_factory.mktemp("cluster")
    async with FaultCluster(folder).running() as cluster:
        cluster.start_controller("c1", LLM_BASE_URL=critic.url, LLM_API_KEY="k", LLM_NATIVE_TOOL_CALLING="true")
        cluster.start_tool("t1", DECKHANDS_CHECKPOINTS=str(folder / "checkpoints"), DECKHANDS_CHECKPOINT_EVERY="1")
        yield cluster.client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def origin(client: Client, tmp_path_factory: pytest.TempPathFactory) -> ForkPoint:
    """A conversation, after its first command."""
    model = script(tmp_path_factory.mktemp("origin") / "m.json", run_command("echo one > work.txt"), finish("no"))
    begun = await client.submit("Count on.", model=model, tenancy=Tenancy(tenant="acme"))
    await client.wait_until_settled(begun)
    events = await client.events(begun)
    return ForkPoint(begun, next(event.id for event in events if isinstance(event, CmdOutputObservation)))


def sibling(folder: Path, word: str) -> str:
    """A model that adds a word; its first turn only brings the notice that files were restored."""
    writes = run_command(f"echo {word} >> work.txt")
    return script(folder / f"{word}.json", run_command("true"), writes, writes, finish(f"I wrote {word}."))


async def judged(client: Client, plan: EvaluationPlan, results: Results) -> dict[str, AttemptRow]:
    await asyncio.wait_for(Evaluation(client, plan, results).run(), 60)
    return {Path(row.model).stem: row for row in results.rows.values()}


@pytest.mark.asyncio(loop_scope="module")
async def test_critic_decides_and_the_best_has_the_highest_score(
    client: Client, results: Results, origin: ForkPoint, critic: RunningModelServer, tmp_path: Path
) -> None:
    critic.clear()
    models = [sibling(tmp_path, word) for word in ("two", "four", "none", "odd")]
    plan = EvaluationPlan("judged", [Instance("sib", "Count on.")], models, origin=origin, critic=JUDGE, tenant="other")
    rows = await judged(client, plan, results)
    found = {word: (row.outcome, row.score, row.verdict) for word, row in rows.items()}
    assert found["four"] == ("resolved", 9.0, "It is clear.")
    assert found["two"] == ("resolved", 5.0, "It is clumsy.")
    assert found["none"] == ("unresolved", 1.0, "Nothing is done.")
    assert found["odd"][:2] == ("unresolved", 0.0)
    assert "gave no verdict: output_not_valid" in found["odd"][2]
    best = compare_siblings(tmp_path)["best"]
    assert (Path(best["model"]).stem, best["score"], best["verdict"]) == ("four", 9.0, "It is clear.")
    assert "+four" in (tmp_path / "best.patch").read_text()
    asked = [request["body"] for request in critic.requests() if "+four" in json.dumps(request["body"])]
    assert "<TASK>\\nCount on.\\n</TASK>" in json.dumps(asked[0])
    assert "<REPORT>\\nI wrote four.\\n</REPORT>" in json.dumps(asked[0])
    assert "work/work.txt" in json.dumps(asked[1]["messages"][-1])  # it has the files
    assert {tool["name"] for tool in asked[0]["tools"]} == {"think", "finish", "grep", "glob", "view"}
    labelled = [row for row in await client.recent() if row.labels.get(LABEL) == "judged"]
    assert len(labelled) == 8  # four siblings and their critics
    assert {row.tenant for row in labelled} == {"other"}


@pytest.mark.asyncio(loop_scope="module")
async def test_beside_a_check_a_critic_only_says_which_is_best(
    client: Client, results: Results, origin: ForkPoint, critic: RunningModelServer, tmp_path: Path
) -> None:
    critic.clear()
    models = [sibling(tmp_path, word) for word in ("two", "none")]
    hidden = MemoryFiles({"secret.txt": TreeFile(b"kept from critics")})
    instance = Instance("sib", "Count on.", check="test -e secret.txt && grep -q none work.txt", hidden=hidden)
    plan = EvaluationPlan("checked", [instance], models, origin=origin, critic=JUDGE)
    rows = await judged(client, plan, results)
    assert (rows["none"].outcome, rows["none"].score) == ("resolved", 1.0)
    assert (rows["two"].outcome, rows["two"].score) == ("unresolved", 5.0)
    assert Path(compare_siblings(tmp_path)["best"]["model"]).stem == "none"
    assert "secret" not in json.dumps(critic.requests())
    assert sum(row.conversations for row in rows.values()) == 6


def paid(folder: Path) -> str:
    """A critic that accepts everything and costs a quarter."""
    return script(folder / "paid.json", verdict(7, "It is there.") | {"cost_usd": 0.25})


@pytest.mark.asyncio(loop_scope="module")
async def test_critics_count_in_a_budget(client: Client, results: Results, tmp_path: Path) -> None:
    model = script(tmp_path / "free.json", finish("Done.") | {"cost_usd": 0.0})
    instance = Instance("one", "Do it.", check="true")
    plan = EvaluationPlan("paid", [instance], [model], attempts=2, at_once=1, critic=paid(tmp_path), budget_usd=0.2)
    await asyncio.wait_for(Evaluation(client, plan, results).run(), 60)
    rows = {row.attempt: row for row in results.rows.values()}
    assert (rows[1].outcome, rows[1].critic_cost_usd) == ("resolved", 0.25)
    assert (rows[2].outcome, rows[2].cause) == ("limit", "evaluation_budget")


@pytest.mark.asyncio(loop_scope="module")
async def test_beside_an_answer_a_critic_only_says_which_is_best(
    client: Client, results: Results, origin: ForkPoint, tmp_path: Path
) -> None:
    says = {"right": finish("FINAL ANSWER: 6"), "wrong": finish("FINAL ANSWER: 7")}
    models = [script(tmp_path / f"{name}.json", run_command("true"), turn) for name, turn in says.items()]
    instance = Instance("six", "2 * 3?", answer="6")
    plan = EvaluationPlan("answered", [instance], models, origin=origin, critic=paid(tmp_path))
    rows = await judged(client, plan, results)
    found = {name: (row.outcome, row.evidence, row.score, row.critic_cost_usd) for name, row in rows.items()}
    assert found == {"right": ("resolved", "6", 7.0, 0.25), "wrong": ("unresolved", "7", 7.0, 0.25)}
    best = compare_siblings(tmp_path)
    assert (Path(best["best"]["model"]).stem, best["critic_cost_usd"]) == ("right", 0.5)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_critic_scores_attempts_that_are_no_siblings(client: Client, results: Results, tmp_path: Path) -> None:
    writes = {
        word: script(tmp_path / f"{word}.json", run_command(f"echo {word} > a"), finish("Yes."))
        for word in ("four", "none")
    }
    plan = EvaluationPlan("critic", [Instance("write", "Count on.")], list(writes.values()), critic=JUDGE)
    rows = await judged(client, plan, results)
    found = {word: (row.outcome, row.score, row.reward) for word, row in rows.items()}
    assert found == {"four": ("resolved", 9.0, 0.9), "none": ("unresolved", 1.0, 0.1)}
