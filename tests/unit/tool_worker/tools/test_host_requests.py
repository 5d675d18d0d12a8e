"""Requests of actions to a workspace host, and the observations and log lines of its results."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import Observation
from broker.contract.file_events import (
    FileEditAction,
    FileEditObservation,
    FileEditSource,
    FileReadAction,
    FileReadObservation,
    FileReadSource,
    FileWriteAction,
    FileWriteObservation,
)
from broker.contract.interventions import MAX_TIMEOUT_SECONDS, CommandExecutedObservation, ExecuteCommandAction
from broker.contract.observations import MAX_COMMAND_OUTPUT_CHARS, ErrorObservation, OutcomeUnknownObservation
from broker.runtime.errors import EventUnfit
from tests.controller_parts import CallModel, messages_of, started
from tool_worker.tools.bash import RunCommand
from tool_worker.tools.file_tools import MAX_KEPT_CHARS
from tool_worker.tools.registry import find_tool
from tool_worker.tools.tool import HostRequest, make_replacement, to_answer


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (CmdRunAction(command=" ls "), {"command": "ls", "timeout": 120.0, "blocking": False, "is_static": False}),
        (CmdRunAction(command="ls", timeout=5.0, blocking=True), {"timeout": 5.0, "blocking": True}),
        (CmdRunAction(command="git status", is_static=True, cwd="/x"), {"is_static": True, "cwd": "/x"}),
        (CmdRunAction(command="C-c", is_input=True), {"command": "C-c", "is_input": True}),
        (CmdRunAction(command="yes\nno", is_input=True), {"command": "yes\nno", "is_input": True}),
        (CmdRunAction(command="  if x:\n", is_input=True), {"command": "  if x:\n", "is_input": True}),
        (CmdRunAction(command="\n", is_input=True), {"command": "\n", "is_input": True}),
    ],
)
def test_every_field_of_the_action_reaches_the_shell(action: CmdRunAction, expected: dict[str, object]) -> None:
    request = RunCommand().request(action)
    assert request.tool == "bash"
    assert {name: request.arguments[name] for name in expected} == expected


Action = FileEditAction | FileReadAction | FileWriteAction
OH_ACI = FileReadSource.OH_ACI


@pytest.mark.parametrize(
    ("action", "request_made"),
    [
        (FileReadAction(path="a"), HostRequest("read", {"path": "a", "start": 0, "end": -1})),
        (FileReadAction(path="a", start=2, end=5), HostRequest("read", {"path": "a", "start": 2, "end": 5})),
        (
            FileReadAction(path="/a", impl_source=OH_ACI),
            HostRequest("edit", {"command": "view", "path": "/a", "view_range": None}),
        ),
        (
            FileReadAction(path="/a", view_range=(1, 3)),
            HostRequest("edit", {"command": "view", "path": "/a", "view_range": [1, 3]}),
        ),
        (
            FileWriteAction(path="a", content="x", start=1, end=1),
            HostRequest("write", {"path": "a", "content": "x", "start": 1, "end": 1}),
        ),
        (
            FileEditAction(path="/a", command="insert", insert_line="3", new_str="x"),
            HostRequest(
                "edit",
                {
                    "command": "insert",
                    "path": "/a",
                    "file_text": None,
                    "old_str": None,
                    "new_str": "x",
                    "insert_line": "3",
                },
            ),
        ),
    ],
)
def test_every_field_of_an_action_reaches_the_host(action: Action, request_made: HostRequest) -> None:
    assert find_tool(action.kind).request(action) == request_made


def test_draft_edit_is_answered_with_the_available_editor() -> None:
    answer = find_tool("action.edit").request(FileEditAction(path="/a", impl_source=FileEditSource.LLM_BASED_EDIT))
    assert isinstance(answer, ErrorObservation)
    assert "Use str_replace_editor" in answer.content


@pytest.mark.parametrize(
    ("action", "result", "observation"),
    [
        (
            FileReadAction(path="a"),
            {"content": "text", "is_error": False, "path": "/w/a"},
            FileReadObservation(content="text", path="/w/a"),
        ),
        (
            FileReadAction(path="a"),
            {"content": "File not found", "is_error": True, "path": "/w/a"},
            ErrorObservation(content="File not found"),
        ),
        (
            FileReadAction(path="/a", impl_source=OH_ACI),
            {"content": "ERROR:\nno", "is_error": True, "path": "/a"},
            FileReadObservation(content="ERROR:\nno", path="/a", impl_source=OH_ACI),
        ),
        (
            FileReadAction(path="a.png"),
            {"content": "shown", "is_error": False, "path": "/w/a.png", "image_url": "data:image/png;base64,"},
            FileReadObservation(content="shown", path="/w/a.png", image_urls=("data:image/png;base64,",)),
        ),
        (
            FileWriteAction(path="a", content="x"),
            {"content": "", "is_error": False, "path": "/w/a"},
            FileWriteObservation(path="/w/a"),
        ),
        (
            FileWriteAction(path="a", content="x"),
            {"content": "no", "is_error": True, "path": "/w/a"},
            ErrorObservation(content="no"),
        ),
        # An edit that fails is no error: as in the original it does not count as one for the stuck detector.
        (
            FileEditAction(path="/a", command="create"),
            {"content": "ERROR:\nno", "is_error": True, "path": "/a", "prev_exist": True},
            FileEditObservation(content="ERROR:\nno", path="/a", prev_exist=True),
        ),
        (
            FileEditAction(path="/a", command="create"),
            {
                "content": "done",
                "is_error": False,
                "path": "/a",
                "prev_exist": False,
                "old_content": None,
                "new_content": "x" * (MAX_KEPT_CHARS + 1),
                "diff": "+x",
            },
            FileEditObservation(content="done", path="/a", diff="+x"),
        ),
    ],
)
def test_what_is_observed(action: Action, result: dict[str, Any], observation: Observation) -> None:
    assert find_tool(action.kind).observe(action, result) == observation


ACTION = ExecuteCommandAction(id=7, command=" ls ", timeout=5.0)


def ended(content: str, state: str = "completed", exit_code: int = 0) -> dict[str, Any]:
    return {"content": content, "state": state, "metadata": {"exit_code": exit_code}}


def test_it_runs_in_a_separate_shell_for_a_limited_time() -> None:
    tool = find_tool("action.execute")
    request = tool.request(ACTION)
    assert isinstance(request, HostRequest)
    assert (request.arguments["command"], request.arguments["is_static"], request.arguments["timeout"]) == (
        "ls",
        True,
        5.0,
    )
    forged = tool.request(ACTION.model_copy(update={"timeout": 1e9}))
    assert isinstance(forged, HostRequest)
    assert forged.arguments["timeout"] == MAX_TIMEOUT_SECONDS


def test_output_is_cut_and_a_kill_reported() -> None:
    tool = find_tool("action.execute")
    observed = tool.observe(ACTION, ended("x" * 100_000, exit_code=3))
    assert isinstance(observed, CommandExecutedObservation)
    assert len(observed.content) < MAX_COMMAND_OUTPUT_CHARS + 100
    assert observed.exit_code == 3
    killed = tool.observe(ACTION, ended("x", "hard_timeout", -1))
    assert killed.content == "x\n[It was killed after 5 seconds.]"


@pytest.mark.parametrize(
    "found", [ErrorObservation(content="No.", error_id="workspace_lost"), OutcomeUnknownObservation(content="No.")]
)
def test_reason_for_not_running_is_not_shown_to_the_model(found: Any) -> None:
    answer = to_answer(ACTION, found)
    assert isinstance(answer, CommandExecutedObservation)
    assert (answer.content, answer.cause, answer.exit_code) == ("No.", 7, -1)
    assert answer.error_id
    other = make_replacement(answer, "Too large.", EventUnfit("Too large."))
    assert isinstance(other, CommandExecutedObservation)
    assert other.cause == 7


def test_no_step_waits_for_it_and_no_model_sees_it() -> None:
    core = started()
    before = messages_of(core.events)
    core.put(ExecuteCommandAction(command="ls"))
    core.put(CommandExecutedObservation(content="a.txt", exit_code=0, cause=core.state.version))
    assert core.run() == CallModel(1, 1)
    assert messages_of(core.events) == before
    assert core.state.tools.pending == ()
