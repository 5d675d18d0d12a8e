"""LongWorkAgent: CodeActAgent with a feature list, for work that takes more than one context.

Holds: a change or removal of a feature waits for a user. Everything else about the list is decided elsewhere
(`core.concerns.long_work`).
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import (
    FEATURES_FILE,
    INIT_SCRIPT,
    NOTES_FILE,
    ConfirmationStatus,
    Event,
    FeatureListAction,
    ModelReply,
    TaskItem,
    ToolSpec,
    WorkspaceSpec,
)
from controller_worker.agents.agent import render_prompt
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.tool_calls import parse_reply

NEEDS_APPROVAL = ("change", "remove")


class LongWorkAgent(CodeActAgent):
    """The agent for work over many contexts."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """See `Agent.tools`."""
        return (*super().tools, FeatureListAction.tool_spec)

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """See `Agent.system_prompt`."""
        how = render_prompt("long_work.j2", features=FEATURES_FILE, notes=NOTES_FILE, init=INIT_SCRIPT)
        return f"{super().system_prompt(workspace)}\n\n{how}"

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`; a change or removal of a feature waits for a user."""
        waits = {"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION}
        return [
            event.model_copy(update=waits)
            if isinstance(event, FeatureListAction) and event.command in NEEDS_APPROVAL
            else event
            for event in parse_reply(reply, self.tools, task_list)
        ]
