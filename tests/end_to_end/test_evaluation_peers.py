"""Evaluations beside the real packages that they exchange files with: inspect_ai, SWE-bench's harness, Harbor."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser_pages import CHROMIUM, opened
from tests.dataset_parts import mirror_in, swe_rows, write_rows
from tests.faults.server_process import free_port
from tests.integration.command_line import cluster, deckhands, environment, read_until, run_command
from tests.source_code import ROOT
from tests.turns import finish, script

PEERS = ROOT / "build" / "peers"


def peer(name: str) -> Path:
    if not (PEERS / f"{name}.installed").exists():
        pytest.skip(f"{name} is not installed in build/peers: run .ci/peers")
    return PEERS / name


def asked_of(name: str, program: str, *arguments: object, **variables: str) -> Any:
    """Run a program with a peer, and return the JSON of its last line."""
    done = subprocess.run(
        (sys.executable, "-P", "-c", program, *map(str, arguments)),
        env={**os.environ, "PYTHONPATH": f"{peer(name)}:{ROOT}", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An evaluation of two SWE-bench rows: one is resolved by its own patch, one is not."""
    folder = tmp_path_factory.mktemp("evaluated")
    commit = mirror_in(folder / "mirrors")
    wrong = swe_rows(commit)[0]["patch"].replace("a + b", "a * b")
    names = {"FAIL_TO_PASS": ["test_sum (tests.test_calc.Case)"], "PASS_TO_PASS": ["test_unit (tests.test_calc.Case)"]}
    rows = [*swe_rows(commit, **names), *swe_rows(commit, instance_id="acme__calc-2", patch=wrong, **names)]
    env = environment(folder / "home")
    run = ("eval", "run", write_rows(folder, rows), "--model", "scripted", "--repositories", folder / "mirrors")
    done = deckhands(*run, "--out", folder / "out", env=env)
    assert done.code == 0, done
    lines = (folder / "out" / "results.jsonl").read_text().splitlines()
    outcomes = {row["instance"]: row["outcome"] for row in map(json.loads, lines)}
    assert outcomes == {"acme__calc-1": "resolved", "acme__calc-2": "unresolved"}, lines
    return folder, env


def exported(evaluated: tuple[Path, dict[str, str]], form: str, *options: str) -> list[Path]:
    folder, env = evaluated
    done = deckhands("eval", "export", folder / "out", "--format", form, *options, env=env)
    assert done.code == 0, done
    return sorted((folder / "out" / "exports" / form).iterdir())


def test_swe_benchs_harness_reads_the_predictions(evaluated: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    (path,) = exported(evaluated, "predictions")
    program = (
        "import json, sys\nfrom swebench.harness.utils import get_predictions_from_file\n"
        "print(json.dumps(get_predictions_from_file(sys.argv[1], 'x', 'test')))"
    )
    found = {line["instance_id"]: line for line in asked_of("swebench", program, path)}
    assert {line["model_name_or_path"] for line in found.values()} == {"scripted"}
    mirror = evaluated[0] / "mirrors" / "acme__calc.git"
    base = swe_rows(
        "x", base_commit=json.loads((evaluated[0] / "rows.jsonl").read_text().splitlines()[0])["base_commit"]
    )
    subprocess.run(("git", "clone", "-q", mirror, tmp_path / "again"), check=True)
    subprocess.run(("git", "checkout", "-q", base[0]["base_commit"]), cwd=tmp_path / "again", check=True)
    patch = found["acme__calc-1"]["model_patch"].encode()
    subprocess.run(("git", "apply", "--check", "-"), cwd=tmp_path / "again", input=patch, check=True)


def test_inspects_reader_opens_the_log(evaluated: tuple[Path, dict[str, str]]) -> None:
    (path,) = exported(evaluated, "inspect")
    program = (
        "import json, sys\nfrom inspect_ai.log import list_eval_logs, read_eval_log\n"
        "log = read_eval_log(sys.argv[1])\nlisted = list_eval_logs(sys.argv[2])\n"
        "sample = log.samples[0]\n"
        "print(json.dumps([log.status, log.results.metrics['accuracy'].value, len(listed), sample.id,\n"
        "    sample.scores['deckhands'].value, [m.role for m in sample.messages], sample.input[:20]]))"
    )
    status, accuracy, listed, first, value, roles, task = asked_of("inspect", program, path, path.parent)
    assert (status, accuracy, listed, first, value) == ("success", 0.5, 1, "acme__calc-1", "C")
    assert roles[:2] == ["system", "user"]
    assert {"assistant", "tool"} <= set(roles)
    assert task == "Your working directo"


def test_inspects_reader_opens_an_exported_conversation(tmp_path: Path) -> None:
    folder, path = tmp_path / "runs" / "run-1", tmp_path / "log.json"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "replay" / "golden" / "files_and_an_unknown_tool.jsonl", folder / "events.jsonl")
    done = deckhands("export", "run-1", "--format", "inspect", "-o", path, env=environment(tmp_path))
    assert done.code == 0, done
    program = (
        "import json, sys\nfrom inspect_ai.log import read_eval_log\nlog = read_eval_log(sys.argv[1])\n"
        "print(json.dumps([log.status, log.samples[0].id, log.samples[0].scores, log.samples[0].messages[0].role]))"
    )
    assert asked_of("inspect", program, path) == ["success", "run-1", None, "system"]


