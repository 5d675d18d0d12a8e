"""Evaluations from a program: on a private cluster, completed by a second call, begun again by choice."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import deckhands as public
from broker.runtime.errors import UsageError
from tests.dataset_parts import HUMAN_EVAL, harbor_task, write_rows
from tests.integration.command_line import deckhands, environment, run_command
from tests.turns import finish, script


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = environment(tmp_path / "home")
    for name in set(os.environ) - set(found):
        monkeypatch.delenv(name)
    monkeypatch.setenv("DECKHANDS_HOME", found["DECKHANDS_HOME"])
    return found


def test_rows_are_evaluated_completed_and_begun_again(tmp_path: Path, env: dict[str, str]) -> None:
    rows = [{"id": "six", "task": "2 * 3?", "answer": "6"}, {"id": "eight", "task": "2 * 4?", "answer": "8"}]
    model, out = script(tmp_path / "script.json", finish("FINAL ANSWER: 6")), tmp_path / "out"
    seen: list[dict[str, Any]] = []
    options: dict[str, Any] = {"out": out, "concurrency": 2, "on_row": seen.append}
    summary = public.evaluate(rows, model, **options)
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert summary["models"][model]["pass@1"] == 0.5
    assert {row["instance"]: row["outcome"] for row in seen} == {"six": "resolved", "eight": "unresolved"}
    assert public.evaluate(rows, model, **options) == summary  # nothing is left to do
    assert len(seen) == 2
    script(tmp_path / "script.json", finish("FINAL ANSWER: 8"))
    again = public.evaluate(rows, model, **options, redo=["unresolved"])
    assert again["models"][model]["pass@1"] == 1.0
    assert [row["instance"] for row in seen[2:]] == ["eight"]
    assert json.loads((out / "summary.json").read_text()) == again
    command = ("eval", "attach", out, "--redo", "six", "--json")
    done = deckhands(*command, env=env)
    assert done.json[0]["models"][model]["pass@1"] == 0.5
    # Every figure follows from results.jsonl alone.
    bare = tmp_path / "bare" / "out"
    bare.mkdir(parents=True)
    (bare / "results.jsonl").write_bytes((out / "results.jsonl").read_bytes())
    assert deckhands("eval", "report", bare, env=env).code == 0
    assert (bare / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    assert "<h4>Task</h4>" not in (bare / "report.html").read_text()
    # The page also has the configuration and the transcripts beside it.
    shutil.copy(out / "evaluation.json", bare)
    shutil.copytree(out / "transcripts", bare / "transcripts")
    assert deckhands("eval", "report", bare, env=env).code == 0
    assert (bare / "report.html").read_bytes() == (out / "report.html").read_bytes()
    assert "<h4>Task</h4>" in (bare / "report.html").read_text()


def test_arguments_that_cannot_be_used_begin_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    row = {"id": "six", "task": "2 * 3?", "answer": "6"}
    model, out = script(tmp_path / "script.json", finish("6")), tmp_path / "out"
    for arguments, options, why in (
        (([row], []), {}, "models is empty"),
        (([row, row], model), {}, "line 2: another line has the id"),
        (([{"id": object()}], model), {}, "a row that is not JSON"),
        (([row], model), {"redo": ["seven"]}, "neither an outcome nor an instance"),
        (("nowhere.jsonl", model), {}, "cannot be read"),
        (([row], model), {"concurrency": -1}, "concurrency -1 is not from 1 to 10,000"),
        (([row], model), {"attempts": 0}, "attempts 0 is not from 1 to 1,000"),
        (([row], model), {"retries": -1}, "retries -1 is not from 0 to 100"),
        (([row], model), {"budget_usd": float("nan")}, "budget_usd nan is not at least 0"),
    ):
        with pytest.raises(UsageError, match=why):
            public.evaluate(*arguments, out=out / why[:5], **options)
        assert not (out / why[:5] / "evaluation.json").exists()


def test_published_tasks_are_solved_by_their_own_solutions(tmp_path: Path, env: dict[str, str]) -> None:
    harbor_task(tmp_path / "tasks" / "hello")
    for number, dataset in enumerate((tmp_path / "tasks", write_rows(tmp_path, [HUMAN_EVAL]))):
        done = deckhands(
            "eval", "run", dataset, "--model", "scripted", "--out", tmp_path / f"out-{number}", "--json", env=env
        )
        assert done.code == 0, done
        assert done.json[0]["models"]["scripted"]["outcomes"]["resolved"] == 1, done


def test_a_set_up_runs_before_the_agent_begins(tmp_path: Path, env: dict[str, str]) -> None:
    row = {"id": "a", "task": "Copy it.", "setup": "echo made > made.txt; export WORD=set", "answer": "ok"}
    row["check"] = "test made-set = $(cat copy.txt)"
    model = script(tmp_path / "script.json", run_command("echo $(cat made.txt)-$WORD > copy.txt"), finish("ok"))
    done = deckhands(
        *("eval", "run", write_rows(tmp_path, [row]), "--model", model, "--no-network", "--out", tmp_path / "out"),
        "--json",
        env=env | {"DECKHANDS_EGRESS": "none"},
    )
    assert done.json[0]["models"][model]["outcomes"]["resolved"] == 1, (tmp_path / "out/results.jsonl").read_text()


def test_pictures_reach_the_model_and_tags_the_report(tmp_path: Path, env: dict[str, str]) -> None:
    from tests.dataset_parts import PNG

    (tmp_path / "a.png").write_bytes(PNG)
    row = {"id": "a", "task": "What is it?", "answer": "ok", "images": ["a.png"], "tags": ["pictures"]}
    model, out = script(tmp_path / "script.json", run_command("true"), finish("ok")), tmp_path / "out"
    run = ("eval", "run", write_rows(tmp_path, [row]), "--model", model, "--filter", "pictures", "--out", out, "--json")
    done = deckhands(*run, env=env)
    assert done.json[0]["models"][model]["tags"] == {"pictures": {"attempts": 1, "resolved": 1}}
    assert deckhands("eval", "export", out, "--format", "sft", env=env).code == 0
    (line,) = map(json.loads, (out / "exports" / "sft" / "sft.jsonl").read_text().splitlines())
    (asked,) = (message for message in line["messages"] if message["role"] == "user")
    assert asked["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
