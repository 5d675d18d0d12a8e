"""LocAgent: what its calls become, that it is given nothing else, and what others make of its questions."""

from __future__ import annotations

import json
from typing import Any

from broker.contract.code_search import CodeSearchAction, CodeSearchObservation
from broker.contract.events import (
    ActionSecurityRisk,
    AgentSpec,
    ConversationCreated,
    Event,
    ModelReply,
    ModelToolCall,
    WorkspaceSpec,
)
from broker.contract.observations import ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.tool_specs import OutcomePolicy, ToolOffer
from controller_worker.agents.read_only import LocAgent
from controller_worker.security.assessment import find_risk
from deckhands.interop.openhands.trajectory_export import to_trajectory

OFFER = ToolOffer(key="deploy", name="deploy", parameters={"type": "object"})


def called(name: str, **arguments: Any) -> Event:
    call = ModelToolCall(id="c1", name=name, arguments=json.dumps(arguments))
    (event,) = LocAgent(AgentSpec(tools=(OFFER,))).events_of(ModelReply(id=7, tool_calls=(call,)))
    return event


def test_its_tools_are_the_originals() -> None:
    names = [tool.name for tool in LocAgent(AgentSpec(tools=(OFFER,))).tools]
    assert names == ["finish", "search_code_snippets", "get_entity_contents", "explore_tree_structure"]


def test_a_call_becomes_a_question() -> None:
    action = called("explore_tree_structure", start_entities=["."], traversal_depth=3)
    assert isinstance(action, CodeSearchAction)
    assert (action.question, action.arguments) == (
        "explore_tree_structure",
        {"start_entities": ["."], "traversal_depth": 3},
    )
    assert find_risk(action, ConfirmationPolicy(mode="risky"), WorkspaceSpec()) is ActionSecurityRisk.LOW
    assert action.outcome is OutcomePolicy.IDEMPOTENT


def test_what_does_not_fit_is_told_to_the_model() -> None:
    for event, told in (
        (called("get_entity_contents"), 'Missing required argument "entity_names"'),
        (called("get_entity_contents", entity_names=["a"], depth=1), "Unexpected argument 'depth'"),
        (called("deploy"), "Tool deploy is not registered"),
    ):
        assert isinstance(event, ErrorObservation)
        assert event.content.startswith(told)


def test_trajectory_shows_it_as_the_originals_cell() -> None:
    action = CodeSearchAction(id=2, question="get_entity_contents", arguments={"entity_names": ["a.py:f"]})
    answer = CodeSearchObservation(id=3, cause=2, content="def f(): …", question="get_entity_contents")
    (asked, told), _ = to_trajectory([ConversationCreated(id=1, conversation_id="c"), action, answer])
    assert asked["action"] == "run_ipython"
    assert asked["args"]["code"] == "print(get_entity_contents(**{'entity_names': ['a.py:f']}))"
    assert (told["observation"], told["content"], told["cause"]) == ("run_ipython", "def f(): …", 0)
