"""The requests and answers of the server, with examples: the schemas of its OpenAPI document.

Does not: describe the kinds of events field by field; docs/events.md does.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from broker.contract import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_COMMAND_CHARS,
    MAX_TIMEOUT_SECONDS,
    PLUGIN_NAME,
    AgentSpec,
    ConfirmationPolicy,
    Event,
    Labels,
    Limits,
    MessagePolicy,
)
from broker.log import ConversationRow, IndexPosition
from broker.runtime import UsageError, is_conversation_id
from broker.secrets import SecretValue
from deckhands.client import MAX_IMAGES, MAX_SECRETS, MAX_TASK_CHARS, MAX_TITLE, MAX_TOOLS, ImageUrl, TaskSpec
from deckhands.server.dependencies import MAX_EVENT_ID, MAX_REASON
from deckhands.server.openapi.json_body import JsonBody

ID = "01K9QGZ1T2V3W4X5Y6Z7A8B9C0"
MAX_MODEL = 300
MOMENT = "2026-03-01T06:00:00Z"
EVENT = {"id": 2, "kind": "action.message", "source": "user", "content": "List the files", "wait_for_response": False}


class CreatedConversation(BaseModel):
    """A new conversation."""

    conversation_id: str = Field(examples=[ID])


class NewConversation(JsonBody, TaskSpec):
    """A task."""

    @classmethod
    def of_protocol(cls, own: Mapping[str, Any], further: Mapping[str, Any] | None) -> Self:
        """Return the task of a request in another protocol.

        Args:
            own: the fields that the protocol has a place for.
            further: other fields of a task, which replace those of `own`; labels are merged.

        Raises:
            UsageError: a field is invalid, or `further` has a field that only the protocol sets; the text names it.
        """
        further = further or {}
        for name in ("task", "idempotency_key"):
            if name in further:
                raise UsageError(f"{name}: the protocol has its own place for it.", remedy="Leave it out.")
        labels = further.get("labels")
        if isinstance(labels, Mapping):
            further = {**further, "labels": {**own.get("labels", {}), **labels}}
        return cls.parse({**own, **further})


class ShownConversation(BaseModel):
    """A conversation as a listing shows it.

    Attributes:
        version: the id of its last event; it grows with each event.
        wait_reason: why it waits, or empty.
        is_closed: it takes no more events.
        not_before: its start time; null if it does not wait for one.
        model: the model that answered last, or empty.
        numbers: its usage so far: iterations, cost_usd, prompt_tokens, …
    """

    conversation_id: str = Field(examples=[ID])
    title: str = Field(examples=["List the files"])
    state: str = Field(examples=["running"])
    wait_reason: str = ""
    version: int = Field(examples=[12])
    tenant: str = Field(default="", examples=["acme"])
    created: AwareDatetime = Field(examples=[MOMENT])
    updated: AwareDatetime = Field(examples=[MOMENT])
    is_closed: bool = False
    not_before: AwareDatetime | None = None
    labels: dict[str, str] = Field(default_factory=dict, examples=[{"team": "billing"}])
    model: str = Field(default="", examples=["anthropic/claude-sonnet-4-5"])
    numbers: dict[str, str] = Field(default_factory=dict, examples=[{"iterations": "3", "cost_usd": "0.012"}])


def conversation_json(row: ConversationRow) -> dict[str, Any]:
    """Return a row of the index as the JSON of a `Conversation`, without creating a model for every row."""
    return {
        "conversation_id": row.conversation_id,
        "title": row.title,
        "state": row.state,
        "wait_reason": row.wait_reason,
        "version": row.last_event_id,
        "tenant": row.tenant,
        "created": _format_time(row.created),
        "updated": _format_time(row.updated),
        "is_closed": row.is_closed,
        "not_before": None if row.not_before is None else _format_time(row.not_before),
        "labels": dict(row.labels),
        "model": row.model,
        "numbers": {name: row.fields[name] for name in NUMBERS if name in row.fields},
    }


def _format_time(moment: datetime) -> str:
    """Return a UTC time in the format of the models."""
    return f"{moment.isoformat()[:-6]}Z"


NUMBERS = ("iterations", "cost_usd", "has_unknown_cost", "prompt_tokens", "completion_tokens")


class ConversationPage(BaseModel):
    """A page of conversations, newest first; `next_cursor` is null on the last page."""

    conversations: list[ShownConversation]
    next_cursor: str | None = Field(default=None, examples=["MTc2MzkxNjAwMDAwMDowMUs5"])


class ConversationResult(BaseModel):
    """A conversation and its results so far.

    Attributes:
        is_settled: nothing more happens until a client sends a message or a request.
        summary: state, cost, the last message, outputs, …; the same object that `deckhands show --json` prints.
    """

    conversation_id: str = Field(examples=[ID])
    is_settled: bool
    summary: dict[str, Any] = Field(
        examples=[{"state": "finished", "message": "There are three files.", "cost_usd": 0.01}]
    )


class EventPage(BaseModel):
    """Events in order. Pass `next_after` as `after` for the next page; it is null if there are no more yet."""

    events: list[dict[str, Any]] = Field(examples=[[EVENT]])
    next_after: int | None = Field(default=None, examples=[100])


class NewMessage(JsonBody):
    """A message to the agent.

    Attributes:
        images: addresses or data URLs.
        model: the profile or model to continue with; null keeps the current one.
        double_texting: the policy if the agent is working; null for the conversation's policy.
    """

    model_config = ConfigDict(extra="forbid")

    content: str = Field(min_length=1, max_length=MAX_TASK_CHARS, examples=["And the hidden ones?"])
    images: Annotated[tuple[ImageUrl, ...], Field(max_length=MAX_IMAGES)] = ()
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL)
    double_texting: MessagePolicy | None = None


class Resumption(JsonBody):
    """Why a conversation is continued, and with which model; null keeps the current one."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=MAX_REASON, examples=["the budget was raised"])
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL)


