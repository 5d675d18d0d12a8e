"""Commands that a person runs beside the agent: what the host is asked, and what the log gets."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.interventions import MAX_TIMEOUT_SECONDS, CommandExecutedObservation, ExecuteCommandAction
from broker.contract.observations import MAX_COMMAND_OUTPUT_CHARS, ErrorObservation, OutcomeUnknownObservation
from broker.runtime.errors import EventUnfit
from tests.controller_parts import CallModel, messages_of, started
from tool_worker.tools.registry import find_tool
from tool_worker.tools.tool import HostRequest, make_replacement, to_answer

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
