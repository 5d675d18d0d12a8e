"""Read-only agents: ReadOnlyAgent reads and answers, LocAgent locates the code of a task (OpenHands 9.2, 9.3).

PlanningAgent: reads, asks, and proposes a plan for another agent; changes nothing itself.

Holds: they get no other tools, whatever the conversation offers, because other tools might change something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from broker.contract import (
    EXPLORE_TREE_STRUCTURE,
    GET_ENTITY_CONTENTS,
    GLOB,
    GREP,
    SEARCH_CODE_SNIPPETS,
    AgentFinishAction,
    AgentSpec,
    AgentThinkAction,
    ConfirmationStatus,
    Event,
    FileReadAction,
    FileReadSource,
    ModelReply,
    PlanAction,
    PlanSpec,
    TaskItem,
    TaskTrackingAction,
    ToolSpec,
    WorkspaceSpec,
    require_text,
)
from controller_worker.agents.agent import render_prompt
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.tool_calls import parse_reply


def make_view_action(arguments: Mapping[str, Any]) -> FileReadAction:
    """Return the view of a file or directory."""
    return FileReadAction(
        path=require_text(arguments, "path", "view"),
        impl_source=FileReadSource.OH_ACI,
        view_range=arguments.get("view_range"),
    )


VIEW = ToolSpec(
    name="view",
    description="Show a file with line numbers, or a directory two levels deep. Long output is cut.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "First and last line of a file, from 1; -1 as last: to the end.",
            },
        },
        "required": ["path"],
    },
    convert=make_view_action,
)


class OwnToolsOnly:
    """An agent with its own tools only; a subclass lists them and names its prompt."""

    prompt: ClassVar[str]
    own_tools: ClassVar[tuple[ToolSpec, ...]]

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._tools = tuple(
            make_finish_tool(spec.output) if tool is AgentFinishAction.tool_spec else tool for tool in self.own_tools
        )

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in order."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the system prompt."""
        return render_prompt(
            self.prompt, workspace=workspace, suffix=self._spec.system_prompt_suffix, **self._prompt_values()
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        return parse_reply(reply, self._tools, task_list)

    def _prompt_values(self) -> dict[str, Any]:
        """Return the values of the prompt besides workspace and suffix."""
        return {}


class ReadOnlyAgent(OwnToolsOnly):
    """The agent that only reads."""

    prompt = "readonly.j2"
    own_tools = (AgentThinkAction.tool_spec, AgentFinishAction.tool_spec, GREP, GLOB, VIEW)


class LocAgent(OwnToolsOnly):
    """The agent that locates code."""

    prompt = "loc.j2"
    own_tools = (AgentFinishAction.tool_spec, SEARCH_CODE_SNIPPETS, GET_ENTITY_CONTENTS, EXPLORE_TREE_STRUCTURE)


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
