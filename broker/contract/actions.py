"""Actions: requests of an agent, a user or the environment (OpenHands section 3.2: names, fields, defaults).

Holds: a tool worker executes the actions that are `runnable`; each of those gets exactly one observation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import handles_requests
from broker.contract.events import (
    Action,
    ActionSecurityRisk,
    AgentSpec,
    ConfirmationStatus,
    Event,
    EventSource,
    JsonObject,
    Observation,
)
from broker.contract.kinds import Paragraph
from broker.contract.observations import AgentThinkObservation, ServerQuestion
from broker.contract.timing import MessagePolicy
from broker.contract.tool_arguments import (
    ToolCallError,
    parse_message,
    parse_optional_name,
    parse_risk,
    parse_seconds,
    require_text,
)
from broker.contract.tool_specs import (
    DELEGATE,
    EXECUTE_BASH,
    FINISH,
    REQUEST_CONDENSATION,
    THINK,
    McpAddress,
    ToolSpec,
)
from broker.runtime import format_count

MAX_AGENT_NAME_CHARS = 1_000
"""The limit for a delegate's name as a model writes it. The command of an ACP agent is a name, too."""
THOUGHT_LOGGED = "Your thought has been logged."
WAYS_OUT = {
    1: "restart before it and wait for a message (wait)",
    2: "restart before it and continue (go-on)",
    3: "stop (stop)",
}
"""The options of a loop recovery, described for users, each with its command-line name."""


class RiskyAction(Action):
    """An action with an estimate of its risk and a confirmation state.

    Attributes:
        security_risk: -1 unknown, 0 low, 1 medium, 2 high.
        confirmation_state: the action runs if this is `confirmed`.
        timeout: its time limit in seconds; None for the tool's own limit.
        replaces: set on the confirmed or rejected copy: the action that waited for a confirmation.

    Differs: every runnable action has a confirmation state. In the original, types without one ran before their
    confirmation and again after it.
    """

    runnable: ClassVar[bool] = True
    is_decided: ClassVar[bool] = True
    source: EventSource = EventSource.AGENT
    security_risk: ActionSecurityRisk = ActionSecurityRisk.UNKNOWN
    confirmation_state: ConfirmationStatus = ConfirmationStatus.CONFIRMED
    replaces: int | None = None
    timeout: float | None = None


class NullAction(Action):
    """No operation."""

    kind: Literal["action.null"] = "action.null"
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False


class MessageAction(Action):
    """A message from a user or an agent.

    Attributes:
        image_urls: images, as addresses or data URLs.
        wait_for_response: whether an agent's message waits for an answer.
        double_texting: its effect if it arrives while the agent works; None for the conversation's policy.
    """

    kind: Literal["action.message"] = "action.message"
    sentence_template: ClassVar[str] = "{content}"
    content: str
    file_urls: tuple[str, ...] | None = None
    image_urls: tuple[str, ...] | None = None
    wait_for_response: bool = False
    double_texting: MessagePolicy | None = None
    security_risk: ActionSecurityRisk = ActionSecurityRisk.UNKNOWN

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        by_person = self.source is EventSource.USER
        return (Paragraph(self.content, "user", "You: ") if by_person else Paragraph(self.content, mark="Agent: "),)


class SystemMessageAction(Action):
    """The system prompt and the initial tools of an agent."""

    kind: Literal["action.system"] = "action.system"
    is_decided: ClassVar[bool] = True
    is_shown_to_users: ClassVar[bool] = False
    source: EventSource = EventSource.AGENT
    content: str
    tools: tuple[str, ...] | None = None
    agent_class: str | None = None
    version: str = ""

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        tools = format_count(len(self.tools or ()), "tool")
        return f"System prompt of {self.agent_class} ({format_count(len(self.content), 'character')}, {tools})"


