"""Planning before acting: a plan that waits to be accepted, and the agent that takes over with it.

A planning agent proposes a plan by an action. Where a person has to agree, that action waits like any other that is to
be confirmed; a rejection, or a message in the place of an answer, sends the planning agent back to work. An accepted
plan is settled by the controller itself, and with that observation the conversation's agent is the one that carries the
plan out: same log, same workspace, same limits, other tools and another system message.

Holds: pure; a plan is accepted once; what comes after it in the log is decided by the other agent, in a replay too.
"""

from __future__ import annotations

from broker.events import AgentSpec, Observation
from broker.planning import PlanAcceptedObservation, PlanAction
from broker.specs import PlanSpec
from controller_worker.effects import Append
from controller_worker.state import Plan, State, replace

ACCEPTED = "The plan was accepted. Carry it out now."
ACCEPTED_WITH_CHANGES = "The plan was accepted with changes. Carry it out now as it reads here:\n\n{plan}"


def with_plan(state: State, action: PlanAction) -> State:
    """Take note of the plan that is under discussion; a copy that was confirmed may read otherwise."""
    is_edited = action.replaces is not None and action.plan != state.plan.text
    return replace(state, plan=Plan(action.id, action.plan, is_edited))


def up_to_plan(state: State, ready: tuple[int, ...]) -> tuple[int, ...]:
    """Return which actions may run now: those before the plan, or the plan alone once they are answered."""
    if state.plan.action_id not in ready:
        return ready
    place = ready.index(state.plan.action_id)
    return ready[:place] or ready[:1]


def accepted(state: State) -> Append:
    """Return what settles a plan that nobody objects to any more."""
    plan = state.plan
    settled = next(pending for pending in state.pending if pending.id == plan.action_id)
    observation = PlanAcceptedObservation(
        content=ACCEPTED_WITH_CHANGES.format(plan=plan.text) if plan.is_edited else ACCEPTED,
        agent=executor_of(state.agent).name,
        cause=plan.action_id,
        tool_call_metadata=settled.tool_call_metadata,
    )
    return Append((observation,), answers=((0, plan.action_id),))


def after_answer(state: State, observation: Observation) -> State:
    """Hand over to the agent that carries an accepted plan out; a plan that was dropped is forgotten."""
    state = replace(state, plan=Plan())
    if not isinstance(observation, PlanAcceptedObservation):
        return state
    return replace(state, agent=executor_of(state.agent), has_system_message=False)


def executor_of(agent: AgentSpec) -> AgentSpec:
    """Return who carries out what a planning agent has planned: the same specification under another name."""
    plan = agent.plan or PlanSpec()
    return agent.model_copy(update={"name": plan.executor, "llm": plan.llm or agent.llm, "plan": None})
