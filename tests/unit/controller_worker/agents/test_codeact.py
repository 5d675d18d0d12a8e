"""CodeActAgent: its tools, its prompt, and the table of agents."""

from __future__ import annotations

import json

import pytest

from broker.contract.actions import AgentDelegateAction, CondensationRequestAction
from broker.contract.browser_events import BrowseInteractiveAction
from broker.contract.code_search import GLOB, GREP
from broker.contract.condenser_specs import NoOpCondenserSpec
from broker.contract.events import ActionSecurityRisk, AgentSpec, ModelReply, WorkspaceSpec
from broker.contract.file_events import STR_REPLACE_EDITOR
from broker.contract.observations import ErrorObservation
from broker.contract.session_events import IPythonRunCellAction
from broker.contract.task_list import TASK_TRACKER
from broker.contract.tool_schemas import EXECUTE_BASH, FINISH, THINK
from broker.runtime.errors import UsageError
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.registry import AGENTS, create_agent
from tests.controller_parts import bash, call, finish


def test_the_tools_in_order() -> None:
    assert list(CodeActAgent(AgentSpec()).tools) == [
        EXECUTE_BASH,
        THINK,
        FINISH,
        TASK_TRACKER,
        STR_REPLACE_EDITOR,
        GREP,
        GLOB,
    ]


def test_a_condensation_can_be_requested_where_one_is_made() -> None:
    agent = CodeActAgent(AgentSpec(enable_condensation_request=True))
    assert [tool.name for tool in agent.tools][1:4] == ["think", "finish", "request_condensation"]
    (event,) = agent.events_of(ModelReply(id=7, tool_calls=(call("request_condensation"),)))
    assert isinstance(event, CondensationRequestAction)
    nobody = CodeActAgent(AgentSpec(enable_condensation_request=True, condenser=NoOpCondenserSpec()))
    assert "request_condensation" not in [tool.name for tool in nobody.tools]


def test_a_browser_is_offered_where_it_is_switched_on() -> None:
    agent = CodeActAgent(AgentSpec(enable_browsing=True, enable_jupyter=True))
    assert [tool.name for tool in agent.tools][2:5] == ["finish", "browser", "execute_ipython_cell"]
    code = "goto('http://localhost')"
    (event,) = agent.events_of(
        ModelReply(id=7, tool_calls=(call("browser", json.dumps({"code": code, "security_risk": "LOW"})),))
    )
    assert isinstance(event, BrowseInteractiveAction)
    assert (event.browser_actions, event.security_risk) == (code, ActionSecurityRisk.LOW)


def test_a_browsing_delegate_is_offered_where_it_is_switched_on() -> None:
    agent = CodeActAgent(AgentSpec(enable_browsing_delegate=True))
    (tool,) = [tool for tool in agent.tools if tool.name == "delegate_to_browsing_agent"]
    assert (tool.parameters["required"], list(tool.parameters["properties"])) == (["task"], ["task"])
    asked = ModelReply(id=7, tool_calls=(call("delegate_to_browsing_agent", '{"task": "look", "url": "http://a"}'),))
    (event,) = agent.events_of(asked)
    assert isinstance(event, AgentDelegateAction)
    assert (event.agent, event.inputs, event.background) == (
        "BrowsingAgent",
        {"task": "look", "url": "http://a"},
        False,
    )
    (missing,) = agent.events_of(ModelReply(id=7, tool_calls=(call("delegate_to_browsing_agent"),)))
    assert isinstance(missing, ErrorObservation)
    assert missing.content == 'Missing required argument "task" in tool call delegate_to_browsing_agent'
    (refused,) = CodeActAgent(AgentSpec()).events_of(asked)
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
    call = bash().model_copy(update={"name": missing})
    (event,) = agent.events_of(ModelReply(id=7, tool_calls=(call,)))
    assert isinstance(event, ErrorObservation)
    assert event.content.startswith(f"Tool {missing} is not registered.")


def test_searches_can_be_switched_off() -> None:
    assert [tool.name for tool in CodeActAgent(AgentSpec(enable_search=False)).tools][-1] == "str_replace_editor"