class CmdRunAction(RiskyAction):
    """Run a command in the conversation's shell, or send input to the running program.

    Attributes:
        is_input: send the command as input to the running program.
        blocking: do not answer on silence; wait until the command has ended.
        is_static: run it in a separate shell that exits with it.
        cwd: the working directory; None for the shell's current one.
        hidden: the model does not see it.
        terminal: the name of another shell; None for the conversation's own.
        is_background: answer soon and let the command run; it gets a terminal if none is named.
        control: manage terminals instead of running a command: `list`, `kill` or `reset`.
    """

    kind: Literal["action.run"] = "action.run"
    tool_spec: ClassVar[ToolSpec] = EXECUTE_BASH
    enabled_by: ClassVar[str] = "enable_cmd"
    sentence_template: ClassVar[str] = "Running command: {command}"
    user_template: ClassVar[str] = "User executed the command:\n{command}"
    command: str
    is_input: bool = False
    blocking: bool = False
    is_static: bool = False
    cwd: str | None = None
    hidden: bool = False
    # Unused fields are left out of the log, so that its bytes are the same as before the fields existed.
    terminal: str | None = None
    is_background: bool | None = None
    control: Literal["list", "kill", "reset"] | None = None

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`."""
        timeout = parse_seconds(arguments, "timeout")
        is_input = arguments.get("is_input")
        control = arguments.get("control") or None
        if control is None or "command" in arguments:
            require_text(arguments, "command", EXECUTE_BASH.name)
        return cls(
            command="" if control else arguments["command"],
            terminal=parse_optional_name(arguments, "terminal", EXECUTE_BASH.name),
            is_background=True if arguments.get("is_background") in (True, "true") else None,
            control=control,
            # Differs: a JSON true is accepted too, because a model that writes it does not mean a new command.
            is_input=is_input is True or is_input == "true",
            timeout=timeout,
            blocking=timeout is not None,
            security_risk=parse_risk(arguments),
        )

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(self._command_line, "action", "< " if self.is_input else "$ "))

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(self._command_line, "action", "  < " if self.is_input else "  $ "),)

    @property
    def _command_line(self) -> str:
        """The command, plus where and how it runs if not in the conversation's own shell."""
        what = f"({self.control} terminals)" if self.control == "list" else f"({self.control})" * bool(self.control)
        where = f"[{self.terminal}] " if self.terminal else ""
        return f"{where}{self.command}{what}{' &' * bool(self.is_background)}"


class AgentThinkAction(Action):
    """Log a thought."""

    kind: Literal["action.think"] = "action.think"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = THINK
    enabled_by: ClassVar[str] = "enable_think"
    sentence_template: ClassVar[str] = "Thinking: {thought}"
    source: EventSource = EventSource.AGENT

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; an empty thought is accepted, as in the original."""
        return cls(thought=parse_message(arguments, "thought", THINK.name))

    def answer(self, task_list: Sequence[Any]) -> Observation:  # noqa: ARG002
        """See `Action.answer`."""
        return AgentThinkObservation(content=THOUGHT_LOGGED)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought, "detail"),)


class AgentFinishAction(Action):
    """The agent has finished."""

    kind: Literal["action.finish"] = "action.finish"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = FINISH
    enabled_by: ClassVar[str] = "enable_finish"
    source: EventSource = EventSource.AGENT
    final_thought: str = ""
    outputs: JsonObject = Field(default_factory=dict)

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; the final message may be empty, as in the original."""
        return cls(final_thought=parse_message(arguments, "message", FINISH.name))

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return self.final_thought or self.thought or "All done."

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "success"),)


class AgentRejectAction(Action):
    """The agent refuses the task or cannot do it."""

    kind: Literal["action.reject"] = "action.reject"
    is_decided: ClassVar[bool] = True
    source: EventSource = EventSource.AGENT
    outputs: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        reason = self.outputs.get("reason", self.thought)
        return f"Task is rejected by the agent. {reason}".strip()

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "problem"),)


class AgentDelegateAction(Action):
    """Delegate a task to another agent.

    Attributes:
        inputs: `task` holds the task text.
        background: continue at once; the model reads the result when it is ready.
        join: whether the next step waits for all delegates of one turn or for any of them.
    """

    kind: Literal["action.delegate"] = "action.delegate"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = DELEGATE
    enabled_by: ClassVar[str] = "enable_delegation"
    source: EventSource = EventSource.AGENT
    agent: str
    inputs: JsonObject = Field(default_factory=dict)
    background: bool = False
    join: Literal["all", "any"] = "all"

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Delegating to {self.agent}: {self.inputs.get('task', '')}"

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`."""
        agent = require_text(arguments, "agent", DELEGATE.name)
        if len(agent) > MAX_AGENT_NAME_CHARS:
            raise ToolCallError(
                f"Invalid argument 'agent' in tool call {DELEGATE.name}: the name has {len(agent):,} characters; "
                f"the limit is {MAX_AGENT_NAME_CHARS:,}. Name an agent, and say the rest in `task`."
            )
        return cls(
            agent=agent,
            inputs={"task": require_text(arguments, "task", DELEGATE.name)},
            background=arguments.get("background", False),
            join=arguments.get("join", "all"),
        )


class ChangeAgentStateAction(Action):
    """Request a change of the agent's state: pause, resume, stop, confirm, reject.

    Attributes:
        action_id: the action that is confirmed or rejected; None for the one that awaits confirmation.
        edited: fields of that action to replace before it runs.
        reason: the reason. After a rejection, the agent reads it and continues.
        is_interrupt: for a pause: also stop running actions.
    """

    kind: Literal["action.change_agent_state"] = "action.change_agent_state"
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "Asked to be {agent_state}"
    agent_state: AgentState
    action_id: int | None = None
    edited: JsonObject = Field(default_factory=dict)
    reason: str | None = None
    is_interrupt: bool | None = None

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(f"{self.sentence}: {self.reason}" if self.reason else self.sentence, "detail"),)


class CondensationAction(Action):
    """Replace events by a summary. The events are a list of ids or an inclusive range.

    Raises:
        ValueError: neither or both forms are given, or a summary has no position.
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
        """A one-line summary for users."""
        place = "; a summary replaces them" if self.summary is not None else ""
        are = "is" if len(self.forgotten) == 1 else "are"
        return f"{format_count(len(self.forgotten), 'event')} {are} no longer shown to the model{place}"


