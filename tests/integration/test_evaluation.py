"""Evaluations on real workers: files that agents leave behind decide nothing, and nothing starts twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from broker.contract.events import ConversationCreated, Limits
from broker.runtime.errors import UsageError
from deckhands.client.client import Client
from deckhands.evaluation.attempts.plan import LABEL, EvaluationPlan
from deckhands.evaluation.attempts.results import AttemptRow, Results, read_results
from deckhands.evaluation.datasets.file_trees import COMMAND, TreeFile, build_test_check, to_tree
from deckhands.evaluation.datasets.harbor import harbor_instance
from deckhands.evaluation.datasets.instances import SETUP_FAILED, Instance, ScorerFailed
from deckhands.evaluation.directory import write_report
from deckhands.evaluation.evaluation import Evaluation
from deckhands.evaluation.rewards import Rewards
from deckhands.evaluation.scorers import load_scorers
from tests.dataset_parts import harbor_task
from tests.faults.harness import FaultCluster
from tests.turns import bash, finish

CHECK = "python3 -m unittest discover -s hidden_tests"
TEST = """import unittest
from calc import add
class Adding(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
REPAIR = "sed -i 's/a - b/a + b/' calc.py"
FAKES = (
    "mkdir -p hidden_tests; echo 'import sys; sys.exit(0)' | tee conftest.py sitecustomize.py unittest.py "
    "hidden_tests/test_calc.py hidden_tests/__init__.py; echo 'import os; os._exit(0)' > evil.pth; echo passed; "
    "mkdir -p ~/.local/bin bin; echo 'exit 0' | tee ~/.local/bin/python3 bin/python3 python3 ~/.bashrc ~/.profile .bashrc; "
    "chmod +x ~/.local/bin/python3 bin/python3 python3; python3() { true; }; alias python3=true; export -f python3; "
    "export BASH_ENV=~/.bashrc PYTEST_ADDOPTS=--collect-only PYTHONPATH=$PWD PATH=$PWD:$PATH; "
    "(while true; do echo 'print()' > hidden_tests/test_calc.py; sleep 1; done) >/dev/null 2>&1 & exit 0"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with FaultCluster(tmp_path_factory.mktemp("cluster")).running() as cluster:
        cluster.start_controller("c1")
        cluster.start_tool("t1")
        yield cluster.client


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    workspace, hidden = tmp_path / "workspace", tmp_path / "hidden"
    (hidden / "hidden_tests").mkdir(parents=True)
    (hidden / "hidden_tests" / "test_calc.py").write_text(TEST)
    workspace.mkdir()
    (workspace / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return Instance("calc", "add is wrong.", workspace=workspace, hidden=hidden, check=CHECK, tags=("easy",))


def model(folder: Path, *turns: dict[str, object], name: str = "script") -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"turns": turns}))
    return f"scripted/{path}"


