"""The agents that only look: which tools they have, and what their calls ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.code_search import CodeSearchAction
from broker.contract.events import AgentSpec, Event, ModelReply, ModelToolCall, WorkspaceSpec
from broker.contract.file_events import FileReadAction
from broker.contract.observations import ErrorObservation
from broker.contract.tool_specs import ToolOffer
from controller_worker.agents.read_only import ReadOnlyAgent


def called(name: str, **arguments: Any) -> Event:
    call = ModelToolCall(id="c1", name=name, arguments=json.dumps(arguments))
    (event,) = ReadOnlyAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=(call,)))
    return event


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("grep", {"pattern": "x"}),
        ("grep", {"pattern": "x", "path": "src", "include": "*.py", "context": 2, "case_sensitive": True}),
        ("glob", {"pattern": "**/*.py", "path": "/workspace"}),
    ],
)
def test_search_is_a_question_to_a_read_only_program(name: str, arguments: dict[str, Any]) -> None:
    action = called(name, **arguments)
    assert isinstance(action, CodeSearchAction)
    assert (action.question, action.arguments) == (name, arguments)


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
