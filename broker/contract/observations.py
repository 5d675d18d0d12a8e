"""Observations: the results of actions (OpenHands section 3.3: names, fields, defaults, texts)."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from broker.contract.agent_state import AgentState
from broker.contract.error_texts import add_remedy, find_error_remedy, is_error_key, render_error
from broker.contract.events import EventValue, JsonObject, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.tool_specs import ToolOffer
from broker.runtime import format_count

MAX_COMMAND_OUTPUT_CHARS = 30_000
TRUNCATION_MARKER = "\n[... Observation truncated due to length ...]\n"

_NORMAL_NOTES = re.compile(
    r"The command completed with exit code|The command runs in the background|Terminal: "
    r"|The (?:whole output|first \d+ bytes of the output) \("
)
_ADVICE = re.compile(r" You may wait longer to see .*", re.DOTALL)
"""What the shell tells the model to do next."""


def truncate_content(text: str, max_chars: int | None) -> str:
    """Cut the middle of a text longer than `max_chars`; half of `max_chars` is kept at each end (3.4)."""
    if max_chars is None or max_chars < 0 or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return text[:half] + TRUNCATION_MARKER + text[len(text) - half :]


class NullObservation(Observation):
    """Nothing to report."""

    kind: Literal["observation.null"] = "observation.null"
    agent_template: ClassVar[str] = ""
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False


class SuccessObservation(Observation):
    """Success without further output."""

    kind: Literal["observation.success"] = "observation.success"
    agent_template: ClassVar[str] = ""
    is_decided: ClassVar[bool] = True


class ErrorObservation(Observation):
    """A failure; the text is for the model."""

    kind: Literal["observation.error"] = "observation.error"
    agent_template: ClassVar[str] = "{content}\n[Error occurred in processing last action]"
    is_problem: ClassVar[bool] = True
    is_decided: ClassVar[bool] = True
    sentence_template: ClassVar[str] = "{content}"
    error_id: str = ""


class UserRejectObservation(Observation):
    """A user rejected the action."""

    kind: Literal["observation.user_rejected"] = "observation.user_rejected"
    agent_template: ClassVar[str] = "OBSERVATION:\n{content}\n[Last action has been rejected by the user]"
    is_decided: ClassVar[bool] = True


class AgentThinkObservation(Observation):
    """A thought was logged."""

    kind: Literal["observation.think"] = "observation.think"


class AgentCondensationObservation(Observation):
    """A summary in place of forgotten events."""

    kind: Literal["observation.condense"] = "observation.condense"


class FinishRefusedObservation(Observation):
    """The agent's finish was refused; the content tells the agent why.

    Attributes:
        reason: `output` if the result does not match its schema, `hook` if a hook forbade it; else empty.
    """

    kind: Literal["observation.finish_refused"] = "observation.finish_refused"
    is_decided: ClassVar[bool] = True
    reason: Literal["", "output", "hook"] = ""


class FinishVerdictObservation(Observation):
    """A critic's verdict on a finish; the content is its reason.

    Attributes:
        finish_id: the finish.
    """

    kind: Literal["observation.finish_verdict"] = "observation.finish_verdict"
    is_decided: ClassVar[bool] = True
    is_accepted: bool
    finish_id: int = 0

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"The critic {'accepts' if self.is_accepted else 'refuses'} the finish. {self.content}".strip()

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        return "" if self.is_accepted else f"Your finish was judged:\n{self.content}"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "success" if self.is_accepted else "problem", "  "),)


class LoopDetectionObservation(Observation):
    """The agent is in a loop, or has left one; the content is for users.

    Attributes:
        advice: the text for the model, or empty.
        is_over: the agent was taken out of the loop.
    """

    kind: Literal["observation.loop_detection"] = "observation.loop_detection"
    agent_template: ClassVar[str] = "{advice}"
    is_problem: ClassVar[bool] = True
    is_decided: ClassVar[bool] = True
    advice: str = ""
    is_over: bool = False

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return self.content.partition("\n")[0]


class CmdOutputMetadata(EventValue):
    """The shell prompt's report after a command. Exit code -1 if still running."""

    exit_code: int = -1
    pid: int = -1
    username: str | None = None
    hostname: str | None = None
    working_dir: str | None = None
    py_interpreter_path: str | None = None
    prefix: str = ""
    suffix: str = ""


