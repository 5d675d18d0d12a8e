"""Observations: what came of an action (OpenHands section 3.3: names, fields, defaults, texts)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from broker.contract.actions import RecallType, TaskItem
from broker.contract.agent_state import AgentState
from broker.contract.events import JsonObject, Observation, Part
from broker.contract.notes import Note

MAX_COMMAND_OUTPUT_CHARS = 30_000
TRUNCATION_MARKER = "\n[... Observation truncated due to length ...]\n"


def truncate_content(text: str, max_chars: int | None) -> str:
    """Cut the middle of a text that is longer than `max_chars`, half of which is kept at each end (3.4)."""
    if max_chars is None or max_chars < 0 or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return text[:half] + TRUNCATION_MARKER + text[len(text) - half :]


class NullObservation(Observation):
    """Nothing to report."""

    kind: Literal["observation.null"] = "observation.null"


class SuccessObservation(Observation):
    """It worked, and there is nothing else to say."""

    kind: Literal["observation.success"] = "observation.success"


class ErrorObservation(Observation):
    """It did not work; the text is for the model."""

    kind: Literal["observation.error"] = "observation.error"
    error_id: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content


class UserRejectObservation(Observation):
    """A person refused the action."""

    kind: Literal["observation.user_rejected"] = "observation.user_rejected"


class AgentThinkObservation(Observation):
    """A thought was logged."""

    kind: Literal["observation.think"] = "observation.think"


class AgentCondensationObservation(Observation):
    """A summary in the place of forgotten events."""

    kind: Literal["observation.condense"] = "observation.condense"


class FinishRefusedObservation(Observation):
    """The agent said that it was done, and was not believed; the content tells it why.

    Attributes:
        reason: `output` when what it handed in does not fit its schema, `hook` when a hook forbade it; empty for
            whatever else.
    """

    kind: Literal["observation.finish_refused"] = "observation.finish_refused"
    reason: Literal["", "output", "hook"] = ""


class FinishVerdictObservation(Observation):
    """What a critic says of a finish; the content is its reason.

    Attributes:
        finish_id: the finish.
    """

    kind: Literal["observation.finish_verdict"] = "observation.finish_verdict"
    is_accepted: bool
    finish_id: int = 0

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"The critic {'accepts' if self.is_accepted else 'refuses'} the finish. {self.content}".strip()


class LoopDetectionObservation(Observation):
    """The agent repeats itself, or has been taken out of a loop; the content is for people.

    Attributes:
        advice: what the model is told, or empty.
        is_over: it has been taken out of the loop.
    """

    kind: Literal["observation.loop_detection"] = "observation.loop_detection"
    advice: str = ""
    is_over: bool = False

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content.partition("\n")[0]


class CmdOutputMetadata(Part):
    """What the shell's prompt said after a command. Exit code -1: still running."""

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
        """The text a model sees."""
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
        """One line for a person."""
        return f"Command `{self.command}` executed with exit code {self.exit_code}."


class IPythonRunCellObservation(Observation):
    """The output of a cell."""

    kind: Literal["observation.run_ipython"] = "observation.run_ipython"
    code: str
    image_urls: tuple[str, ...] | None = None


class BrowserOutputObservation(Observation):
    """What the browser shows."""

    kind: Literal["observation.browse"] = "observation.browse"
    url: str
    trigger_by_action: str
    screenshot: str = ""
    screenshot_path: str | None = None
    set_of_marks: str = ""
    error: bool = False
    goal_image_urls: tuple[str, ...] = ()
    open_pages_urls: tuple[str, ...] = ()
    active_page_index: int = -1
    dom_object: JsonObject = Field(default_factory=dict)
    axtree_object: JsonObject = Field(default_factory=dict)
    extra_element_properties: JsonObject = Field(default_factory=dict)
    last_browser_action: str = ""
    last_browser_action_error: str = ""
    focused_element_bid: str = ""
    filter_visible_only: bool = False

    @property
    def sentence(self) -> str:
        """One line for a person."""
        failure = f" ({self.last_browser_action_error})" if self.error else ""
        return f"The browser shows {self.url}{failure}"


