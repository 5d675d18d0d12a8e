"""A command that a person runs in a workspace beside the agent.

Holds: no step waits for it and no model sees it; the log has it, and its one observation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.events import Action, EventSource, Observation, WorkspaceUse
from broker.contract.paragraphs import Paragraph

DEFAULT_TIMEOUT_SECONDS = 120.0
MAX_TIMEOUT_SECONDS = 3600.0
MAX_COMMAND_CHARS = 100_000


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
