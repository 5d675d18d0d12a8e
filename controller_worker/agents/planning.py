"""PlanningAgent: reads, asks, and proposes a plan for another agent; changes nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker.contract import (
    GLOB,
    GREP,
    AgentSpec,
    AgentThinkAction,
    ConfirmationStatus,
    Event,
    ModelReply,
    PlanAction,
    PlanSpec,
    TaskItem,
    TaskTrackingAction,
)
from controller_worker.agents.read_only import VIEW, OwnToolsOnly


class PlanningAgent(OwnToolsOnly):
    """The agent that plans. If the task has a structured output, the executor returns it."""

    prompt = "planning.j2"
    own_tools = (AgentThinkAction.tool_spec, GREP, GLOB, VIEW, TaskTrackingAction.tool_spec, PlanAction.tool_spec)

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self._plan = spec.plan or PlanSpec()

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`; a plan waits for a user if it must be confirmed."""
        waits = ConfirmationStatus.AWAITING_CONFIRMATION if self._plan.needs_approval else ConfirmationStatus.CONFIRMED
        return [
            event.model_copy(update={"confirmation_state": waits}) if isinstance(event, PlanAction) else event
            for event in super().events_of(reply, task_list)
        ]

    def _prompt_values(self) -> dict[str, Any]:
        return {"needs_approval": self._plan.needs_approval}
