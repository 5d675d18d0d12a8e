"""The setup of a conversation: its agent, workspace, limits, tenant and parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.contract import (
    AgentSpec,
    ConversationChanged,
    ConversationCreated,
    Limits,
    McpAddress,
    ModelSwitched,
    Parent,
    PlanAcceptedObservation,
    SurveyObservation,
    Tenancy,
    ToolOffer,
    WorkspaceSpec,
    legacy_of,
    sdk_of,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns.planning import is_handed_over, make_executor

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class Setup:
    """The content of the first event, and the later changes of agent and model.

    Attributes:
        parent: the parent of a delegate; none at `delegate_level` 0.
        forked_at: the last event that a fork shares with its origin; 0 for none.
        pinned_version: the only version of workers that may continue it; empty for any.
        rollout: the exact tokens of its replies are recorded.
        mcp_servers: MCP servers of this conversation alone; the survey lists their tools.
        skills: sources of skills for the workspace; the survey installs them.
        chosen_id: the event in which a user chose the current agent; 0 for the first event, and for a plan.
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
    chosen_id: int = 0
    pinned_version: str = ""
    rollout: bool = False
    mcp_servers: dict[str, McpAddress] = field(default_factory=dict)
    skills: tuple[str, ...] = ()


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
        pinned_version=created.pinned_version or "",
        rollout=bool(created.rollout),
        mcp_servers=created.mcp_servers or {},
        skills=created.skills or (),
    )


def _after_switch(setup: Setup, switch: ModelSwitched, state: State) -> Setup:
    llm = setup.agent.llm.model_copy(update={"model": switch.model})
    return evolve(setup, agent=setup.agent.model_copy(update={"llm": llm}))


def apply_agent_change(change: ConversationChanged, agent: AgentSpec) -> AgentSpec:
    """Return the agent after a change of the agent, its policy or its tools."""
    agent = change.agent or agent
    if change.loop is None:
        return agent
    return agent.model_copy(update={"name": sdk_of(agent.name) if change.loop == "sdk" else legacy_of(agent.name)})


def _after_change(setup: Setup, change: ConversationChanged, state: State) -> Setup:
    agent = apply_agent_change(change, setup.agent)
    policy = change.confirmation or agent.confirmation
    if change.analyzer is not None:
        policy = policy.model_copy(update={"analyzer": change.analyzer})
    if change.tools is not None:
        agent = _with_tools(agent, change.tools)
    if policy is not agent.confirmation:
        agent = agent.model_copy(update={"confirmation": policy})
    chosen_id = setup.chosen_id if change.agent is None and change.loop is None else change.id
    return evolve(setup, agent=agent, limits=change.limits or setup.limits, chosen_id=chosen_id)


def _after_survey(setup: Setup, answer: SurveyObservation, state: State) -> Setup:
    if not answer.tools or answer.cause != state.survey.action_id:
        return setup
    return evolve(setup, agent=_with_tools(setup.agent, answer.tools))


def _with_tools(agent: AgentSpec, tools: tuple[ToolOffer, ...]) -> AgentSpec:
    added = {offer.key for offer in tools}
    kept = tuple(offer for offer in agent.tools if offer.key not in added)
    return agent.model_copy(update={"tools": (*kept, *tools)})


def _after_plan(setup: Setup, accepted: PlanAcceptedObservation, state: State) -> Setup:
    if not is_handed_over(state, accepted):
        return setup
    return evolve(setup, agent=make_executor(setup.agent), chosen_id=0)


SETUP = Concern(
    "setup",
    {
        ConversationCreated: _after_creation,
        ConversationChanged: _after_change,
        SurveyObservation: _after_survey,
        ModelSwitched: _after_switch,
        PlanAcceptedObservation: _after_plan,
    },
)