@pytest.mark.parametrize(
    ("tool", "required", "optional"),
    [
        (EXECUTE_BASH, ["command", "security_risk"], ["is_input", "timeout", "is_background", "terminal", "control"]),
        (THINK, ["thought"], []),
        (FINISH, ["message"], []),
        (
            STR_REPLACE_EDITOR,
            ["command", "path", "security_risk"],
            [
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "view_range",
                "edits",
                "replace_all",
                "overwrite",
                "cell",
                "cell_type",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_parameters_of_the_tools(tool: object, required: list[str], optional: list[str]) -> None:
    parameters = tool.parameters  # type: ignore[attr-defined]
    assert parameters["required"] == required
    assert sorted(parameters["properties"]) == sorted(required + optional)


def test_the_choices_of_the_tools() -> None:
    bash_properties = EXECUTE_BASH.parameters["properties"]
    assert bash_properties["is_input"]["enum"] == ["true", "false"]
    assert bash_properties["security_risk"]["enum"] == ["LOW", "MEDIUM", "HIGH"]
    editor_commands = STR_REPLACE_EDITOR.parameters["properties"]["command"]["enum"]
    assert editor_commands[:5] == ["view", "create", "str_replace", "insert", "undo_edit"]
    assert editor_commands[5:] == ["replace_cell", "insert_cell", "delete_cell"]


def test_prompt_names_the_workspace_and_a_missing_network() -> None:
    agent = CodeActAgent(AgentSpec())
    closed = agent.system_prompt(WorkspaceSpec(path="/srv/project"))
    assert "Your shell starts in the workspace, /srv/project." in closed
    assert "Commands have no access to the network." in closed
    open_prompt = agent.system_prompt(WorkspaceSpec(network=True))
    assert "Your shell starts in the workspace. It is one shell" in open_prompt
    assert "no access to the network" not in open_prompt
    lacks = "Commands run in a sandbox: no root and no sudo, and system directories are read-only."
    assert lacks in closed
    assert lacks in open_prompt
    assert "sandbox" not in agent.system_prompt(WorkspaceSpec(network=True, sandbox="none"))


def test_the_prompt_speaks_of_finishing_only_where_the_tool_is() -> None:
    workspace = WorkspaceSpec()
    assert "call `finish`" in CodeActAgent(AgentSpec()).system_prompt(workspace)
    assert "finish`" not in CodeActAgent(AgentSpec(enable_finish=False)).system_prompt(workspace)


def test_the_prompt_ends_with_the_suffix_as_it_is() -> None:
    prompt = CodeActAgent(AgentSpec(system_prompt_suffix="Use <b> & {{ braces }}.")).system_prompt(WorkspaceSpec())
    assert prompt.endswith("\n\nUse <b> & {{ braces }}.")


def test_a_reply_becomes_events() -> None:
    events = CodeActAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=(bash(), finish())))
    assert [event.kind for event in events] == ["action.run", "action.finish"]


BUILT_IN = sorted(AGENTS)


def test_agents_by_name() -> None:
    assert len(BUILT_IN) == 12
    assert isinstance(create_agent(AgentSpec(name="CodeActAgent")), CodeActAgent)


def test_an_unknown_agent_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError) as raised:
        create_agent(AgentSpec(name="NoSuchAgent"))
    known = ", ".join(sorted({*BUILT_IN, "acp:COMMAND"} - {"AcpAgent"}))
    assert str(raised.value) == f"There is no agent named 'NoSuchAgent'. Known agents: {known}."


def test_cells_are_offered_where_they_are_switched_on() -> None:
    agent = CodeActAgent(AgentSpec(enable_jupyter=True))
    assert [tool.name for tool in agent.tools].index("execute_ipython_cell") == 3
    call = bash().model_copy(update={"name": "execute_ipython_cell", "arguments": '{"code": "1 + 1"}'})
    (event,) = agent.events_of(ModelReply(id=7, tool_calls=(call,)))
    assert event.kind == "action.run_ipython"
    (refused,) = CodeActAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=(call,)))
    assert isinstance(refused, ErrorObservation)


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
    agent = CodeActAgent(AgentSpec(enable_jupyter=True))
    written = json.dumps({"code": "1 + 1", **arguments})
    call = bash().model_copy(update={"name": "execute_ipython_cell", "arguments": written})
    (event,) = agent.events_of(ModelReply(id=7, tool_calls=(call,)))
    assert isinstance(event, IPythonRunCellAction)
    assert (event.code, event.timeout) == ("1 + 1", seconds)


@pytest.mark.parametrize("timeout", [0, -1, "soon", [1], 1e999])
def test_a_time_that_a_cell_cannot_have_is_refused(timeout: object) -> None:
    agent = CodeActAgent(AgentSpec(enable_jupyter=True))
    written = json.dumps({"code": "1", "timeout": timeout})
    call = bash().model_copy(update={"name": "execute_ipython_cell", "arguments": written})
    (refused,) = agent.events_of(ModelReply(id=7, tool_calls=(call,)))
    assert isinstance(refused, ErrorObservation)