class CondensationRequestAction(Action):
    """Request a condensation before the next step."""

    kind: Literal["action.condensation_request"] = "action.condensation_request"
    is_decided: ClassVar[bool] = True
    counts_for_loops: ClassVar[bool] = False
    tool_spec: ClassVar[ToolSpec] = REQUEST_CONDENSATION
    enabled_by: ClassVar[str] = "enable_condensation_request"
    sentence_template: ClassVar[str] = "Asked for a condensation"
    source: EventSource = EventSource.AGENT

    @classmethod
    def is_offered(cls, agent: AgentSpec) -> bool:
        """See `Action.is_offered`; requires a condenser that handles requests."""
        return super().is_offered(agent) and handles_requests(agent.condenser)

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:  # noqa: ARG003  (it has none)
        """See `Action.from_call`."""
        return cls()


class OfferedToolAction(RiskyAction):
    """Call a tool that is not part of the agent but was offered to it: one of `AgentSpec.tools`.

    Attributes:
        name: the name in the model's call.
        tool: the key of the offer; empty if equal to the name.
        fingerprint: the fingerprint of the offer that the model saw.
        pool: the pool of the tool workers that run it; empty for those that hold the conversation's workspace.
    """

    name: str
    arguments: JsonObject = Field(default_factory=dict)
    tool: str = ""
    fingerprint: str = ""
    pool: str = ""

    @property
    def required_pool(self) -> str:
        """See `Event.required_pool`."""
        return self.pool

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Calling {self.tool or self.name}"

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(f"{self.sentence} {json.dumps(self.arguments, indent=2)}", "action", "  "),)


class ToolCallAction(OfferedToolAction):
    """Call a function or class that a tool worker offers."""

    kind: Literal["action.call_tool"] = "action.call_tool"


class MCPAction(OfferedToolAction):
    """Call a tool of an MCP server.

    Attributes:
        asks: the call that the server answered with questions for the user; this action continues it.
        answers: the user's answers, by the names of the fields.
        questions: the server's questions, if this action asks the user.
        server: the server, if it belongs to this conversation alone.
    """

    answered_by: ClassVar[tuple[str, ...]] = ("observation.mcp", "observation.mcp_question")

    kind: Literal["action.call_tool_mcp"] = "action.call_tool_mcp"
    asks: int | None = None
    answers: JsonObject | None = None
    questions: tuple[ServerQuestion, ...] = ()
    server: McpAddress | None = None

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        server = (self.tool or self.name).partition("/")[0]
        asked = (Paragraph(question.render(server), "action", "  ") for question in self.questions)
        return (*super().confirmation_paragraphs, *asked)


def asks_for_server(action: Event) -> bool:
    """Return whether an action that awaits confirmation is a question from an MCP server."""
    return isinstance(action, MCPAction) and action.asks is not None


class LoopRecoveryAction(Action):
    """Choose a way out of a loop: 1 restart before it, 2 restart with the last message, 3 stop."""

    kind: Literal["action.loop_recovery"] = "action.loop_recovery"
    counts_for_loops: ClassVar[bool] = False
    option: int = 1

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(WAYS_OUT.get(self.option, "there is no such way"), "user", "Out of the loop: "),)
