"""What a conversation is: its agent, workspace, limits and tenant, and whose delegate it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.contract.events import (
    AgentSpec,
    ConversationCreated,
    Limits,
    ModelSwitched,
    Parent,
    Tenancy,
    WorkspaceSpec,
)
from broker.contract.planning import PlanAcceptedObservation
from controller_worker.concerns.planning import executor_of, is_handed_over
from controller_worker.core.concern import Concern, evolve

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class Setup:
    """What the first event says, and the agent and model that have taken over since.

    Attributes:
        parent: whose delegate the conversation is; at `delegate_level` 0 nobody's.
        forked_at: the last event that a fork shares with the conversation it was made from; 0 for none.
    """

    conversation_id: str = ""
    agent: AgentSpec = AgentSpec()
    workspace: WorkspaceSpec = WorkspaceSpec()
    limits: Limits = Limits()
    tenancy: Tenancy = Tenancy()
    headless: bool = True
    parent: Parent | None = None
    delegate_level: int = 0
    forked_at: int = 0


def _after_creation(setup: Setup, created: ConversationCreated, state: State) -> Setup:
    if created.id > 1:
        return setup
    return Setup(
        conversation_id=created.conversation_id,
        agent=created.agent,
        workspace=created.workspace,
        limits=created.limits,
        tenancy=created.tenancy or setup.tenancy,
        headless=created.headless,
        parent=created.parent,
        delegate_level=created.parent.level if created.parent else 0,
        forked_at=created.forked_at,
    )


def _after_switch(setup: Setup, switch: ModelSwitched, state: State) -> Setup:
    llm = setup.agent.llm.model_copy(update={"model": switch.model})
    return evolve(setup, agent=setup.agent.model_copy(update={"llm": llm}))


def _after_plan(setup: Setup, accepted: PlanAcceptedObservation, state: State) -> Setup:
    return evolve(setup, agent=executor_of(setup.agent)) if is_handed_over(state, accepted) else setup


SETUP = Concern(
    "setup",
    {ConversationCreated: _after_creation, ModelSwitched: _after_switch, PlanAcceptedObservation: _after_plan},
)
