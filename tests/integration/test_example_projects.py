"""The example projects are broken, and the scripts beside them repair them, with a real shell and the real editor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tool_worker.host.editor.file_editor import FileEditor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_TESTS = "python3 -m unittest -q"
TOOLS = {"execute_bash", "str_replace_editor", "think", "finish"}


@dataclass(frozen=True)
class Story:
    """The expected effect of a script on its project."""

    name: str
    before: str
    after: str
    changed: set[str]
    refused_edits: int = 0


STORIES = [
    Story(
        "billing_dates",
        before="Ran 7 tests, FAILED (failures=2)",
        after="Ran 8 tests, OK",
        changed={"billing_dates/plans.py", "tests/test_billing_dates.py"},
    ),
    Story(
        "expense_totals",
        before="Ran 6 tests, FAILED (failures=2)",
        after="Ran 6 tests, OK",
        changed={"expense_totals/money.py"},
    ),
    Story(
        "free_slots",
        before="Ran 7 tests, FAILED (failures=1)",
        after="Ran 7 tests, OK",
        changed={"free_slots/intervals.py"},
    ),
    Story(
        "page_cache",
        before="Ran 6 tests, FAILED (failures=1)",
        after="Ran 6 tests, OK",
        changed={"page_cache/cache.py"},
        refused_edits=1,
    ),
]


def test_every_project_has_a_script_and_a_story() -> None:
    names = [story.name for story in STORIES]
    assert sorted(path.name for path in (EXAMPLES / "projects").iterdir()) == names
    assert sorted(path.name for path in (EXAMPLES / "scripts").iterdir()) == [f"{name}.json" for name in names]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_script_has_the_form_that_a_scripted_model_plays(story: Story) -> None:
    script = read_script(story.name)
    assert set(script) == {"description", "latency_seconds", "turns"}
    assert script["latency_seconds"] == 0.0
    prompt_tokens = 0
    for turn in script["turns"]:
        assert set(turn) == {"text", "tool_calls", "usage"}
        assert {call["name"] for call in turn["tool_calls"]} <= TOOLS
        assert all(set(call) == {"name", "arguments"} for call in turn["tool_calls"])
        # A prompt holds all that was said before.
        assert turn["usage"]["prompt_tokens"] > prompt_tokens
        prompt_tokens = turn["usage"]["prompt_tokens"] + turn["usage"]["completion_tokens"]
    finishing = [[call["name"] for call in turn["tool_calls"]] == ["finish"] for turn in script["turns"]]
    assert finishing == [False] * (len(finishing) - 1) + [True]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_script_mends_its_project(story: Story, tmp_path: Path) -> None:
    workspace = tmp_path / story.name
    shutil.copytree(EXAMPLES / "projects" / story.name, workspace, ignore=shutil.ignore_patterns("__pycache__"))
    before = read_tree(workspace)
    outcomes, refused_edits = play(read_script(story.name), workspace)
    after = read_tree(workspace)
    assert (outcomes[0], outcomes[-1]) == (story.before, story.after)
    assert refused_edits == story.refused_edits
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == story.changed
    # Python takes a changed file of the same size and second for unchanged, and would run the old bytecode.
    assert all(len(before[name]) != len(after[name]) for name in story.changed)
    assert run_shell("python3 -m doctest README.md", workspace).returncode == 0


def play(script: dict[str, Any], workspace: Path) -> tuple[list[str], int]:
    """Do what the script says; give the outcome of each run of the tests, and the number of refused edits."""
    editor = FileEditor(str(workspace))
    outcomes = []
    refused_edits = 0
    for call in (call for turn in script["turns"] for call in turn["tool_calls"]):
        arguments = {
            key: value.replace("{workspace}", str(workspace)) if isinstance(value, str) else value
            for key, value in call["arguments"].items()
        }
        if call["name"] == "str_replace_editor":
            refused_edits += bool(editor.run(arguments)["is_error"])
        elif call["name"] == "execute_bash":
            done = run_shell(arguments["command"], workspace)
            if arguments["command"] == RUN_TESTS:
                lines = done.stderr.splitlines()
                outcomes.append(f"{lines[-3].partition(' in ')[0]}, {lines[-1]}")
                assert done.returncode == (0 if lines[-1] == "OK" else 1)
            else:
                assert done.returncode == 0, done.stderr
    return outcomes, refused_edits


def run_shell(command: str, workspace: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=workspace,
        env={"PATH": path, "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def read_script(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / "scripts" / f"{name}.json").read_text(encoding="utf-8"))


def read_tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
