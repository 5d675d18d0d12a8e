"""PlanningAgent: looks, asks, and proposes a plan that another agent carries out; changes nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from broker.actions import TaskItem
from broker.events import AgentSpec, ConfirmationStatus, Event, ModelReply, WorkspaceSpec
from broker.planning import PlanAction
from broker.specs import PlanSpec
from broker.tool_specs import ToolSpec
from controller_worker.agents.prompt import rendered
from controller_worker.agents.searching import GLOB, GREP, VIEW
from controller_worker.agents.task_list import TASK_TRACKER
from controller_worker.agents.tool_calls import events_of_reply
from controller_worker.agents.tool_schemas import PROPOSE_PLAN, THINK


class PlanningAgent:
    """The agent that plans. It is given no other tools, whatever it was offered: they might change something."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._plan = spec.plan or PlanSpec()
        self._tools = (THINK, GREP, GLOB, VIEW, TASK_TRACKER, PROPOSE_PLAN)
        self._tool_names = frozenset(tool.name for tool in self._tools)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the text a conversation begins with."""
        return rendered(
            "planning.j2",
            workspace=workspace,
            needs_approval=self._plan.needs_approval,
            suffix=self._spec.system_prompt_suffix,
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        waits = ConfirmationStatus.AWAITING_CONFIRMATION if self._plan.needs_approval else ConfirmationStatus.CONFIRMED
        return [
            event.model_copy(update={"confirmation_state": waits}) if isinstance(event, PlanAction) else event
            for event in events_of_reply(reply, self._tool_names, task_list=task_list)
        ]
