"""Requests of AG-UI: a run on a thread, with the user's new messages or the answer to an interrupt.

Holds: in an existing thread, only the user's messages after the agent's last one are read. A client cannot change the
log by sending another history, or add results of tools to it.
Does not: accept tools of the frontend; agents have their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import UsageError
from deckhands.client import MAX_TASK_CHARS
from deckhands.server.models import NewConversation
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.protocols.chat_messages import MAX_MESSAGES, MAX_PARTS, ChatRequest

THREAD_LABEL, RUN_LABEL = "ag_ui_thread", "ag_ui_run"
"""Labels of a conversation: the thread that it is, and the run that created it."""
NAME = r"^[A-Za-z0-9]([A-Za-z0-9_.:/@+-]{0,126}[A-Za-z0-9])?$"
"""Ids of threads and runs; both are labels."""
MAX_CONTEXT = 100
MAX_RESUMED = 16
NO_MESSAGE = "There is no new message of the user: the thread has those up to the agent's last one."
ThreadId = Annotated[str, Field(pattern=NAME, description="the client's name of a conversation, or a conversation id")]
RunId = Annotated[str, Field(pattern=NAME, description="the client's name of one run")]


class PartSource(BaseModel):
    """The place of a picture: an address, or its content in base64."""

    model_config = ConfigDict(populate_by_name=True)

    type: str
    value: str = ""
    mime_type: str | None = Field(default=None, alias="mimeType")


class MessagePart(BaseModel):
    """A part of a message: a text or a picture; other types are refused."""

    type: str
    text: str = Field(default="", max_length=MAX_TASK_CHARS)
    source: PartSource | None = None


class ThreadMessage(BaseModel):
    """A message of the thread, in the client's form."""

    id: str = ""
    role: Literal["developer", "system", "assistant", "user", "tool", "activity", "reasoning"]
    content: str | Annotated[list[MessagePart], Field(max_length=MAX_PARTS)] | dict[str, Any] | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the equivalent message of a chat completion.

        Raises:
            UsageError: it has a part that is neither a text nor a picture.
        """
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content if isinstance(self.content, str) else ""}
        return {"role": self.role, "content": [_part(part) for part in self.content]}


class ContextEntry(BaseModel):
    """A named piece of information for the agent."""

    description: str = Field(max_length=MAX_TASK_CHARS)
    value: str = Field(max_length=MAX_TASK_CHARS)


class Resumption(BaseModel):
    """The answer to an interrupt. `payload` is of its `responseSchema`."""

    model_config = ConfigDict(populate_by_name=True)

    interrupt_id: str = Field(alias="interruptId", max_length=128)
    status: Literal["resolved", "cancelled"]
    payload: Any = None


class RunRequest(JsonBody):
    """A request to run an agent: `RunAgentInput` of AG-UI 1.0.

    Attributes:
        messages: the thread so far. For a new thread, all texts are used; for an existing one, the user's new ones.
        state: ignored: the state of a thread is the server's.
        tools: refused, unless empty: agents have their own.
        context: is put before the message.
        resume: the answers to the interrupts of the run before.
        forwarded_props: `deckhands` has further fields of a new thread's task, see docs/tasks.md; others are ignored.
        parent_run_id: refused: `POST /conversations/ID/fork` makes branches.
    """

    model_config = ConfigDict(
        populate_by_name=True,
        json_schema_extra={
            "examples": [
                {
                    "threadId": "order-18",
                    "runId": "run-1",
                    "messages": [{"id": "m1", "role": "user", "content": "List the files"}],
                }
            ]
        },
    )

    thread_id: ThreadId = Field(alias="threadId")
    run_id: RunId = Field(alias="runId")
    messages: list[ThreadMessage] = Field(max_length=MAX_MESSAGES)
    state: Any = None
    tools: Annotated[list[Any], Field(max_length=0, description="agents have their own tools")] | None = None
    context: Annotated[list[ContextEntry], Field(max_length=MAX_CONTEXT)] | None = None
    resume: Annotated[list[Resumption], Field(max_length=MAX_RESUMED)] | None = None
    forwarded_props: Any = Field(default=None, alias="forwardedProps")
    parent_run_id: Annotated[None, Field(alias="parentRunId", description="fork the conversation instead")] = None

    def task(self, agent: str | None, model: str | None) -> NewConversation:
        """Return the task of a new thread.

        Raises:
            UsageError: the request cannot create a thread; the text says why.
        """
        own: dict[str, Any] = {"labels": {THREAD_LABEL: self.thread_id, RUN_LABEL: self.run_id}}
        given = self._as_chat(self.messages).task()
        own |= {"task": self._with_context(given.task), "images": given.images}
        own |= {"agent": agent} if agent else {}
        own |= {"model": model} if model else {}
        props = self.forwarded_props
        further = props.get("deckhands") if isinstance(props, Mapping) else None
        if further is not None and not isinstance(further, Mapping):
            raise UsageError("forwardedProps.deckhands: it must be an object.", remedy="Send fields of a task.")
        labels = further.get("labels") if further is not None else None
        for name in own["labels"]:
            if isinstance(labels, Mapping) and name in labels:
                where = f"forwardedProps.deckhands.labels.{name}"
                raise UsageError(f"{where}: the thread sets this label.", remedy="Leave it out.")
        return NewConversation.of_protocol(own, further)

    def message(self) -> tuple[str, tuple[str, ...]]:
        """Return the text and the pictures that continue a thread: the user's messages after the agent's last one.

        Raises:
            UsageError: there are no new messages, or they are too long.
        """
        last = max((n for n, each in enumerate(self.messages) if each.role in ("assistant", "tool")), default=-1)
        new = [each for each in self.messages[last + 1 :] if each.role == "user"]
        if not new:
            raise UsageError(f"messages: {NO_MESSAGE}", remedy="Add one. Results of tools are not taken.")
        text, images = self._as_chat(new).message()
        return self._with_context(text), images

    def _with_context(self, text: str) -> str:
        if not self.context:
            return text
        named = "\n".join(f"- {each.description}: {each.value}" for each in self.context)
        return f"Context:\n{named}\n\n{text}"

    def _as_chat(self, messages: list[ThreadMessage]) -> ChatRequest:
        said = [each.as_chat() for each in messages if each.role in ("developer", "system", "assistant", "user")]
        if not any(each["role"] == "user" for each in said):
            raise UsageError("messages: there is no message of the user.", remedy="Send one.")
        try:
            return ChatRequest.model_validate({"model": "-", "messages": said})
        except ValueError as error:
            raise UsageError(
                "messages: they cannot be used.", remedy="Send texts, and pictures as `url` or `data`."
            ) from error


def _part(part: MessagePart) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    source = part.source
    if part.type != "image" or source is None or source.type not in ("url", "data"):
        raise UsageError(
            f"messages: a part of the type {part.type[:40]!r} cannot be used.",
            remedy="Send texts, and pictures as `url` or `data`.",
        )
    url = source.value if source.type == "url" else f"data:{source.mime_type or 'image/png'};base64,{source.value}"
    return {"type": "image_url", "image_url": {"url": url}}