class CmdOutputObservation(Observation):
    """The output of a command, cut to 30,000 characters unless hidden."""

    kind: Literal["observation.run"] = "observation.run"
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    command: str
    metadata: CmdOutputMetadata = CmdOutputMetadata()
    hidden: bool = False

    @model_validator(mode="before")
    @classmethod
    def _cut(cls, fields: Any) -> Any:
        content = fields.get("content", "") if isinstance(fields, dict) else ""
        if not isinstance(content, str) or len(content) <= MAX_COMMAND_OUTPUT_CHARS or fields.get("hidden"):
            return fields
        return fields | {"content": truncate_content(content, MAX_COMMAND_OUTPUT_CHARS)}

    @property
    def exit_code(self) -> int:
        """The command's exit code; -1 while it runs."""
        return self.metadata.exit_code

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        meta = self.metadata
        text = f"{meta.prefix}{self.content}{meta.suffix}"
        if meta.working_dir:
            text += f"\n[Current working directory: {meta.working_dir}]"
        if meta.py_interpreter_path:
            text += f"\n[Python interpreter: {meta.py_interpreter_path}]"
        if meta.exit_code != -1:
            text += f"\n[Command finished with exit code {meta.exit_code}]"
        return text

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        if self.explanation and self.exit_code == -1:
            return f"Command `{self.command}`: {self.explanation}"
        return f"Command `{self.command}` executed with exit code {self.exit_code}."

    @property
    def explanation(self) -> str:
        """Why the command did not simply run to its end: it timed out, was cancelled, was not run; empty if it did.

        The shell's notes for the model, without its advice.
        """
        notes = self.metadata.suffix.strip().removeprefix("[").removesuffix("]").split("]\n[")
        shown = (_ADVICE.sub("", note) for note in notes if not _NORMAL_NOTES.match(note))
        return "\n".join(re.sub(r"^Your ", "The ", note) for note in shown if note)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        failed = "" if self.exit_code in (0, -1) else f"exit code {self.exit_code}"
        return (
            Paragraph(self.content, "detail", "  "),
            Paragraph(self.explanation, "problem", "  "),
            Paragraph(failed, "problem", "  "),
        )


class AgentDelegateObservation(Observation):
    """The result of a delegate.

    Attributes:
        delegate_id: the action that started it. It is also the cause, unless the action was already answered when the
            delegate started.
        conversation_id: the delegate's conversation.
    """

    kind: Literal["observation.delegate"] = "observation.delegate"
    is_decided: ClassVar[bool] = True
    sentence_template: ClassVar[str] = "{content}"
    outputs: JsonObject = Field(default_factory=dict)
    delegate_id: int | None = None
    conversation_id: str = ""

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        return str(self.outputs.get("content") or self.content)


