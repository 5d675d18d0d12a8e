"""A user's interventions in a running conversation: configuration changes, labels, and commands beside the agent.

Producers attach labels to conversations to find them again.

Holds: no step waits for such a command and no model sees it. The log contains the command and its one observation.
Names and values of labels are short, plain ASCII, and safe in a command line, a file name and a key.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, WithJsonSchema

from broker.contract.agent_factory import AgentKind
from broker.contract.events import Action, AgentSpec, Event, EventSource, Limits, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.policies import ConfirmationPolicy
from broker.contract.tool_specs import ToolOffer

MAX_LABELS = 32
LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.:/@+-]{0,126}[A-Za-z0-9])?)?")


def validate_labels(labels: dict[str, str]) -> dict[str, str]:
    """Validate labels and return them.

    Raises:
        ValueError: there are too many, or one is invalid; the text names it.
    """
    if len(labels) > MAX_LABELS:
        raise ValueError(f"there are {len(labels)} labels; the limit is {MAX_LABELS}")
    for name, value in labels.items():
        if LABEL_NAME.fullmatch(name) is None:
            raise ValueError(f"{ascii(name)[:100]} is not a valid name of a label")
        if LABEL_VALUE.fullmatch(value) is None:
            raise ValueError(f"{ascii(value)[:100]} is not a valid value of the label {name}")
    return labels


Labels = Annotated[
    dict[str, str],
    AfterValidator(validate_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LABELS,
            "propertyNames": {"pattern": f"^{LABEL_NAME.pattern}$"},
            "additionalProperties": {"type": "string", "pattern": f"^{LABEL_VALUE.pattern}$"},
        }
    ),
]
"""At most 32 labels; names have 1 to 64 characters, values 0 to 128."""


DEFAULT_TIMEOUT_SECONDS = 120.0
MAX_TIMEOUT_SECONDS = 3600.0
MAX_COMMAND_CHARS = 100_000


class ConfirmationReminder(Event):
    """A question about an action still has no answer. Webhooks can send it.

    Attributes:
        action_id: the action that waits for a confirmation.
        deadline: when the policy's default takes effect; None: never.
    """

    kind: Literal["conversation.confirmation_reminder"] = "conversation.confirmation_reminder"
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "Action {action_id} still waits for a confirmation"
    action_id: int
    deadline: datetime | None = None


class ConversationChanged(Event):
    """The configuration of the conversation has changed. Fields that are None are unchanged.

    Attributes:
        agent: the new agent. It gets its own system message if its name differs.
        loop: `sdk` or `legacy`: the counterpart of the agent with that kind of loop takes over, with all other settings
            unchanged. An agent without a counterpart stays.
        confirmation: replaces the agent's policy. A pending confirmation stays pending.
        analyzer: replaces the policy's analyzer.
        limits: replace all limits.
        tools: added to the agent's tools; a tool with an existing key replaces that tool.
        labels: replace all labels.
        title: the name for listings.
        by: the author as given by the client; not authenticated.
        reason: the author's reason.
    """

    kind: Literal["conversation.changed"] = "conversation.changed"
    is_shown_to_users: ClassVar[bool] = True
    agent: AgentSpec | None = None
    loop: AgentKind | None = None
    confirmation: ConfirmationPolicy | None = None
    analyzer: str | None = None
    limits: Limits | None = None
    tools: tuple[ToolOffer, ...] | None = None
    labels: Labels | None = None
    title: str | None = None
    by: str | None = None
    reason: str | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        agent = f"the agent is {self.agent.name}" if self.agent else ""
        tools = f"tools are added: {', '.join(tool.key for tool in self.tools)}" if self.tools else ""
        loop = f"the loop is {self.loop}" if self.loop else ""
        title = f"the title is {self.title}" if self.title else ""
        what = (agent, loop, self._confirmation, self._limits, tools, self._labels, title)
        text = "; ".join(filter(None, what)) or "nothing has changed"
        text += f", by {self.by}" if self.by else ""
        return f"Changed: {text}" + (f" ({self.reason})" if self.reason else "")

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "user"),)

    @property
    def _confirmation(self) -> str:
        mode = f"confirmation is {self.confirmation.mode}" if self.confirmation else ""
        return "; ".join(filter(None, (mode, f"risks are judged by {self.analyzer}" if self.analyzer else "")))

    @property
    def _limits(self) -> str:
        if self.limits is None:
            return ""
        return "limits: " + ", ".join(f"{name}={value}" for name, value in self.limits if value is not None)

    @property
    def _labels(self) -> str:
        if self.labels is None:
            return ""
        return "labels: " + (", ".join(f"{name}={value}" for name, value in sorted(self.labels.items())) or "none")


class ExecuteCommandAction(Action):
    """Run a user's command in a separate shell.

    Attributes:
        timeout: the time limit in seconds, after which the command is killed.
        by: the user as given by the client; not authenticated.
        reason: the user's reason.

    Differs: it is not `runnable`, because nothing in the agent's turn depends on it.
    """

    kind: Literal["action.execute"] = "action.execute"
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "A user runs: {command}"
    source: EventSource = EventSource.USER
    command: str
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    by: str | None = None
    reason: str | None = None

    def to_answer(self, observation: Observation) -> Observation:
        """See `Action.to_answer`; an error text is for the user, and no model sees it."""
        if isinstance(observation, CommandExecutedObservation):
            return observation
        error_id = getattr(observation, "error_id", "") or "command_failed"
        changes = {"content": observation.content, "error_id": error_id, "unsandboxed": observation.unsandboxed}
        return CommandExecutedObservation(**changes)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.command, "user", "You $ "),)


class CommandExecutedObservation(Observation):
    """The result of a user's command; the content is its output.

    Attributes:
        exit_code: -1 if it was killed or did not start.
        error_id: the class of the error if the command could not be run; the content is then the reason.
    """

    kind: Literal["observation.execute"] = "observation.execute"
    agent_template: ClassVar[str] = ""
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "The user's command ended with exit code {exit_code}"
    exit_code: int = -1
    error_id: str = ""