class AgentDelegateObservation(Observation):
    """What a delegate brought back.

    Attributes:
        delegate_id: the action that asked for it; its cause too, unless that was answered when it was started.
        conversation_id: the conversation that the delegate is.
    """

    kind: Literal["observation.delegate"] = "observation.delegate"
    outputs: JsonObject = Field(default_factory=dict)
    delegate_id: int | None = None
    conversation_id: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content


class AgentStateChangedObservation(Observation):
    """The agent's state has changed.

    Attributes:
        reason: why, of an error; as OpenHands words it.
        code: the class of the error, lower_snake_case, or empty.
        action_id: the action that a person is asked to confirm.
    """

    kind: Literal["observation.agent_state_changed"] = "observation.agent_state_changed"
    agent_state: AgentState
    reason: str = ""
    code: str = ""
    action_id: int | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Agent state: {self.agent_state}" + (f" ({self.reason})" if self.reason else "")


class MicroagentKnowledge(Part):
    """A piece of knowledge and the word that called it up."""

    name: str
    trigger: str
    content: str


class RecallObservation(Observation):
    """What a recall found.

    Attributes:
        notes: of earlier conversations.
        unreadable_skills: the files of the workspace that are no skills though they should be, each with the reason.
    """

    kind: Literal["observation.recall"] = "observation.recall"
    recall_type: RecallType
    repo_name: str = ""
    repo_directory: str = ""
    repo_branch: str = ""
    repo_instructions: str = ""
    runtime_hosts: dict[str, int] = Field(default_factory=dict)
    additional_agent_instructions: str = ""
    date: str = ""
    custom_secrets_descriptions: dict[str, str] = Field(default_factory=dict)
    conversation_instructions: str = ""
    working_dir: str = ""
    microagent_knowledge: tuple[MicroagentKnowledge, ...] = ()
    notes: tuple[Note, ...] | None = None
    unreadable_skills: tuple[str, ...] | None = None


class SurveyObservation(Observation):
    """What a workspace tells agents.

    Attributes:
        content: a line for each file, see `broker.contract.skills`.
        is_complete: the command came to its end.
    """

    kind: Literal["observation.survey"] = "observation.survey"
    is_complete: bool = False

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Found {len(self.content.splitlines())} files with instructions"


class MCPObservation(Observation):
    """The answer of an MCP server's tool."""

    kind: Literal["observation.mcp"] = "observation.mcp"
    name: str
    arguments: JsonObject = Field(default_factory=dict)
    image_urls: tuple[str, ...] | None = None


class ToolCallObservation(Observation):
    """The answer of a function or class that a tool worker offers.

    Attributes:
        outputs: the answer as data, where it is more than a text.
    """

    kind: Literal["observation.call_tool"] = "observation.call_tool"
    name: str
    outputs: JsonObject = Field(default_factory=dict)
    image_urls: tuple[str, ...] | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"{self.name} answered."


class FileDownloadObservation(Observation):
    """A file the browser downloaded."""

    kind: Literal["observation.download"] = "observation.download"
    file_path: str

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Downloaded to {self.file_path}"


class TaskTrackingObservation(Observation):
    """The agent's task list."""

    kind: Literal["observation.task_tracking"] = "observation.task_tracking"
    command: str
    task_list: tuple[TaskItem, ...] = ()


class EventsLostObservation(Observation):
    """The store has lost events of this log; the content says so to people and to the model.

    Attributes:
        last_id: where the log ended when that was noticed.
        known_id: a lost event that somebody remembers; those before it, down to where the log ended, are lost too.
        noticed_by: who remembers it.
    """

    kind: Literal["observation.events_lost"] = "observation.events_lost"
    last_id: int
    known_id: int
    noticed_by: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content


class OutcomeUnknownObservation(Observation):
    """The worker that ran the action died, and nobody can say whether its effect took place."""

    kind: Literal["observation.outcome_unknown"] = "observation.outcome_unknown"

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content
