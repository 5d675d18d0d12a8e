"""Planning first: waits of a plan, the agent that continues after its acceptance, and the model's view then."""

import json
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, EventSource, LLMSpec
from broker.contract.observations import ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import PlanSpec
from broker.contract.task_list import PlanAcceptedObservation
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.agents.registry import create_agent
from controller_worker.core.concerns.planning import ProposedPlan
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.view import ViewFold
from tests.controller_parts import CID, Core, call, check_replay, started
from tests.scenarios import play, scenarios


def planning(*, needs_approval: bool = True, **options: Any) -> Core:
    plan = PlanSpec(needs_approval=needs_approval, llm=LLMSpec(model="acme/small"))
    return started(agent=AgentSpec(name="PlanningAgent", plan=plan, **options), headless=not needs_approval)


def propose(core: Core, *, beside: str = "") -> None:
    calls = [call(beside, '{"pattern": "till"}', "g1")] if beside else []
    core.reply(*calls, call("propose_plan", json.dumps({"plan": "1. Fix till.py"}), "p1"))


def is_of(core: Core, agent: str) -> None:
    assert core.state.setup.agent.name == agent


def play_plan(core: Core, scenario: str) -> Core:
    """Play a scenario; replay and the invariants of a log agree with it."""
    steps = {
        "plan": propose,
        "grep+plan": lambda core: propose(core, beside="grep"),
        "planner": lambda core: is_of(core, "PlanningAgent"),
        "executor": lambda core: is_of(core, "CodeActAgent"),
    }
    play(core, scenario, **steps)
    check_replay(core)
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []
    return core


@scenarios(
    {
        "a plan waits for a person and runs when confirmed": (
            "plan -> rest, states running awaiting_user_confirmation, user_confirmed -> model 2, executor, dispatched , "
            "trace 9: 10 ChangeState(user) user_confirmed; 11 PlanAction(agent); 12 SC user_confirmed; "
            "13 PlanAcceptedObservation(environment, cause 11); 14 SystemMessage(agent); 15 SC running"
        ),
        "a rejection sends the planner back to work": (
            "plan, user_rejected, say -> model 2, planner, plan, user_confirmed -> model 3, executor"
        ),
        "message instead of an answer continues planning": "plan, say -> model 2, planner",
        "a plan that was stopped is not accepted later": "plan, stopped, say -> model 2, planner",
    }
)
def test_plan_that_needs_approval(scenario: str) -> None:
    assert play_plan(planning(), scenario).state.plan == ProposedPlan()


def test_other_agent_continues_at_once_without_approval() -> None:
    core = play_plan(
        planning(needs_approval=False),
        "plan -> model 2, trace 6: 7 ModelReply(agent); 8 PlanAction(agent); "
        "9 PlanAcceptedObservation(environment, cause 8); 10 SystemMessage(agent), "
        "bash -> tools 12, ran 12, finish, states running finished",
    )
    assert core.event(9).content == "The plan was accepted. Carry it out now."  # type: ignore[attr-defined]
    agent = core.state.setup.agent
    assert (agent.name, agent.llm.model, agent.plan) == ("CodeActAgent", "acme/small", None)


def test_plan_changed_by_a_person_is_shown_in_its_version() -> None:
    core = play_plan(planning(), "plan")
    edited = {"plan": "1. Fix shop.py"}
    core.put(ChangeAgentStateAction(agent_state=AgentState.USER_CONFIRMED, edited=edited, source=EventSource.USER))
    core.run()
    play_plan(core, "executor")
    (accepted,) = [event for event in core.events if isinstance(event, PlanAcceptedObservation)]
    assert accepted.content.endswith("as it reads here:\n\n1. Fix shop.py")


def test_calls_beside_the_plan_are_still_done() -> None:
    play_plan(planning(needs_approval=False), "grep+plan -> tools 8, planner, ran 8 -> model 2, executor")


def test_the_planner_changes_nothing() -> None:
    core = planning(needs_approval=False, enable_jupyter=True, enable_delegation=True)
    names = [tool.name for tool in core.agent.tools]
    assert names == ["think", "grep", "glob", "view", "task_tracker", "propose_plan"]
    play(core, "bash(rm -rf /)")
    assert isinstance(core.events[-1], ErrorObservation)
    assert core.events[-1].content.startswith("Tool execute_bash is not registered")


@pytest.mark.parametrize("mode", ["always", "risky"])
def test_a_policy_for_actions_is_none_for_plans(mode: Any) -> None:
    core = planning(needs_approval=False, confirmation=ConfirmationPolicy(mode=mode))
    play_plan(core, "plan -> model 2, bash(rm -rf /) -> rest, states running awaiting_user_confirmation")


def test_model_sees_one_system_message_and_all_findings() -> None:
    core = play_plan(planning(needs_approval=False), "think, plan")
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