@contextmanager
def viewed(folder: Path, home: Path) -> Iterator[str]:
    """The address of the real `inspect view` over a directory of logs."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = (sys.executable, "-P", "-m", "inspect_ai", "view", "start", "--log-dir", folder, "--port", str(port))
    variables = {**os.environ, "PYTHONPATH": str(peer("inspect")), "HOME": str(home), "XDG_DATA_HOME": str(home)}
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        try:
            read_until(running, "Running on")
            yield address
        finally:
            running.terminate()


def got(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as response:
        return json.loads(response.read())


def test_inspects_viewer_lists_the_log_and_gives_it_out(evaluated: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    (path,) = exported(evaluated, "inspect")
    name = json.loads((evaluated[0] / "out" / "evaluation.json").read_text())["name"]
    with viewed(path.parent, tmp_path) as address:
        (listed,) = got(f"{address}/api/logs")["files"]
        assert (listed["task"], listed["task_id"]) == ("rows", name)
        log = got(f"{address}/api/logs/{quote(listed['name'], safe='')}")
    assert [sample["id"] for sample in log["samples"]] == ["acme__calc-1", "acme__calc-2"]
    kinds = [event["event"] for event in log["samples"][0]["events"]]
    assert kinds == ["model", "tool", "model", "score"]


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
async def test_inspects_page_shows_the_samples_their_transcripts_and_their_scores(
    evaluated: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    (path,) = await asyncio.to_thread(exported, evaluated, "inspect")  # it starts a loop itself
    with viewed(path.parent, tmp_path) as address:
        async with opened(address) as page:
            await page.get_by_text("acme__calc-2").first.wait_for()
            await page.get_by_text("acme__calc-1").first.click()
            await page.get_by_role("tab", name="Transcript").click()
            await page.get_by_text("git apply").first.wait_for()
            await page.get_by_text("turn 2/2").first.wait_for()
            assert await page.get_by_text("exceeds the browser's size limit").count() == 0
            await page.get_by_role("tab", name="Messages").click()
            await page.get_by_text("You are a software engineer").first.wait_for()
            await page.get_by_role("tab", name="Scoring").click()
            await page.get_by_text("Explanation", exact=True).first.wait_for()


def test_harbors_models_take_the_trajectories(evaluated: tuple[Path, dict[str, str]]) -> None:
    paths = exported(evaluated, "atif")
    program = (
        "import json, sys\nfrom harbor.models.trajectories import Trajectory\n"
        "found = Trajectory.model_validate_json(open(sys.argv[1]).read())\n"
        "print(json.dumps([found.agent.name, [step.source for step in found.steps],\n"
        "    [result.content for step in found.steps if step.observation for result in step.observation.results]]))"
    )
    assert len(paths) == 2
    agent, sources, results = asked_of("harbor", program, paths[0])
    assert agent == "CodeActAgent"
    assert sources[:2] == ["system", "user"]
    assert set(sources[2:]) == {"agent"}
    assert results


def test_trajectories_reimport_and_examples_answer_each_call(
    evaluated: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    paths = exported(evaluated, "openhands")
    assert len(paths) == 2
    done = deckhands("import", paths[0], "-o", tmp_path / "events.jsonl", env=evaluated[1])
    assert done.code == 0, done
    (path,) = exported(evaluated, "sft")
    (line,) = map(json.loads, path.read_text().splitlines())  # only what is resolved
    assert line["metadata"]["instance"] == "acme__calc-1"
    messages = line["messages"]
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert len(calls) == 2


TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, match, scorer, includes
from inspect_ai.util import sandbox
from deckhands.interop.bridges.inspect_solver import deckhands_agent

SAMPLES = [Sample("What is 2 * 3?", target="6", id="six"), Sample("What is 2 * 4?", target="8", id="eight")]

@scorer(metrics=[accuracy()])
def greeted():
    async def score(state, target):
        return Score(value="C" if await sandbox().read_file("out.txt") == target.text else "I")
    return score

@task
def products():
    return Task(dataset=SAMPLES, scorer=includes())

@scorer(metrics={"speed": [accuracy()]})
def partly():
    async def score(state, target):
        return Score(value={"speed": 0.5, "style": "P"})
    return score

@task
def limited():
    limits = dict(epochs=2, message_limit=7, time_limit=90, token_limit=1000, sandbox=("docker", "compose.yaml"))
    return Task(dataset=SAMPLES[:1], scorer=partly(), **limits)

@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target):
        raise KeyError("boom")
    return score

@task
def broken_products():
    return Task(dataset=SAMPLES, scorer=broken())

@task
def doubled():
    return Task(dataset=[Sample("a", target="a", id="a b"), Sample("b", target="b", id="a-b")], scorer=includes())

@task
def greeting(model="", cluster=""):
    samples = [Sample("Greet.", target="Hello, Ann\\n", files={"name.txt": "Ann\\n"})]
    solver = deckhands_agent(model=model, cluster=cluster)
    return Task(dataset=samples, solver=solver, scorer=greeted(), sandbox="local")
"""


