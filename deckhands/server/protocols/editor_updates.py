"""Events of a conversation as session updates for an editor (the Agent Client Protocol).

Holds: a tool call has the id of its action, and its status follows the log; an edit includes its diff.
Does not: show pieces of replies; each text is sent whole, with its event.
"""

from __future__ import annotations

from typing import Any, Literal

import acp
from acp.schema import FileEditToolCallContent, ToolCallUpdate

from broker.contract import (
    AgentFinishAction,
    AgentRejectAction,
    AgentThinkAction,
    CmdOutputObservation,
    CmdRunAction,
    ConfirmationStatus,
    Event,
    EventSource,
    FileEditAction,
    FileReadAction,
    FileWriteAction,
    MessageAction,
    Observation,
    RiskyAction,
)

Kind = Literal["read", "edit", "execute", "other"]
Status = Literal["pending", "in_progress", "completed", "failed"]
Update = Any
"""One of the many classes of `acp.schema` for a `session/update`."""
MAX_OUTPUT_CHARS = 20_000
MAX_TITLE_CHARS = 300
KINDS: tuple[tuple[tuple[type[Event], ...], Kind], ...] = (
    ((FileReadAction,), "read"),
    ((FileEditAction, FileWriteAction), "edit"),
    ((CmdRunAction,), "execute"),
)


class SessionUpdates:
    """The session updates of one conversation, event by event."""

    def __init__(self) -> None:
        self._calls: dict[int, str] = {}

    def of(self, event: Event, *, is_replayed: bool = False) -> list[Update]:
        """Return the updates for the next event.

        Args:
            is_replayed: the event is from an earlier conversation; also show the user's messages.
        """
        match event:
            case MessageAction(source=EventSource.USER):
                return [acp.update_user_message_text(event.content)] if is_replayed else []
            case MessageAction():
                return _message_updates(event.content)
            case AgentFinishAction():
                return _message_updates(event.final_thought or event.thought)
            case AgentRejectAction():
                return _message_updates(str(event.outputs.get("reason", "")) or event.thought)
            case AgentThinkAction():
                return [acp.update_agent_thought_text(event.thought)] if event.thought else []
            case RiskyAction(source=EventSource.AGENT):
                return self._of_action(event)
            case Observation() if event.cause in self._calls:
                status: Status = "failed" if event.is_problem else "completed"
                text = event.content[:MAX_OUTPUT_CHARS]
                if isinstance(event, CmdOutputObservation) and event.explanation:
                    text = f"{text}\n{event.explanation[:MAX_OUTPUT_CHARS]}".lstrip("\n")
                content = [acp.tool_content(acp.text_block(text))]
                return [acp.update_tool_call(self._calls[event.cause], status=status, content=content)]
        return []

    def _of_action(self, action: RiskyAction) -> list[Update]:
        """Return the tool call of an action. The confirmed or rejected copy of an action is the same call."""
        if action.replaces in self._calls:
            call = self._calls.pop(action.replaces)
            if action.confirmation_state is ConfirmationStatus.REJECTED:
                return [acp.update_tool_call(call, status="failed")]
            self._calls[action.id] = call
            return [acp.update_tool_call(call, title=title_of(action), status="in_progress")]
        call = self._calls[action.id] = str(action.id)
        is_asked = action.confirmation_state is ConfirmationStatus.AWAITING_CONFIRMATION
        status: Status = "pending" if is_asked else "in_progress"
        thought = getattr(action, "thought", "")
        return [
            *([acp.update_agent_thought_text(thought)] if thought else []),
            acp.start_tool_call(call, title_of(action), kind=kind_of(action), status=status, content=diff_of(action)),
        ]


def confirmation_call(action: RiskyAction) -> ToolCallUpdate:
    """Return the tool call that awaits confirmation."""
    return ToolCallUpdate(
        tool_call_id=str(action.id),
        title=title_of(action),
        kind=kind_of(action),
        status="pending",
        content=diff_of(action),
    )


def title_of(action: RiskyAction) -> str:
    """Return a one-line title of an action."""
    return " ".join(action.sentence.split())[:MAX_TITLE_CHARS]


def kind_of(action: RiskyAction) -> Kind:
    """Return the editor's tool kind for an action."""
    return next((kind for classes, kind in KINDS if isinstance(action, classes)), "other")


def diff_of(action: RiskyAction) -> list[FileEditToolCallContent] | None:
    """Return the diff of an edit, as far as the action contains it; None if the action is not an edit."""
    if isinstance(action, FileWriteAction):
        return [acp.tool_diff_content(action.path, action.content)]
    if isinstance(action, FileEditAction) and action.command == "create":
        return [acp.tool_diff_content(action.path, action.file_text or "")]
    if isinstance(action, FileEditAction) and action.old_str is not None:
        return [acp.tool_diff_content(action.path, action.new_str or "", action.old_str)]
    return None


def _message_updates(text: str) -> list[Update]:
    return [acp.update_agent_message_text(text)] if text else []
