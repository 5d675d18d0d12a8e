"""Points of a conversation, and the initial state of a fork."""

from __future__ import annotations

import pytest

from broker.contract.events import (
    AgentSpec,
    ConversationCreated,
    LLMSpec,
    ModelSwitched,
    Parent,
    WorkspaceSpec,
    with_id,
)
from broker.contract.specs import PlanSpec
from broker.runtime.errors import UsageError
from deckhands.client.forking import ForkPoint, build_fork, copy_events
from deckhands.client.steering import to_model_switch
from tests.controller_parts import said


def test_a_point_is_a_conversation_and_perhaps_an_event() -> None:
    assert ForkPoint.parse("abc") == ForkPoint("abc", None)
    assert ForkPoint.parse("abc@12") == ForkPoint("abc", 12)


@pytest.mark.parametrize("text", ["abc@", "abc@0", "abc@x", "abc@-1", "abc@1.5", "abc@٣"])
def test_invalid_event_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an event"):
        ForkPoint.parse(text)


def test_a_point_behind_the_end_is_refused() -> None:
    events = [with_id(said("a"), 1), with_id(said("b"), 2)]
    assert ForkPoint("abc", 1).events_until(events) == events[:1]
    assert ForkPoint("abc").events_until(events) == events
    with pytest.raises(UsageError, match="has 2 events; there is no event 3"):
        ForkPoint("abc", 3).events_until(events)


def test_fork_equals_its_origin_except_for_requested_changes() -> None:
    agent = AgentSpec(llm=LLMSpec(model="acme/small", temperature=0.5), tool_concurrency=3)
    created = ConversationCreated(
        conversation_id="abc",
        agent=agent,
        title="Fix it",
        workspace=WorkspaceSpec(path="/a"),
        parent=Parent(conversation_id="above", delegate_id=8),
    )
    events = [with_id(created, 1), with_id(said("a"), 2)]
    plain = build_fork(events, "new")
    assert (plain.conversation_id, plain.forked_from, plain.title) == ("new", "abc@2", "Fix it @2")
    assert (plain.agent, plain.workspace, plain.parent) == (agent, created.workspace, None)
    other = build_fork(events[:1], "new", model="acme/large", workspace=WorkspaceSpec(), title="Another try")
    assert (other.agent.llm, other.agent.tool_concurrency) == (LLMSpec(model="acme/large"), 3)
    assert (other.forked_from, other.title, other.workspace) == ("abc@1", "Another try", WorkspaceSpec())


def test_changed_model_applies_to_the_plan_executor_too() -> None:
    agent = AgentSpec(name="PlanningAgent", plan=PlanSpec(executor="LocAgent", llm=LLMSpec(model="acme/tiny")))
    events = [
        with_id(ConversationCreated(conversation_id="abc", agent=agent), 1),
        with_id(said("a"), 2),
        with_id(ModelSwitched(model="acme/small"), 3),
    ]
    other = build_fork(events, "new", model="acme/large")
    assert other.agent.plan == PlanSpec(executor="LocAgent")
    assert copy_events(events, model="acme/large") == [events[1], ModelSwitched(id=3, model="acme/large")]
    assert copy_events(events) == events[1:]
    assert build_fork(events, "new").agent == agent


def test_a_model_is_switched_only_if_one_is_named() -> None:
    assert to_model_switch(None) == to_model_switch("") == ()
    (switch,) = to_model_switch("acme/small", by="ann", reason="cheaper")
    assert (switch.model, switch.by, switch.reason) == ("acme/small", "ann", "cheaper")
