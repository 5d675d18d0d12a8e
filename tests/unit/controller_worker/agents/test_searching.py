"""The searches of agents that only look: what is run for them, in a real shell."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import AgentSpec, Event, ModelReply, ModelToolCall, WorkspaceSpec
from broker.contract.file_events import FileReadAction
from broker.contract.observations import ErrorObservation
from broker.specs.tool_specs import ToolOffer
from controller_worker.agents.looking import ReadOnlyAgent

HOSTILE = [
    "-delete",
    "!",
    "(",
    "a b",
    "$(touch hacked)",
    "`touch hacked`",
    "'; touch hacked; '",
    "-rf",
    "--pre=touch",
    '"',
    "*",
    "a\nb",
]


def called(name: str, **arguments: Any) -> Event:
    call = ModelToolCall(id="c1", name=name, arguments=json.dumps(arguments))
    (event,) = ReadOnlyAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=(call,)))
    return event


def found(name: str, directory: Path, **arguments: Any) -> list[str]:
    action = called(name, **arguments)
    assert isinstance(action, CmdRunAction)
    run = subprocess.run(["bash", "-c", action.command], cwd=directory, capture_output=True, text=True, check=True)
    header, _, listing = run.stdout.partition("\n\n")
    assert header.startswith("Below are the execution results of the search command: rg ")
    return [os.path.normpath(line) for line in listing.splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"a.py": "Needle", "b.txt": "needle", "src/c.py": "hay", "src/d.py": "a needle too", "src/in/e.ts": "3 hay"}
    for age, (name, text) in enumerate({**files, ".hidden/f.py": "needle", "b.bin": "needle\0"}.items()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (0, 1e9 - age))
    return tmp_path


def test_grep_finds_files_by_content_those_changed_last_first(project: Path) -> None:
    assert found("grep", project, pattern="need.e") == ["a.py", "b.txt", "src/d.py"]
    assert found("grep", project, pattern="needle", include="*.py") == ["a.py", "src/d.py"]
    assert found("grep", project, pattern="needle", include="*.{ts,txt}") == ["b.txt"]
    assert found("grep", project, pattern="needle", include="!*.py") == ["b.txt"]
    assert found("grep", project, pattern="needle", path="src") == ["src/d.py"]
    assert found("grep", project, pattern="needle", path="src/d.py") == ["src/d.py"]
    assert found("grep", project, pattern="needle", path=".hidden") == [".hidden/f.py"]
    assert found("grep", project, pattern=r"^\d\b", include="src/**/*.ts") == ["src/in/e.ts"]
    assert found("grep", project, pattern="nothing") == []
    os.utime(project / "src/d.py", (0, 2e9))
    assert found("grep", project, pattern="needle") == ["src/d.py", "a.py", "b.txt"]


def test_glob_finds_files_by_path_those_changed_last_first(project: Path) -> None:
    assert found("glob", project, pattern="**/*.py") == ["a.py", "src/c.py", "src/d.py"]
    assert found("glob", project, pattern="src/*") == ["src/c.py", "src/d.py"]
    assert found("glob", project, pattern="src/**") == ["src/c.py", "src/d.py", "src/in/e.ts"]
    assert found("glob", project, pattern="{a,[!a-c]}.{py,ts}") == ["a.py", "src/d.py", "src/in/e.ts"]
    assert found("glob", project, pattern="?.py", path="src/") == ["src/c.py", "src/d.py"]
    assert found("glob", project, pattern="in/*.ts", path="src") == ["src/in/e.ts"]
    absolute = [f"{project}/src/c.py", f"{project}/src/d.py"]
    assert found("glob", project, pattern="*.py", path=f"{project}/src") == absolute
    os.utime(project / "src/d.py", (0, 2e9))
    assert found("glob", project, pattern="**/*.py") == ["src/d.py", "a.py", "src/c.py"]


def test_names_may_hold_what_patterns_and_expressions_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "a[1] {x}").mkdir()
    (tmp_path / "a[1] {x}" / "b+'.(c$").write_text("needle")
    for arguments in ({"pattern": r"a\[1\] \{x\}/*"}, {"pattern": "b+'.(c$"}, {"pattern": "*", "path": "a[1] {x}"}):
        assert found("glob", tmp_path, **arguments) == ["a[1] {x}/b+'.(c$"]


def test_at_most_a_hundred_files_are_listed(tmp_path: Path) -> None:
    for number in range(130):
        (tmp_path / f"{number}.txt").write_text("x")
    assert len(found("glob", tmp_path, pattern="*.txt")) == 100
    assert len(found("grep", tmp_path, pattern="x")) == 100


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", ["grep", "glob"])
def test_a_pattern_is_one_word_whatever_it_holds(project: Path, name: str, hostile: str) -> None:
    for arguments in ({"pattern": hostile}, {"pattern": "x", "path": hostile}):
        action = called(name, **arguments)
        assert isinstance(action, CmdRunAction)
        before = sorted(project.rglob("*"))
        subprocess.run(["bash", "-c", action.command], cwd=project, capture_output=True, check=False)
        assert sorted(project.rglob("*")) == before


def test_view_reads() -> None:
    action = called("view", path="/workspace/a.py", view_range=[1, 5])
    assert isinstance(action, FileReadAction)
    assert (action.path, action.view_range, action.impl_source) == ("/workspace/a.py", (1, 5), "oh_aci")


@pytest.mark.parametrize("name", ["execute_bash", "str_replace_editor", "weather"])
def test_nothing_else_can_be_called(name: str) -> None:
    offer = ToolOffer(key="weather", name="weather", parameters={"type": "object"})
    agent = ReadOnlyAgent(AgentSpec(tools=(offer,)))
    assert [tool.name for tool in agent.tools] == ["think", "finish", "grep", "glob", "view"]
    call = ModelToolCall(id="c1", name=name, arguments='{"command": "ls"}')
    (error,) = agent.events_of(ModelReply(id=7, tool_calls=(call,)))
    assert isinstance(error, ErrorObservation)


def test_missing_arguments_are_named() -> None:
    error = called("grep", path="src")
    assert isinstance(error, ErrorObservation)
    assert error.content == 'Missing required argument "pattern" in tool call grep'


def test_the_prompt_names_the_workspace() -> None:
    prompt = ReadOnlyAgent(AgentSpec(system_prompt_suffix="Be brief.")).system_prompt(WorkspaceSpec(path="/srv/x"))
    assert "The workspace is /srv/x." in prompt
    assert prompt.endswith("\n\nBe brief.")