class ConfirmationAnswer(JsonBody):
    """A confirmation of the action that awaits one.

    Attributes:
        action_id: the action that was shown to the user; null for the one that awaits confirmation now.
        edited: new values for fields of the action.
        reason: recorded in the log.
    """

    model_config = ConfigDict(extra="forbid")

    action_id: int | None = Field(default=None, ge=1, le=MAX_EVENT_ID, examples=[7])
    edited: dict[str, Any] = Field(default_factory=dict, examples=[{"command": "ls -a"}])
    reason: str = Field(default="", max_length=MAX_REASON)


class Rejection(JsonBody):
    """A rejection of the action that awaits confirmation; see `ConfirmationAnswer`.

    Attributes:
        reason: a reason for the agent, which reads it and continues. Without one, the agent waits for a message.
    """

    model_config = ConfigDict(extra="forbid")

    action_id: int | None = Field(default=None, ge=1, le=MAX_EVENT_ID, examples=[7])
    reason: str = Field(default="", max_length=MAX_REASON, examples=["not on a Friday"])


class ChangedConversation(JsonBody):
    """Changes that apply from the next step on; null leaves a field unchanged.

    Attributes:
        agent: its name, or its full specification.
        model: the profile or model to continue with.
        confirmation: a policy, or its mode.
        analyzer: the analyzer that rates the risk of actions.
        limits: replace all limits.
        tools: keys or patterns of offered tools to add.
        labels: replace all labels.
        title: the name for listings.
        reason: recorded in the log.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"limits": {"max_iterations": 40}, "reason": "a longer task"}]},
    )

    agent: AgentSpec | Annotated[str, Field(min_length=1, max_length=100)] | None = None
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL)
    confirmation: ConfirmationPolicy | Annotated[str, Field(pattern=PLUGIN_NAME, max_length=100)] | None = None
    analyzer: str | None = Field(default=None, pattern=PLUGIN_NAME, max_length=100)
    limits: Limits | None = None
    tools: Annotated[tuple[str, ...], Field(max_length=MAX_TOOLS)] = ()
    labels: Labels | None = None
    title: str | None = Field(default=None, min_length=1, max_length=MAX_TITLE, pattern=r"\S")
    reason: str = Field(min_length=1, max_length=MAX_REASON)


class NewSecrets(JsonBody):
    """Secrets by name. Commands may use them; no client can read them. Secrets with the same names are replaced."""

    model_config = ConfigDict(extra="forbid")

    secrets: Annotated[dict[str, SecretValue], Field(min_length=1, max_length=MAX_SECRETS, repr=False)] = Field(
        examples=[{"TOKEN": "abc-123-def"}]
    )


class Command(JsonBody):
    """A command to run beside the agent.

    Attributes:
        timeout_seconds: the time limit after which it is killed.
        reason: recorded in the log.
    """

    model_config = ConfigDict(extra="forbid")

    command: str = Field(min_length=1, max_length=MAX_COMMAND_CHARS, pattern=r"[^\s\x00]", examples=["git status"])
    timeout_seconds: float = Field(default=DEFAULT_TIMEOUT_SECONDS, gt=0, le=MAX_TIMEOUT_SECONDS)
    reason: str = Field(default="", max_length=MAX_REASON, examples=["a look at the failing test"])

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str) -> str:
        if "\0" in command:
            raise ValueError("it has a NUL character")
        return command


class Executed(BaseModel):
    """The result of a command.

    Attributes:
        event_id: of the command in the log.
        output: stdout and stderr together; the middle of a long output is left out.
        exit_code: -1 if it was killed.
    """

    event_id: int = Field(examples=[14])
    output: str = Field(examples=["On branch main"])
    exit_code: int = Field(examples=[0])


class DirectoryEntry(BaseModel):
    """An entry of a directory in a workspace: a `file`, a `directory` or a `link`."""

    name: str = Field(examples=["README.md"])
    kind: str = Field(examples=["file"])
    size_bytes: int = Field(examples=[1204])


class Fork(JsonBody):
    """A conversation that starts with the events of another.

    Attributes:
        at: the last event to copy; null for all.
        model: another model; null for the origin's.
        title: the title for listings; empty for the origin's with the number of the event.
    """

    model_config = ConfigDict(extra="forbid")

    at: int | None = Field(default=None, ge=1, le=MAX_EVENT_ID, examples=[12])
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL)
    title: str = Field(default="", max_length=200)


class Done(BaseModel):
    """The request is recorded in the log; `version` is the id of the last event at that time."""

    conversation_id: str = Field(examples=[ID])
    version: int = Field(examples=[13])


class NewTicket(JsonBody):
    """What a ticket is for: a stream, or a terminal."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["stream", "terminal"] = Field(default="stream", examples=["terminal"])


