"""Read-only agents: their tools, their calls, and other agents' handling of those calls."""

import json
from typing import Any

import pytest

from broker.contract.code_search import CodeSearchAction, CodeSearchObservation
from broker.contract.events import ActionSecurityRisk, AgentSpec, ConversationCreated, Event, ModelReply, WorkspaceSpec
from broker.contract.file_events import FileReadAction
from broker.contract.observations import ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.tool_specs import OutcomePolicy, ToolOffer
from controller_worker.agents.read_only import LocAgent, ReadOnlyAgent
from controller_worker.security.assessment import find_risk
from deckhands.interop.openhands.trajectory_export import to_trajectory
from tests.controller_parts import call

Agent = type[LocAgent] | type[ReadOnlyAgent]

SPEC = AgentSpec(
    tools=(ToolOffer(key="deploy", name="deploy", parameters={"type": "object"}),), system_prompt_suffix="Be brief."
)


def called(agent: Agent, name: str, **arguments: Any) -> Event:
    (event,) = agent(SPEC).events_of(ModelReply(id=7, tool_calls=(call(name, json.dumps(arguments)),)))
    return event


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        (ReadOnlyAgent, ["think", "finish", "grep", "glob", "view"]),
        (LocAgent, ["finish", "search_code_snippets", "get_entity_contents", "explore_tree_structure"]),
    ],
)
def test_its_tools_are_the_originals(agent: Agent, names: list[str]) -> None:
    assert [tool.name for tool in agent(SPEC).tools] == names


@pytest.mark.parametrize(
    ("agent", "name", "arguments"),
    [
        (ReadOnlyAgent, "grep", {"pattern": "x"}),
        (
            ReadOnlyAgent,
            "grep",
            {"pattern": "x", "path": "src", "include": "*.py", "context": 2, "case_sensitive": True},
        ),
        (ReadOnlyAgent, "glob", {"pattern": "**/*.py", "path": "/workspace"}),
        (LocAgent, "explore_tree_structure", {"start_entities": ["."], "traversal_depth": 3}),
    ],
)
def test_a_call_becomes_a_question(agent: Agent, name: str, arguments: dict[str, Any]) -> None:
    action = called(agent, name, **arguments)
    assert isinstance(action, CodeSearchAction)
    assert (action.question, action.arguments, action.outcome) == (name, arguments, OutcomePolicy.IDEMPOTENT)
    assert find_risk(action, ConfirmationPolicy(mode="risky"), WorkspaceSpec()).risk is ActionSecurityRisk.LOW


def test_view_reads() -> None:
    action = called(ReadOnlyAgent, "view", path="/workspace/a.py", view_range=[1, 5])
    assert isinstance(action, FileReadAction)
    assert (action.path, action.view_range, action.impl_source) == ("/workspace/a.py", (1, 5), "oh_aci")


@pytest.mark.parametrize(
    ("agent", "name", "arguments", "told"),
    [
        (ReadOnlyAgent, "execute_bash", {"command": "ls"}, "Tool execute_bash is not registered"),
        (ReadOnlyAgent, "str_replace_editor", {"command": "ls"}, "Tool str_replace_editor is not registered"),
        (ReadOnlyAgent, "deploy", {"command": "ls"}, "Tool deploy is not registered"),
        (ReadOnlyAgent, "grep", {"path": "src"}, 'Missing required argument "pattern" in tool call grep'),
        (LocAgent, "get_entity_contents", {}, 'Missing required argument "entity_names"'),
        (LocAgent, "get_entity_contents", {"entity_names": ["a"], "depth": 1}, "Unexpected argument 'depth'"),
        (LocAgent, "deploy", {}, "Tool deploy is not registered"),
    ],
)
def test_other_calls_are_refused(agent: Agent, name: str, arguments: dict[str, Any], told: str) -> None:
    event = called(agent, name, **arguments)
    assert isinstance(event, ErrorObservation)
    assert event.content.startswith(told)


def test_trajectory_shows_a_question_as_the_originals_cell() -> None:
    action = CodeSearchAction(id=2, question="get_entity_contents", arguments={"entity_names": ["a.py:f"]})
    answer = CodeSearchObservation(id=3, cause=2, content="def f(): …", question="get_entity_contents")
    (asked, told), _ = to_trajectory([ConversationCreated(id=1, conversation_id="c"), action, answer])
    assert asked["action"] == "run_ipython"
    assert asked["args"]["code"] == "print(get_entity_contents(**{'entity_names': ['a.py:f']}))"
    assert (told["observation"], told["content"], told["cause"]) == ("run_ipython", "def f(): …", 0)
