"""Actions: what an agent, a person or the environment wants done (OpenHands section 3.2: names, fields, defaults).

Holds: `runnable` says which actions a tool worker executes; each of those gets exactly one observation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from broker.contract.agent_state import AgentState
from broker.contract.events import Action, ActionSecurityRisk, ConfirmationStatus, EventSource, JsonObject, Part


class RecallType(StrEnum):
    """What a recall is for."""

    WORKSPACE_CONTEXT = "workspace_context"
    KNOWLEDGE = "knowledge"


class RiskyAction(Action):
    """An action with an estimate of its risk, and whether it may run.

    Attributes:
        replaces: the action that waited for a confirmation, of the copy that was confirmed or rejected.

    Differs: every runnable action has a confirmation state, because in the original the types without one ran before
    their confirmation and again after it.
    """

    runnable: ClassVar[bool] = True
    source: EventSource = EventSource.AGENT
    security_risk: ActionSecurityRisk = ActionSecurityRisk.UNKNOWN
    confirmation_state: ConfirmationStatus = ConfirmationStatus.CONFIRMED
    replaces: int | None = None
    timeout: float | None = None


class NullAction(Action):
    """Nothing to do."""

    kind: Literal["action.null"] = "action.null"


class MessageAction(Action):
    """Somebody says something."""

    kind: Literal["action.message"] = "action.message"
    content: str
    file_urls: tuple[str, ...] | None = None
    image_urls: tuple[str, ...] | None = None
    wait_for_response: bool = False
    security_risk: ActionSecurityRisk = ActionSecurityRisk.UNKNOWN

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content


class SystemMessageAction(Action):
    """The system prompt and the tools an agent starts with."""

    kind: Literal["action.system"] = "action.system"
    source: EventSource = EventSource.AGENT
    content: str
    tools: tuple[str, ...] | None = None
    agent_class: str | None = None
    version: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"System prompt of {self.agent_class} ({len(self.content)} characters, {len(self.tools or ())} tools)"


class CmdRunAction(RiskyAction):
    """Run a command in the conversation's shell, or type into the program running there."""

    kind: Literal["action.run"] = "action.run"
    command: str
    is_input: bool = False
    blocking: bool = False
    is_static: bool = False
    cwd: str | None = None
    hidden: bool = False

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Running command: {self.command}"


class IPythonRunCellAction(RiskyAction):
    """Run a cell in the conversation's IPython kernel."""

    kind: Literal["action.run_ipython"] = "action.run_ipython"
    code: str
    include_extra: bool = True
    kernel_init_code: str = ""


class BrowseURLAction(RiskyAction):
    """Open a page."""

    kind: Literal["action.browse"] = "action.browse"
    url: str
    return_axtree: bool = False


class BrowseInteractiveAction(RiskyAction):
    """Act in the browser."""

    kind: Literal["action.browse_interactive"] = "action.browse_interactive"
    browser_actions: str
    browsergym_send_msg_to_user: str = ""
    return_axtree: bool = False

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"In the browser: {self.browser_actions}"


class OfferedToolAction(RiskyAction):
    """Call a tool that is no part of the agent but was offered to it: one of `AgentSpec.tools`.

    Attributes:
        name: as the model called it.
        tool: key of the offer; empty where it is the name.
        fingerprint: of the offer that the model saw.
        pool: whose tool workers run it; empty: those that hold the conversation's workspace.
    """

    name: str
    arguments: JsonObject = Field(default_factory=dict)
    tool: str = ""
    fingerprint: str = ""
    pool: str = ""

    @property
    def pool_wanted(self) -> str:
        """See `Event.pool_wanted`."""
        return self.pool

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Calling {self.tool or self.name}"


class ToolCallAction(OfferedToolAction):
    """Call a function or class that a tool worker offers."""

    kind: Literal["action.call_tool"] = "action.call_tool"


class MCPAction(OfferedToolAction):
    """Call a tool of an MCP server."""

    kind: Literal["action.call_tool_mcp"] = "action.call_tool_mcp"


class AgentThinkAction(Action):
    """Think, and have the thought logged."""

    kind: Literal["action.think"] = "action.think"
    source: EventSource = EventSource.AGENT

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Thinking: {self.thought}"


class AgentFinishAction(Action):
    """The agent is done."""

    kind: Literal["action.finish"] = "action.finish"
    source: EventSource = EventSource.AGENT
    final_thought: str = ""
    outputs: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.final_thought or self.thought or "All done."


