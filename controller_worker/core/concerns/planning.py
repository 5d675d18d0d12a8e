"""Planning: a plan that waits to be accepted, the agent that carries it out, and the agents' task list.

A planning agent proposes a plan by an action. If a user must agree, that action waits like any other confirmation; a
rejection, or a message instead of an answer, sends the planning agent back to work. The controller itself settles an
accepted plan. From that observation on, the conversation's agent is the executor of the plan. The log, the workspace
and the limits stay; the tools and the system message change.

Holds: pure. A plan is accepted once. The executor decides all later events, also in a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.contract import (
    AgentSpec,
    Observation,
    PlanAcceptedObservation,
    PlanAction,
    PlanSpec,
    TaskItem,
    TaskTrackingAction,
)
from controller_worker.core.concern import Concern
from controller_worker.core.effects import Append

if TYPE_CHECKING:
    from controller_worker.core.state import State

ACCEPTED = "The plan was accepted. Carry it out now."
ACCEPTED_WITH_CHANGES = "The plan was accepted with changes. Carry it out now as it reads here:\n\n{plan}"


@dataclass(frozen=True)
class ProposedPlan:
    """The plan under discussion, 0 for none, and whether a user has changed it."""

    action_id: int = 0
    text: str = ""
    is_edited: bool = False


@dataclass(frozen=True)
class TaskList:
    """The items of the task list, in the agent's order, as last written."""

    items: tuple[TaskItem, ...] = ()


def _after_action(plan: ProposedPlan, action: PlanAction, state: State) -> ProposedPlan:
    """Record the plan under discussion. If the user confirmed an edited copy, it counts as edited."""
    return ProposedPlan(action.id, action.plan, action.replaces is not None and action.plan != plan.text)


def _after_observation(plan: ProposedPlan, observation: Observation, state: State) -> ProposedPlan:
    return ProposedPlan() if 0 != plan.action_id == observation.cause else plan


def _after_tracking(tasks: TaskList, action: TaskTrackingAction, state: State) -> TaskList:
    return TaskList(action.task_list) if action.command == "plan" else tasks


def is_handed_over(state: State, observation: Observation) -> bool:
    """Return whether the plan under discussion is accepted, so that another agent takes over."""
    return isinstance(observation, PlanAcceptedObservation) and observation.cause == state.plan.action_id


def select_up_to_plan(state: State, ready: tuple[int, ...]) -> tuple[int, ...]:
    """Return the actions that may run now: those before the plan; once these are answered, only the plan."""
    if state.plan.action_id not in ready:
        return ready
    place = ready.index(state.plan.action_id)
    return ready[:place] or ready[:1]


def accept_plan(state: State) -> Append:
    """Return the events that settle an accepted plan."""
    plan = state.plan
    settled = next(pending for pending in state.tools.pending if pending.id == plan.action_id)
    observation = PlanAcceptedObservation(
        content=ACCEPTED_WITH_CHANGES.format(plan=plan.text) if plan.is_edited else ACCEPTED,
        agent=make_executor(state.setup.agent).name,
        cause=plan.action_id,
        tool_call_metadata=settled.tool_call_metadata,
    )
    return Append((observation,), answers=((0, plan.action_id),))


def make_executor(agent: AgentSpec) -> AgentSpec:
    """Return the agent that executes a planning agent's plan: the same specification under another name."""
    plan = agent.plan or PlanSpec()
    return agent.model_copy(update={"name": plan.executor, "llm": plan.llm or agent.llm, "plan": None})


PLAN = Concern("plan", {PlanAction: _after_action, Observation: _after_observation})
TASK_LIST = Concern("tasks", {TaskTrackingAction: _after_tracking})