class Ticket(BaseModel):
    """A ticket that opens one stream within `expires_in_seconds`: `…/stream?ticket=…`."""

    ticket: str = Field(examples=["tk_7f6c0ad1e2"])
    expires_in_seconds: float = Field(examples=[30.0])


class Uploaded(BaseModel):
    """A file written into a workspace."""

    files: int = Field(examples=[1])
    size_bytes: int = Field(examples=[1204])


class StoredUpload(BaseModel):
    """An upload for a conversation that is not created yet.

    Attributes:
        parcel: its name in `workspace.source`.
        kept_seconds: how long it is kept for its conversation.
    """

    parcel: str = Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])
    size_bytes: int = Field(examples=[1204])
    kept_seconds: int = Field(examples=[3_600])


def format_cursor(place: IndexPosition | None) -> str | None:
    """Return the cursor of a position in an index; None if there is no further page."""
    if place is None:
        return None
    return base64.urlsafe_b64encode(f"{place[0]:.0f}:{place[1]}".encode()).decode().rstrip("=")


def parse_cursor(cursor: str) -> IndexPosition | None:
    """Return the position of a cursor; None for the first page.

    Raises:
        UsageError: the text is not a cursor.
    """
    if not cursor:
        return None
    try:
        text = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        created, _, conversation_id = text.partition(":")
        if not (created.isascii() and created.isdigit() and is_conversation_id(conversation_id)):
            raise ValueError(text)  # noqa: TRY301  (answered here)
        return float(created), conversation_id
    except (binascii.Error, ValueError) as error:
        raise UsageError("The cursor cannot be used.", remedy="Pass `next_cursor` of the previous page.") from error


def event_json(event: Event) -> Mapping[str, Any]:
    """Return an event in the form of the API."""
    return event.export()


def count_chars(value: object) -> int:
    """Return the total length of the texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(count_chars, value.values()))
    return sum(map(count_chars, value)) if isinstance(value, list | tuple) else 0