class AgentRejectAction(Action):
    """The agent will not or cannot do it."""

    kind: Literal["action.reject"] = "action.reject"
    source: EventSource = EventSource.AGENT
    outputs: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        reason = self.outputs.get("reason", self.thought)
        return f"Task is rejected by the agent. {reason}".strip()


class AgentDelegateAction(Action):
    """Hand a task to another agent.

    Attributes:
        inputs: `task` says what is to be done.
        background: go on at once; the result is told when it is there.
        join: of several in one turn, whether the next step waits for all of them or for any.
    """

    kind: Literal["action.delegate"] = "action.delegate"
    source: EventSource = EventSource.AGENT
    agent: str
    inputs: JsonObject = Field(default_factory=dict)
    background: bool = False
    join: Literal["all", "any"] = "all"

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Delegating to {self.agent}: {self.inputs.get('task', '')}"


class RecallAction(Action):
    """Look up what is known about the workspace or about a message."""

    kind: Literal["action.recall"] = "action.recall"
    source: EventSource = EventSource.USER
    recall_type: RecallType
    query: str = ""


class SurveyAction(Action):
    """Read what the workspace tells agents: AGENTS.md, skills and the like. It changes nothing."""

    kind: Literal["action.survey"] = "action.survey"
    runnable: ClassVar[bool] = True


class ChangeAgentStateAction(Action):
    """Ask the agent to change its state: pause, resume, stop, confirm, reject.

    Attributes:
        action_id: the action that is confirmed or rejected; None: whichever is asked about.
        edited: fields of that action that are to run with other values.
    """

    kind: Literal["action.change_agent_state"] = "action.change_agent_state"
    agent_state: AgentState
    action_id: int | None = None
    edited: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Asked to be {self.agent_state}"


class CondensationAction(Action):
    """Forget events, given as a list of ids or as an inclusive range, and put a summary in their place.

    Raises:
        ValueError: neither or both forms of forgetting are given, or a summary without its place.
    """

    kind: Literal["action.condensation"] = "action.condensation"
    source: EventSource = EventSource.AGENT
    forgotten_event_ids: tuple[int, ...] | None = None
    forgotten_events_start_id: int | None = None
    forgotten_events_end_id: int | None = None
    summary: str | None = None
    summary_offset: int | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> CondensationAction:
        has_range = self.forgotten_events_start_id is not None and self.forgotten_events_end_id is not None
        has_half_range = (self.forgotten_events_start_id is None) != (self.forgotten_events_end_id is None)
        if has_half_range or (self.forgotten_event_ids is not None) == has_range:
            raise ValueError("Give either forgotten_event_ids or both ends of the forgotten range.")
        if (self.summary is None) != (self.summary_offset is None):
            raise ValueError("Give summary and summary_offset together or not at all.")
        return self

    @property
    def forgotten(self) -> tuple[int, ...]:
        """The ids of the forgotten events."""
        if self.forgotten_event_ids is not None:
            return self.forgotten_event_ids
        assert self.forgotten_events_start_id is not None
        assert self.forgotten_events_end_id is not None
        return tuple(range(self.forgotten_events_start_id, self.forgotten_events_end_id + 1))

    @property
    def sentence(self) -> str:
        """One line for a person."""
        place = "; a summary stands in their place" if self.summary is not None else ""
        return f"{len(self.forgotten)} events are no longer shown to the model{place}"


class CondensationRequestAction(Action):
    """Ask for a condensation before the next step."""

    kind: Literal["action.condensation_request"] = "action.condensation_request"
    source: EventSource = EventSource.AGENT

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return "Asked for a condensation"


class TaskItem(Part):
    """One entry of the agent's task list."""

    id: str
    title: str
    status: Literal["todo", "in_progress", "done"] = "todo"
    notes: str = ""


class TaskTrackingAction(Action):
    """View or replace the agent's task list."""

    kind: Literal["action.task_tracking"] = "action.task_tracking"
    source: EventSource = EventSource.AGENT
    command: str = "view"
    task_list: tuple[TaskItem, ...] = ()


class LoopRecoveryAction(Action):
    """Choose how to get out of a loop: 1 restart before it, 2 restart with the last message, 3 stop."""

    kind: Literal["action.loop_recovery"] = "action.loop_recovery"
    option: int = 1
