"""Planning first: what a plan waits for, who continues when it is accepted, and what the model is then shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, EventSource, LLMSpec, ModelToolCall
from broker.contract.observations import ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import PlanSpec
from broker.contract.task_list import PlanAcceptedObservation
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.agents.registry import create_agent
from controller_worker.core.concerns.planning import ProposedPlan
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.loop.replay import replay
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.view import ViewFold
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started

PLAN = "1. Fix till.py"


def propose(plan: str = PLAN) -> ModelToolCall:
    return call("propose_plan", json.dumps({"plan": plan}), "p1")


def planning(*, needs_approval: bool = True, **options: Any) -> Core:
    plan = PlanSpec(needs_approval=needs_approval, llm=LLMSpec(model="acme/small"))
    return started(agent=AgentSpec(name="PlanningAgent", plan=plan, **options), headless=not needs_approval)


def answer_with(core: Core, state: str, **edited: Any) -> Effect:
    core.put(ChangeAgentStateAction(agent_state=AgentState(state), edited=edited, source=EventSource.USER))
    return core.run()


def accepted(core: Core) -> PlanAcceptedObservation:
    (found,) = [event for event in core.events if isinstance(event, PlanAcceptedObservation)]
    return found


def is_sound(core: Core) -> bool:
    """Say whether a snapshot at every event, a replay and the rules of a log agree with what happened."""
    check_snapshots(core)
    replayed = replay(core.events)
    assert replayed.divergence is None, replayed.divergence.to_diff()
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []
    return True


def test_other_agent_continues_at_once_without_approval() -> None:
    core = planning(needs_approval=False)
    assert core.reply(propose()) == CallModel(2, 1)
    assert core.trace(after=6) == [
        "7 ModelReply(agent)",
        "8 PlanAction(agent)",
        "9 PlanAcceptedObservation(environment, cause 8)",
        "10 SystemMessage(agent)",
    ]
    assert (core.state.setup.agent.name, core.state.setup.agent.llm.model, core.state.setup.agent.plan) == (
        "CodeActAgent",
        "acme/small",
        None,
    )
    assert core.reply(bash()) == AwaitTools((12,))
    core.observe(12)
    core.reply(finish())
    assert core.state.lifecycle.agent_state is AgentState.FINISHED
    assert is_sound(core)


def test_plan_waits_for_a_person_and_runs_when_confirmed() -> None:
    core = planning()
    assert core.reply(propose()) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"
    assert answer_with(core, "user_confirmed") == CallModel(2, 1)
    assert core.trace(after=9) == [
        "10 ChangeState(user) user_confirmed",
        "11 PlanAction(agent)",
        "12 SC user_confirmed",
        "13 PlanAcceptedObservation(environment, cause 11)",
        "14 SystemMessage(agent)",
        "15 SC running",
    ]
    assert accepted(core).content == "The plan was accepted. Carry it out now."
    assert core.dispatched == []
    assert is_sound(core)


def test_plan_changed_by_a_person_is_shown_in_its_version() -> None:
    core = planning()
    core.reply(propose())
    answer_with(core, "user_confirmed", plan="1. Fix shop.py")
    assert accepted(core).content.endswith("as it reads here:\n\n1. Fix shop.py")
    assert is_sound(core)


def test_a_rejection_sends_the_planner_back_to_work() -> None:
    core = planning()
    core.reply(propose())
    answer_with(core, "user_rejected")
    assert core.states()[-1] == "awaiting_user_input"
    core.say("Smaller, please")
    assert core.run() == CallModel(2, 1)
    assert core.state.setup.agent.name == "PlanningAgent"
    core.reply(propose("1. Fix one line"))
    assert answer_with(core, "user_confirmed") == CallModel(3, 1)
    assert core.state.setup.agent.name == "CodeActAgent"
    assert core.state.plan == ProposedPlan()
    assert is_sound(core)


def test_message_instead_of_an_answer_continues_planning() -> None:
    core = planning()
    core.reply(propose())
    core.say("What about the tests?")
    assert core.run() == CallModel(2, 1)
    assert (core.state.setup.agent.name, core.state.plan) == ("PlanningAgent", ProposedPlan())
    assert is_sound(core)


def test_a_plan_that_was_stopped_is_not_accepted_later() -> None:
    core = planning()
    core.reply(propose())
    core.ask("stopped")
    core.run()
    assert core.state.lifecycle.agent_state is AgentState.STOPPED
    core.say("Continue")
    assert core.run() == CallModel(2, 1)
    assert (core.state.setup.agent.name, core.state.plan) == ("PlanningAgent", ProposedPlan())
    assert is_sound(core)


def test_what_is_pending_besides_the_plan_is_still_done() -> None:
    core = planning(needs_approval=False)
    grep = call("grep", '{"pattern": "till"}', "g1")
    assert core.reply(grep, propose()) == AwaitTools((8,))
    assert core.state.setup.agent.name == "PlanningAgent"
    assert core.observe(8) == CallModel(2, 1)
    assert core.state.setup.agent.name == "CodeActAgent"
    assert is_sound(core)


def test_the_planner_changes_nothing() -> None:
    core = planning(needs_approval=False, enable_jupyter=True, enable_delegation=True)
    names = [tool.name for tool in core.agent.tools]
    assert names == ["think", "grep", "glob", "view", "task_tracker", "propose_plan"]
    core.reply(bash("rm -rf /"))
    assert isinstance(core.events[-1], ErrorObservation)
    assert core.events[-1].content.startswith("Tool execute_bash is not registered")


@pytest.mark.parametrize("mode", ["always", "risky"])
def test_a_policy_for_actions_is_none_for_plans(mode: Any) -> None:
    core = planning(needs_approval=False, confirmation=ConfirmationPolicy(mode=mode))
    assert core.reply(propose()) == CallModel(2, 1)
    assert core.reply(bash("rm -rf /")) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"


def test_model_sees_one_system_message_and_all_findings() -> None:
    core = planning(needs_approval=False)
    core.reply(call("think", '{"thought": "hm"}', "t1"))
    core.reply(propose())
    view, memory = ViewFold(), ConversationMemory()
    for event in core.events:
        view.add(event)
    for event in view.list_events(view.view().events):
        memory.add(event)
    messages = memory.messages()
    assert [message.role for message in messages] == ["system", "user", "user", *["assistant", "tool"] * 2]
    greeted = [event for event in core.events if isinstance(event, SystemMessageAction)]
    assert [event.agent_class for event in greeted] == ["PlanningAgent", "CodeActAgent"]
    assert messages[0].content[0].text == greeted[1].content  # type: ignore[union-attr]


def test_missing_executor_is_refused_before_planning() -> None:
    with pytest.raises(UsageError, match="no agent named 'Nobody'"):
        create_agent(AgentSpec(name="PlanningAgent", plan=PlanSpec(executor="Nobody")))