class AgentStateChangedObservation(Observation):
    """The agent's state has changed.

    Attributes:
        reason: the reason for an error, in OpenHands' words.
        code: the class of the error, lower_snake_case, or empty.
        action_id: the action that awaits confirmation.
    """

    kind: Literal["observation.agent_state_changed"] = "observation.agent_state_changed"
    agent_template: ClassVar[str] = ""
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    agent_state: AgentState
    reason: str = ""
    code: str = ""
    action_id: int | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Agent state: {self.agent_state}" + (f" ({render_error(self.reason)})" if self.reason else "")

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`; the states of a normal run are not shown."""
        if self.agent_state is AgentState.ERROR:
            reason = render_error(self.reason) or "The agent stopped with an error."
            remedy = find_error_remedy(self.reason, self.code) if is_error_key(self.reason) else ""
            return (Paragraph(add_remedy(reason, remedy), "problem", "! "),)
        if self.agent_state in (AgentState.RUNNING, AgentState.FINISHED, AgentState.REJECTED):
            return ()
        return (Paragraph(f"({self.agent_state.value.replace('_', ' ')})", "detail"),)


class SurveyObservation(Observation):
    """The instructions and skills found in a workspace.

    Attributes:
        content: a line for each file, see `broker.contract.skills`.
        is_complete: the command ran to its end.
        scripts: the repository's own scripts that exist, see `broker.contract.skills`.
        tools: the tools of the MCP servers of this conversation; None for none.
        failure: why a server or a skill of the task cannot be used; empty if all can.
        failure_code: the code of the error; empty for that of a server.
        left_out: why skills of the task, or servers of skills, cannot be used; None if all can.
        has_installed: skills of the task were installed; None if not.
    """

    kind: Literal["observation.survey"] = "observation.survey"
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
    is_complete: bool = False
    scripts: tuple[str, ...] = ()
    tools: tuple[ToolOffer, ...] | None = None
    failure: str = ""
    failure_code: str = ""
    left_out: tuple[str, ...] | None = None
    has_installed: Literal[True] | None = None

    @property
    def workspace_use(self) -> WorkspaceUse:  # type: ignore[override]  # of other kinds, that of the class
        """Whether it changed files of the workspace."""
        return WorkspaceUse.CHANGED if self.has_installed else WorkspaceUse.NONE

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Found {format_count(len(self.content.splitlines()), 'file')} with instructions"


class MCPObservation(Observation):
    """The result of an MCP server's tool."""

    kind: Literal["observation.mcp"] = "observation.mcp"
    name: str
    arguments: JsonObject = Field(default_factory=dict)
    image_urls: tuple[str, ...] | None = None


class ServerQuestion(EventValue):
    """One question of an MCP server to the user.

    Attributes:
        fields: the JSON Schema of the form; None for an address to visit.
        url: the address that the user is asked to visit, or empty.
    """

    key: str
    message: str
    fields: JsonObject | None = None
    url: str = ""

    def render(self, server: str) -> str:
        """Return the question for users.

        Each line starts with the server's name, so that the text cannot imitate another source.
        """
        said = self.message.split("\n")
        if self.fields is not None:
            said.append(f"Fields: {json.dumps(self.fields, ensure_ascii=False)}")
        elif self.url:
            said.append(f"Visit {urlsplit(self.url).hostname}: {self.url}")
        return "\n".join(f"{server}: {line}" for line in said)


class MCPQuestionObservation(Observation):
    """An MCP server asks the user something before it answers a call. Users and the model read the content.

    The controller then asks for a confirmation of the call, and the answer goes back to the server.
    """

    kind: Literal["observation.mcp_question"] = "observation.mcp_question"
    counts_for_loops: ClassVar[bool] = False
    name: str
    questions: tuple[ServerQuestion, ...] = ()


class ToolCallObservation(Observation):
    """The result of a function or class that a tool worker offers.

    Attributes:
        outputs: the result as data, if it is more than a text.
    """

    kind: Literal["observation.call_tool"] = "observation.call_tool"
    sentence_template: ClassVar[str] = "{name} answered."
    name: str
    outputs: JsonObject = Field(default_factory=dict)
    image_urls: tuple[str, ...] | None = None


class EventsLostObservation(Observation):
    """The store has lost events of this log. The content reports it to users and to the model.

    Attributes:
        last_id: the last event in the log when the loss was detected.
        known_id: the latest lost event that a worker remembers. All events after `last_id` up to this one are lost.
        noticed_by: the worker that remembers it.
    """

    kind: Literal["observation.events_lost"] = "observation.events_lost"
    sentence_template: ClassVar[str] = "{content}"
    last_id: int
    known_id: int
    noticed_by: str = ""


class OutcomeUnknownObservation(Observation):
    """The worker that ran the action died. Whether the action took effect is unknown."""

    kind: Literal["observation.outcome_unknown"] = "observation.outcome_unknown"
    is_problem: ClassVar[bool] = True
    sentence_template: ClassVar[str] = "{content}"