@pytest.mark.asyncio(loop_scope="module")
async def test_one_repairs_it_one_only_looks_and_one_cheats(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    honest = model(tmp_path, bash(REPAIR), finish("Done."), name="honest")
    idle = model(tmp_path, bash("ls"), finish("Done."), name="idle")
    cheat = model(tmp_path, bash(FAKES), finish("All tests passed."), name="cheat")
    await Evaluation(client, EvaluationPlan("one", [instance], [honest, idle, cheat]), results).run()
    rows = {name: results.rows[name, "calc", 1] for name in (honest, idle, cheat)}
    assert [row.outcome for row in rows.values()] == ["resolved", "unresolved", "unresolved"]
    assert rows[honest].left_out == []
    assert "+    return a + b" in rows[honest].patch
    assert set(rows[cheat].left_out) >= {"conftest.py", "sitecustomize.py", "unittest.py", "evil.pth"}
    assert "AssertionError: -1 != 3" in rows[cheat].evidence


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("isolated", [False, True])
async def test_code_under_test_reaches_no_process_of_its_check(
    client: Client, instance: Instance, results: Results, tmp_path: Path, isolated: bool
) -> None:
    assert isinstance(instance.hidden, Path)
    hidden = build_test_check(instance.hidden, ("hidden_tests/test_calc.py",), isolated=isolated)
    named = replace(instance, hidden=hidden, check=COMMAND)
    looks = (
        "import os, signal\n"
        "for pid in set(filter(str.isdigit, os.listdir('/proc'))) - {str(os.getpid())}:\n"
        "    try:\n"
        "        name = open(f'/proc/{pid}/cmdline').read()\n"
        "        open(f'/proc/{pid}/mem', 'r+b').close()\n"
        "        print('OPENED', name, flush=True)\n"
        "    except OSError:\n"
        "        print('REFUSED', name, flush=True)\n"
    )
    honest = model(tmp_path, bash(REPAIR), finish("Done."), name="honest")
    cheat = model(tmp_path, bash(f"cat > calc.py <<'EOF'\n{looks}EOF"), finish("Done."), name="cheat")
    await Evaluation(client, EvaluationPlan(f"reach-{isolated}", [named], [honest, cheat]), results).run()
    rows = {name: results.rows[name, "calc", 1] for name in (honest, cheat)}
    assert [row.outcome for row in rows.values()] == ["resolved", "unresolved"], rows
    assert "REFUSED" in rows[cheat].evidence
    assert not [line for line in rows[cheat].evidence.splitlines() if line.startswith("OPENED")]


@pytest.mark.asyncio(loop_scope="module")
async def test_each_attempt_ends_as_one_thing(client: Client, results: Results, tmp_path: Path) -> None:
    asked = Instance("six", "What is 2 * 3?", answer="6")
    right = model(tmp_path, finish("FINAL ANSWER: 6.0"), name="right")
    wrong = model(tmp_path, finish("7"), name="wrong")
    endless = model(tmp_path, *[bash("true")] * 5, name="endless")
    broken = model(tmp_path, bash("true"), {"error": {"code": "authentication", "times": 99}}, name="broken")
    plan = EvaluationPlan("two", [asked], [right, wrong, endless, broken], limits=Limits(max_iterations=2), retries=0)
    await Evaluation(client, plan, results).run()
    found = {name: results.rows[name, "six", 1] for name in plan.models}
    assert [(row.outcome, row.cause) for row in found.values()] == [
        ("resolved", ""),
        ("unresolved", ""),
        ("limit", "iterations"),
        ("infra-abandoned", "authentication"),
    ]
    assert found[broken].failures == ["authentication"]


@pytest.mark.asyncio(loop_scope="module")
async def test_repetitive_agent_is_scored_by_its_result(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    looping = model(tmp_path, bash(REPAIR), *[bash("ls")] * 12)
    await Evaluation(client, EvaluationPlan("loops", [instance], [looping]), results).run()
    (row,) = results.rows.values()
    assert (row.outcome, row.cause, row.failures) == ("resolved", "stuck_in_loop", [])


@pytest.mark.asyncio(loop_scope="module")
async def test_started_evaluation_is_found_again(client: Client, instance: Instance, tmp_path: Path) -> None:
    honest = model(tmp_path, bash(REPAIR), finish("Done."))
    plan = EvaluationPlan("three", [instance], [honest], attempts=2)
    rows: list[list[AttemptRow]] = []
    for name in ("first", "second"):  # the second knows nothing of the first, as after a loss of its directory
        with Results(tmp_path / f"{name}.jsonl") as results:
            await Evaluation(client, plan, results).run()
            await Evaluation(client, plan, results).run()  # nothing is left to do
            rows.append(sorted(results.rows.values(), key=lambda row: row.key))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
    begun = [row for row in await client.recent(limit=100) if row.labels.get(LABEL) == "three"]
    assert len(begun) == 4  # two attempts and their checks


@pytest.mark.asyncio(loop_scope="module")
async def test_no_attempt_begins_once_the_budget_is_spent(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    plan = replace(EvaluationPlan("four", [instance], [model(tmp_path, finish("Done."))]), budget_usd=0.0)
    await Evaluation(client, plan, results).run()
    (row,) = results.rows.values()
    assert (row.outcome, row.cause, row.conversation_id) == ("limit", "evaluation_budget", "")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_that_fills_its_disk_changes_no_score(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    """It ends as unresolved, neither abandoned nor as the end of the evaluation; others are scored as ever."""
    fill = {
        "large": f"{REPAIR}; truncate -s 5G large",  # more than a node hands out
        "some": f"{REPAIR}; head -c 70000000 /dev/zero > some",
        "just": f"{REPAIR}; head -c 67108500 /dev/urandom > just",  # with the other files, more than an upload may have
        "tools": f"{REPAIR}; mkdir node_modules; truncate -s 100M node_modules/a; echo > node_modules/b; ln node_modules/b z",
    }
    models = {name: model(tmp_path, bash(command), finish("Done."), name=name) for name, command in fill.items()}
    honest = model(tmp_path, bash(REPAIR), finish("Done."), name="honest")
    plan = EvaluationPlan("disk", [instance], [*models.values(), honest], at_once=4, retries=0)
    await Evaluation(client, plan, results).run()
    found = {name: results.rows[path, "calc", 1] for name, path in {**models, "honest": honest}.items()}
    assert {name: (row.outcome, row.cause) for name, row in found.items()} == {
        "large": ("unresolved", "workspace_too_large"),
        "some": ("unresolved", "workspace_too_large"),
        "just": ("unresolved", "workspace_too_large"),
        "tools": ("resolved", ""),
        "honest": ("resolved", ""),
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_no_text_of_a_set_up_skips_its_check(client: Client, results: Results, tmp_path: Path) -> None:
    setups = {
        "comment": "true # prepared",
        "either": "false",
        "here": "cat <<EOF > made.txt\nmade\nEOF",
        "good": "true;",
    }
    checks = {"comment": "false", "either": "true || true", "here": "false", "good": "test -f made.txt # it's there"}
    instances = [Instance(name, "Make it.", setup=text, check=checks[name]) for name, text in setups.items()]
    makes = model(tmp_path, bash("touch made.txt"), finish("Done."))
    await Evaluation(client, EvaluationPlan("setups", instances, [makes], retries=0), results).run()
    found = {row.instance: row.outcome for row in results.rows.values()}
    assert found == {"comment": "unresolved", "either": "setup_failed", "here": "unresolved", "good": "resolved"}


@pytest.mark.asyncio(loop_scope="module")
async def test_set_up_that_fails_only_in_the_check_is_recognised(
    client: Client, results: Results, tmp_path: Path
) -> None:
    """It fails without the agent's work, too; the agent's actions and output change nothing about that."""
    hidden = to_tree({"hidden.txt": "hidden"})
    always = Instance("always", "Make it.", setup="test ! -e hidden.txt", hidden=hidden, check="test -f made.txt")
    broken = Instance("broken", "Make it.", setup="test ! -e broken.txt", hidden=hidden, check="cat made.txt; exit 1")
    makes = model(tmp_path, bash("touch made.txt"), finish("Done."), name="makes")
    breaks = model(tmp_path, bash("touch made.txt broken.txt"), finish("Done."), name="breaks")
    says = SETUP_FAILED.format(code=1)
    claims = model(tmp_path, bash(f"echo '{says}' > made.txt"), finish("Done."), name="claims")
    plan = EvaluationPlan("rechecked", [always, broken], [makes, breaks, claims], retries=0)
    await Evaluation(client, plan, results).run()
    found = {(row.instance, Path(row.model).stem): (row.outcome, row.cause) for row in results.rows.values()}
    models = ("makes", "breaks", "claims")
    assert found == {
        **{("always", name): ("setup_failed", "exit_code_1") for name in models},
        **{("broken", name): ("unresolved", "") for name in models},
    }
    assert says in results.rows[breaks, "broken", 1].evidence
    titles = [row.title for row in await client.recent(limit=100) if row.labels.get(LABEL) == "rechecked"]
    assert sorted(title for title in titles if title.startswith("Set-up")) == ["Set-up of always", "Set-up of broken"]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_file_name_ends_an_evaluation_or_score(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    names = {
        "bytes": "echo > $'a\\xff.py'; echo > $'\\xff.pth'; mkdir $'d\\xff'; echo > $'d\\xff/b'",
        "lines": "echo > $'a\\nb'; echo > $'\\r.pth'",
        "many": "mkdir many; cd many; seq -f %0.0f.pth 3000 | xargs touch; cd ..",
        "file": "echo > hidden_tests",
    }
    models = {
        name: model(tmp_path, bash(f"{REPAIR}; {text}"), finish("Done."), name=name) for name, text in names.items()
    }
    await Evaluation(client, EvaluationPlan("names", [instance], list(models.values()), retries=0), results).run()
    rows = {name: results.rows[path, "calc", 1] for name, path in models.items()}
    assert {name: (row.outcome, row.cause) for name, row in rows.items()} == dict.fromkeys(names, ("resolved", ""))
    assert rows["many"].left_out[-1] == "and 2,000 more"
    assert len(rows["many"].left_out) == 1_001
    assert rows["file"].left_out == ["hidden_tests"]
    assert [row.outcome for row in read_results(results.path)] == ["resolved"] * 4


@pytest.mark.asyncio(loop_scope="module")
async def test_attempts_have_the_network_unless_they_shall_not(client: Client, tmp_path: Path) -> None:
    done = model(tmp_path, finish("6"))
    for has_network in (True, False):
        plan = EvaluationPlan(
            f"net-{has_network}", [Instance("six", "2 * 3?", answer="6")], [done], network=has_network
        )
        with Results(tmp_path / f"{plan.name}.jsonl") as results:
            await Evaluation(client, plan, results).run()
            (row,) = results.rows.values()
        created = (await client.events(row.conversation_id))[0]
        assert isinstance(created, ConversationCreated)
        assert created.workspace.network is has_network


@pytest.mark.asyncio(loop_scope="module")
async def test_costs_of_failed_tries_are_kept(client: Client, results: Results, tmp_path: Path) -> None:
    turn = bash("true") | {"cost_usd": 0.5}
    broken = model(tmp_path, turn, {"error": {"code": "authentication", "times": None}})
    plan = EvaluationPlan("lost", [Instance("six", "What is 2 * 3?", answer="6")], [broken], retries=1)
    await Evaluation(client, plan, results).run()
    (row,) = results.rows.values()
    assert (row.outcome, row.tries, row.failures) == ("infra-abandoned", 2, ["authentication"] * 2)
    assert (row.cost_usd, row.lost_cost_usd) == (0.5, 0.5)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_scorer_that_fails_says_nothing_about_the_agent(
    client: Client, results: Results, tmp_path: Path
) -> None:
    async def judge(said: str) -> Rewards:
        if said == "no":
            raise ScorerFailed("KeyError: 'no'")
        return Rewards(1.0, explanation="It is right.")

    says = {name: model(tmp_path, finish(name), name=name) for name in ("yes", "no")}
    await Evaluation(
        client, EvaluationPlan("scorer", [Instance("a", "Say.", judge=judge)], list(says.values())), results
    ).run()
    found = {name: results.rows[path, "a", 1] for name, path in says.items()}
    assert [(row.outcome, row.cause, row.evidence) for row in found.values()] == [
        ("resolved", "", "It is right."),
        ("infra-abandoned", "scorer_failed", "KeyError: 'no'"),
    ]


SCORERS = """
def half(attempt):
    assert attempt.outcome == "", attempt.outcome
    return {"reward": len(attempt.files["a.txt"]) / 4, "steps": [0.5 for step in attempt.steps]}

def words(attempt):
    return len(attempt.message.split())
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_python_scorers_give_rewards_metrics_and_steps(client: Client, results: Results, tmp_path: Path) -> None:
    (tmp_path / "scorers.py").write_text(SCORERS)
    scorers = load_scorers([f"{tmp_path / 'scorers.py'}@{name}" for name in ("half", "words")])
    two, four = (
        model(tmp_path, bash(f"printf {text} > a.txt"), finish("I am done."), name=text) for text in ("ab", "abcd")
    )
    plan = EvaluationPlan("scored", [Instance("a", "Write.")], [two, four], scorers=scorers)
    await Evaluation(client, plan, results).run()
    rows = [results.rows[name, "a", 1] for name in (two, four)]
    assert [(row.outcome, row.reward, row.metrics) for row in rows] == [
        ("unresolved", 0.5, {"half": 0.5, "words": 3.0}),
        ("resolved", 1.0, {"half": 1.0, "words": 3.0}),
    ], rows[0].evidence
    assert [row.step_rewards for row in rows] == [[0.5, 0.5]] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_reward_of_a_harbor_task_stays_a_half(client: Client, results: Results, tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "hello")
    (folder / "tests" / "test.sh").write_text("echo 0.5 > /logs/verifier/reward.txt\n")
    plan = EvaluationPlan("harbor", [harbor_instance(folder)], [model(tmp_path, finish("Done."))])
    await Evaluation(client, plan, results).run()
    (row,) = results.rows.values()
    assert (row.outcome, row.reward) == ("unresolved", 0.5), row.evidence
    assert "The reward is 0.5." in row.evidence
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<h4>Task</h4><pre>Your working directory stands for /app" in page
    assert "Transcript</summary>" in page
    assert "→ finish" in page
    assert "<td>0.5<td>The reward is 0.5.<td>" in page


class Gone:
    """Files that can no longer be read."""

    def read(self) -> dict[str, TreeFile]:
        raise UsageError("The archive a.tar is gone.")


@pytest.mark.asyncio(loop_scope="module")
async def test_files_that_cannot_be_read_end_their_attempt_alone(
    client: Client, instance: Instance, results: Results, tmp_path: Path
) -> None:
    without = [
        replace(instance, id="begun", workspace=Gone()),
        replace(instance, id="hidden", hidden=Gone()),
    ]
    honest = model(tmp_path, bash(REPAIR), finish("Done."))
    await Evaluation(client, EvaluationPlan("gone", [*without, instance], [honest]), results).run()
    found = {row.instance: (row.outcome, row.cause, row.evidence[:27]) for row in results.rows.values()}
    gone = ("infra-abandoned", "files_unreadable", "The archive a.tar is gone.")
    assert {name: found[name] for name in ("begun", "hidden")} == {"begun": gone, "hidden": gone}
    assert found["calc"][0] == "resolved"