def test_inspect_task_is_tried_by_our_agents_and_scored(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    model = script(tmp_path / "script.json", finish("It is 6."))
    dataset = f"inspect:{tmp_path / 'tasks.py'}@products"
    run = ("eval", "run", dataset, "--model", model, "--out", str(tmp_path / "out"), "--json")
    env = environment(tmp_path / "home", PYTHONPATH=f"{peer('inspect')}:{ROOT}")
    done = subprocess.run(
        (sys.executable, "-P", "-m", "deckhands", *run), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {row["instance"]: row["outcome"] for row in rows} == {"six": "resolved", "eight": "unresolved"}
    assert all("It is 6." in row["evidence"] for row in rows)


def test_inspect_settings_are_kept_or_named_and_values_stay(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    model = script(tmp_path / "script.json", finish("It is 6."))
    run = ("eval", "run", f"inspect:{tmp_path / 'tasks.py'}@limited", "--model", model, "--out", str(tmp_path / "out"))
    env = environment(tmp_path / "home", PYTHONPATH=f"{peer('inspect')}:{ROOT}")
    done = subprocess.run(
        (sys.executable, "-P", "-m", "deckhands", *run, "--max-seconds", "60"),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "The dataset sets attempts to 2: epochs=2.",
        "The dataset sets max_iterations to 3: message_limit=7.",
        "The dataset's time_limit=90 is ignored: max_seconds is 60.",
        "six: token_limit of the task is ignored",
        "six: sandbox docker with compose.yaml is ignored",
    ):
        assert line in done.stderr
    asked = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (asked["attempts"], asked["max_iterations"], asked["max_seconds"]) == (2, 3, 60)
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(row["outcome"], row["reward"]) for row in rows] == [("unresolved", 0.5)] * 2
    assert rows[0]["metrics"] == {"partly/speed": 0.5, "partly/style": 0.5}


def test_duplicate_sample_ids_are_refused_and_scorer_failures_unscored(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    program = (
        "import asyncio, json, sys\nfrom broker.runtime.errors import DeckhandsError\n"
        "from deckhands.evaluation.datasets.dataset import read_dataset\nfound = []\n"
        "for task in ('doubled', 'broken_products'):\n    try:\n"
        "        instances = read_dataset(f'inspect:{sys.argv[1]}@{task}')\n"
        "        asyncio.run(instances[0].judge('6'))\n"
        "    except DeckhandsError as error:\n        found.append([error.code, error.message])\n"
        "print(json.dumps(found))"
    )
    doubled, broken = asked_of("inspect", program, tmp_path / "tasks.py")
    assert (doubled[0], "sample 2: another sample has the id 'a-b'" in doubled[1]) == ("usage", True)
    assert broken == ["scorer_failed", "KeyError: 'boom'"]


def test_our_agent_is_a_solver_in_a_task_of_inspect(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    command = 'echo "Hello, $(cat name.txt)" > out.txt; rm name.txt'
    model = script(tmp_path / "script.json", run_command(command, text="I greet."), finish("Greeted."))
    program = (
        "import json, sys, tasks\nfrom inspect_ai import eval\n"
        "(log,) = eval(tasks.greeting(sys.argv[1], sys.argv[2]), model='mockllm/model', display='none',\n"
        "    log_dir=sys.argv[3])\nassert log.status == 'success', log.error\nsample = log.samples[0]\n"
        "print(json.dumps([log.results.scores[0].metrics['accuracy'].value, sample.output.completion,\n"
        "    [m.role for m in sample.messages], sample.metadata['deckhands']['state']]))"
    )
    with cluster(tmp_path / "home"):
        url = (tmp_path / "home" / "cluster" / "url").read_text().strip()
        accuracy, said, roles, state = asked_of(
            "inspect", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}", model, url, tmp_path
        )
    assert (accuracy, said, state) == (1.0, "Greeted.", "finished")
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
