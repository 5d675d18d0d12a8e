"""What a person does in a conversation under way: changes what it is, runs a command beside the agent.

Holds: no step waits for such a command and no model sees it; the log has it, and its one observation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.agent_pairs import AgentKind
from broker.contract.events import Action, AgentSpec, Event, EventSource, Limits, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.labels import Labels
from broker.contract.policies import ConfirmationPolicy
from broker.contract.tool_specs import ToolOffer

DEFAULT_TIMEOUT_SECONDS = 120.0
MAX_TIMEOUT_SECONDS = 3600.0
MAX_COMMAND_CHARS = 100_000


class ConversationChanged(Event):
    """A part of what the conversation is has changed. What is None stays as it was.

    Attributes:
        agent: takes over from here on; it has its own system message if its name is another one.
        loop: `sdk` or `legacy`: the agent of the other kind takes over, with all else as it is; one that has no
            counterpart stays.
        confirmation: takes the place of the agent's policy; what a person is asked about now is still asked about.
        analyzer: takes the place of the policy's analyzer.
        limits: take the place of all limits.
        tools: are added to the agent's; one with the key of another takes its place.
        labels: take the place of all labels.
        by: who says so, in their own words; it proves nothing.
        reason: why.
    """

    kind: Literal["conversation.changed"] = "conversation.changed"
    is_shown_to_people: ClassVar[bool] = True
    agent: AgentSpec | None = None
    loop: AgentKind | None = None
    confirmation: ConfirmationPolicy | None = None
    analyzer: str | None = None
    limits: Limits | None = None
    tools: tuple[ToolOffer, ...] | None = None
    labels: Labels | None = None
    by: str | None = None
    reason: str | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        agent = f"the agent is {self.agent.name}" if self.agent else ""
        tools = f"tools are added: {', '.join(tool.key for tool in self.tools)}" if self.tools else ""
        loop = f"the loop is {self.loop}" if self.loop else ""
        what = (agent, loop, self._confirmation, self._limits, tools, self._labels)
        text = "; ".join(filter(None, what)) or "nothing has changed"
        text += f", by {self.by}" if self.by else ""
        return f"Changed: {text}" + (f" ({self.reason})" if self.reason else "")

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "bold"),)

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
    """Run a command for a person, in a separate shell.

    Attributes:
        timeout: seconds after which it is killed.
        by: who runs it, in their own words; it proves nothing.
        reason: why.

    Differs: it is no `runnable` action, because nothing of the agent's turn depends on it.
    """

    kind: Literal["action.execute"] = "action.execute"
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "A person runs: {command}"
    source: EventSource = EventSource.USER
    command: str
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    by: str | None = None
    reason: str | None = None

    def as_answer(self, observation: Observation) -> Observation:
        """See `Action.as_answer`; why it could not be run is for the person, and no model sees it."""
        if isinstance(observation, CommandExecutedObservation):
            return observation
        error_id = getattr(observation, "error_id", "") or "command_failed"
        changes = {"content": observation.content, "error_id": error_id, "unsandboxed": observation.unsandboxed}
        return CommandExecutedObservation(**changes)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.command, "bold", "You $ "),)


class CommandExecutedObservation(Observation):
    """The result of a person's command; the content is what it has written.

    Attributes:
        exit_code: -1 where it was killed or never began.
        error_id: the class of the error, if it could not be run; the content then says why.
    """

    kind: Literal["observation.execute"] = "observation.execute"
    agent_template: ClassVar[str] = ""
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "The person's command ended with exit code {exit_code}"
    exit_code: int = -1
    error_id: str = ""
