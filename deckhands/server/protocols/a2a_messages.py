"""The messages of A2A. A task is a conversation, and so is its context.

Source: A2A protocol 1.0, the JSON of its Protocol Buffers.

Holds: parts that no agent can read are refused; access is checked elsewhere.
Does not: create conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from broker.contract import AgentFinishAction, AgentState, Event, EventSource, MessageAction, add_remedy
from broker.runtime import UsageError
from deckhands.client import MAX_TASK_CHARS, TaskSpec
from deckhands.operations import A2A_STATES, MAX_URL_CHARS
from deckhands.server.models import ID, ConversationResult, NewConversation

MAX_PARTS = 100
MAX_HISTORY = 1_000
MESSAGE_ID = r"^[ -~]{1,200}$"
ANSWER = "answer"
EXAMPLE: dict[str, JsonValue] = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "List the files"}]}


class Wire(BaseModel):
    """A message of the protocol. Fields of later protocol versions are ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class A2APart(Wire):
    """A part of a message: a text, or data, which the agent reads as JSON."""

    text: Annotated[str, Field(max_length=MAX_TASK_CHARS)] | None = None
    data: Any = None
    url: Annotated[str, Field(max_length=0, description="agents fetch files by themselves")] | None = None
    raw: Annotated[str, Field(max_length=0, description="put files into the workspace")] | None = None


class A2AMessage(Wire):
    """A message to the agent. Messages with the same id are the same message."""

    message_id: str = Field(pattern=MESSAGE_ID)
    role: Literal["ROLE_USER"]
    parts: list[A2APart] = Field(min_length=1, max_length=MAX_PARTS)
    task_id: str = Field(default="", max_length=100, examples=[ID])
    context_id: str = Field(default="", max_length=100)

    @property
    def conversation_id(self) -> str:
        """The conversation to continue; empty for a new one."""
        return self.task_id or self.context_id

    def text(self) -> str:
        """Return the text of the message.

        Raises:
            UsageError: the message has no text, or too much.
        """
        parts = [part.text or ("" if part.data is None else json.dumps(part.data)) for part in self.parts]
        text = "\n\n".join(part for part in parts if part.strip())
        if not 0 < len(text) <= MAX_TASK_CHARS:
            raise UsageError(f"message.parts: a message has 1 to {MAX_TASK_CHARS:,} characters.", remedy="Send text.")
        return text


class PushConfig(Wire):
    """Where to notify the client about a task. `token` comes back in the header `X-A2A-Notification-Token`."""

    task_id: str = Field(default="", max_length=100, examples=[ID])
    id: str = Field(default="", max_length=100)
    url: str = Field(default="", max_length=MAX_URL_CHARS, examples=["https://app.example/a2a"])
    token: str = Field(default="", pattern=r"^[ -~]{0,500}$")
    authentication: Annotated[dict[str, Any], Field(max_length=0, description="requests are signed")] | None = None


class A2AConfiguration(Wire):
    """When to answer a message: at once, or when the task has settled."""

    return_immediately: bool = False
    history_length: int = Field(default=0, ge=0, le=MAX_HISTORY)
    task_push_notification_config: PushConfig | None = None


class SendParams(Wire):
    """The parameters of SendMessage and SendStreamingMessage.

    Attributes:
        metadata: of a new task: fields of a `TaskSpec`. Names with a colon belong to extensions and are ignored.
    """

    message: A2AMessage
    configuration: A2AConfiguration = A2AConfiguration()
    metadata: dict[str, Any] = Field(default_factory=dict)

    def task(self) -> TaskSpec:
        """Return the task of a new conversation.

        Raises:
            UsageError: the message is invalid.
        """
        fields = {name: value for name, value in self.metadata.items() if ":" not in name}
        return NewConversation.of_protocol({"task": self.message.text()}, fields)


class TaskParams(Wire):
    """The parameters of a method that names a task by its id."""

    id: str = Field(max_length=100)
    history_length: int = Field(default=0, ge=0, le=MAX_HISTORY)


def task_json(found: ConversationResult, history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Convert a conversation to a task."""
    task: dict[str, Any] = {**names_of(found.conversation_id, "id"), "status": status_json(found)}
    if found.is_settled and (artifact := artifact_of(found.summary)):
        task["artifacts"] = [artifact]
    if history:
        task["history"] = list(history)
    return task


def names_of(conversation_id: str, own: str = "taskId") -> dict[str, str]:
    """Return the ids of a task, for messages about it."""
    return {own: conversation_id, "contextId": conversation_id}


def status_json(found: ConversationResult) -> dict[str, Any]:
    """Return the status of a task, with the agent's last message, or the error that ended it."""
    state = A2A_STATES[AgentState(found.summary["state"])]
    summary = found.summary
    error = add_remedy(summary["last_error"], summary.get("remedy", ""))
    said = error if state == "TASK_STATE_FAILED" else summary["message"]
    if not found.is_settled or not said:
        return {"state": state}
    return {"state": state, "message": message_json(found.conversation_id, summary["last_event_id"], str(said))}


def message_json(conversation_id: str, event_id: int, text: str, role: str = "ROLE_AGENT") -> dict[str, Any]:
    """Return an agent's text as a message of the task."""
    message = {"messageId": f"{conversation_id}-{event_id}", "role": role, "parts": [{"text": text}]}
    return message | names_of(conversation_id)


def artifact_of(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the artifact of a finished task, its answer and structured output; None if it is not finished."""
    if AgentState(summary["state"]) is not AgentState.FINISHED:
        return None
    parts: list[dict[str, Any]] = [{"text": str(summary["message"])}] if summary["message"] else []
    parts += [{"data": summary["outputs"]}] if summary["outputs"] else []
    return {"artifactId": ANSWER, "name": ANSWER, "parts": parts} if parts else None


def history_of(conversation_id: str, events: Sequence[Event], length: int) -> list[dict[str, Any]]:
    """Return the last messages of a conversation, up to the requested number."""
    found = []
    for event in events:
        if isinstance(event, MessageAction) and event.content:
            role = "ROLE_USER" if event.source == EventSource.USER else "ROLE_AGENT"
            found.append(message_json(conversation_id, event.id or 0, event.content, role))
        elif isinstance(event, AgentFinishAction) and event.final_thought:
            found.append(message_json(conversation_id, event.id or 0, event.final_thought))
    return found[-length:] if length else []
