"""CodeActAgent: its tools, its prompt, and the table of agents."""

import json
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, CondensationRequestAction
from broker.contract.browser_events import BrowseInteractiveAction
from broker.contract.code_search import GLOB, GREP
from broker.contract.condenser_specs import NoOpCondenserSpec
from broker.contract.events import ActionSecurityRisk, AgentSpec, Event, ModelReply, ModelToolCall, WorkspaceSpec
from broker.contract.file_events import STR_REPLACE_EDITOR
from broker.contract.observations import ErrorObservation
from broker.contract.session_events import IPythonRunCellAction
from broker.contract.task_list import TASK_TRACKER
from broker.contract.tool_specs import EXECUTE_BASH, FINISH, THINK
from controller_worker.agents.codeact import CodeActAgent
from tests.controller_parts import bash, call


def events_of(called: ModelToolCall, **options: Any) -> list[Event]:
    """Return the events that an agent with these options makes of a call."""
    return CodeActAgent(AgentSpec(**options)).events_of(ModelReply(id=7, tool_calls=(called,)))


def cell(**arguments: object) -> ModelToolCall:
    return call("execute_ipython_cell", json.dumps({"code": "1 + 1", **arguments}))


def test_the_tools_in_order() -> None:
    tools = [EXECUTE_BASH, THINK, FINISH, TASK_TRACKER, STR_REPLACE_EDITOR, GREP, GLOB]
    assert list(CodeActAgent(AgentSpec()).tools) == tools
    assert list(CodeActAgent(AgentSpec(enable_search=False)).tools) == tools[:5]


def test_a_condensation_can_be_requested_where_one_is_made() -> None:
    agent = CodeActAgent(AgentSpec(enable_condensation_request=True))
    assert [tool.name for tool in agent.tools][1:4] == ["think", "finish", "request_condensation"]
    (event,) = events_of(call("request_condensation"), enable_condensation_request=True)
    assert isinstance(event, CondensationRequestAction)
    without = CodeActAgent(AgentSpec(enable_condensation_request=True, condenser=NoOpCondenserSpec()))
    assert "request_condensation" not in [tool.name for tool in without.tools]


def test_browser_and_cells_are_offered_where_switched_on() -> None:
    agent = CodeActAgent(AgentSpec(enable_browsing=True, enable_jupyter=True))
    assert [tool.name for tool in agent.tools][2:5] == ["finish", "browser", "execute_ipython_cell"]
    code = "goto('http://localhost')"
    browsed = call("browser", json.dumps({"code": code, "security_risk": "LOW"}))
    (event,) = events_of(browsed, enable_browsing=True)
    assert isinstance(event, BrowseInteractiveAction)
    assert (event.browser_actions, event.security_risk) == (code, ActionSecurityRisk.LOW)
    (refused,) = events_of(cell())
    assert isinstance(refused, ErrorObservation)


def test_a_browsing_delegate_is_offered_where_it_is_switched_on() -> None:
    name, on = "delegate_to_browsing_agent", {"enable_browsing_delegate": True}
    (tool,) = [tool for tool in CodeActAgent(AgentSpec(**on)).tools if tool.name == name]
    assert (tool.parameters["required"], list(tool.parameters["properties"])) == (["task"], ["task"])
    inputs = {"task": "look", "url": "http://a"}
    (event,) = events_of(call(name, json.dumps(inputs)), **on)
    assert isinstance(event, AgentDelegateAction)
    assert (event.agent, event.inputs, event.background) == ("BrowsingAgent", inputs, False)
    (missing,) = events_of(call(name), **on)
    assert isinstance(missing, ErrorObservation)
    assert missing.content == f'Missing required argument "task" in tool call {name}'
    (refused,) = events_of(call(name, json.dumps(inputs)))
    assert isinstance(refused, ErrorObservation)


@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        ("enable_cmd", "execute_bash"),
        ("enable_think", "think"),
        ("enable_finish", "finish"),
        ("enable_plan_mode", "task_tracker"),
        ("enable_editor", "str_replace_editor"),
    ],
)
def test_disabled_tool_is_neither_offered_nor_obeyed(switch: str, missing: str) -> None:
    agent = CodeActAgent(AgentSpec.model_validate({switch: False}))
    assert missing not in [tool.name for tool in agent.tools]
    assert len(agent.tools) == 6
    (event,) = events_of(bash().model_copy(update={"name": missing}), **{switch: False})
    assert isinstance(event, ErrorObservation)
    assert event.content.startswith(f"Tool {missing} is not registered.")


def test_prompt_names_the_workspace_and_a_missing_network() -> None:
    agent = CodeActAgent(AgentSpec(system_prompt_suffix="Use <b> & {{ braces }}."))
    closed = agent.system_prompt(WorkspaceSpec(path="/srv/project"))
    assert "Your shell starts in the workspace, /srv/project." in closed
    assert "Commands have no access to the network." in closed
    assert closed.endswith("\n\nUse <b> & {{ braces }}.")
    open_prompt = agent.system_prompt(WorkspaceSpec(network=True))
    assert "Your shell starts in the workspace. It is one shell" in open_prompt
    assert "no access to the network" not in open_prompt
    lacks = "Commands run in a sandbox: no root and no sudo, and system directories are read-only."
    assert lacks in closed
    assert lacks in open_prompt
    assert "sandbox" not in agent.system_prompt(WorkspaceSpec(network=True, sandbox="none"))
    assert "call `finish`" in closed
    assert "finish`" not in CodeActAgent(AgentSpec(enable_finish=False)).system_prompt(WorkspaceSpec())


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({}, None),
        ({"timeout": 600}, 600.0),
        ({"timeout": "0.5"}, 0.5),
        ({"security_risk": "LOW", "timeout": None}, None),
    ],
)
def test_a_cell_may_say_how_long_it_takes(arguments: dict[str, object], seconds: float | None) -> None:
    (event,) = events_of(cell(**arguments), enable_jupyter=True)
    assert isinstance(event, IPythonRunCellAction)
    assert (event.code, event.timeout) == ("1 + 1", seconds)


@pytest.mark.parametrize("timeout", [0, -1, "soon", [1], 1e999])
def test_a_time_that_a_cell_cannot_have_is_refused(timeout: object) -> None:
    (refused,) = events_of(cell(timeout=timeout), enable_jupyter=True)
    assert isinstance(refused, ErrorObservation)
