"""OpenAI's chat completion requests, and their translation to tasks and messages.

Holds: a field that would change the answer but is not supported is refused by name; fields that only tune a model
(`temperature`, `max_tokens`, …) are ignored, because the workers' configuration decides.
Does not: create conversations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import UsageError
from deckhands.client import MAX_IMAGES, MAX_TASK_CHARS, ImageUrl
from deckhands.server.models import ID, MAX_MODEL, NewConversation
from deckhands.server.openapi.json_body import JsonBody

MAX_MESSAGES = 2_000
MAX_PARTS = 100
MAX_METADATA = 16
CONVERSATION = "conversation_id"


class ImageAddress(BaseModel):
    """The place of a picture: an address or a data URL."""

    url: ImageUrl


class ChatPart(BaseModel):
    """A part of a message: a text or a picture."""

    type: Literal["text", "image_url"]
    text: str = Field(default="", max_length=MAX_TASK_CHARS)
    image_url: ImageAddress | None = None


class ChatMessage(BaseModel):
    """One message. Tool messages are not accepted, because agents have their own tools."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ChatPart], Field(max_length=MAX_PARTS)] | None = None

    @property
    def text(self) -> str:
        """Its text, without its pictures."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.type == "text")
        return self.content or ""

    @property
    def images(self) -> tuple[str, ...]:
        """The addresses of its pictures."""
        parts = self.content if isinstance(self.content, list) else []
        return tuple(part.image_url.url for part in parts if part.image_url is not None)


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(BaseModel):
    """The schema of an answer."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """The format of the answer: text, or JSON of a schema."""

    type: Literal["text", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(JsonBody):
    """A request for a chat completion.

    Attributes:
        model: `AGENT` or `AGENT/MODEL`, where MODEL is a profile or a model of the controller workers.
        metadata: `conversation_id` continues that conversation; other entries become labels of a new one.
        stream_options: with `include_usage`, a stream ends with its token usage.
        response_format: only for a new conversation; the answer is then JSON of the schema.
        deckhands: only for a new conversation: further fields of a task, see docs/tasks.md.
        tools, functions, n: refused, unless empty or 1.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "CodeActAgent", "messages": [{"role": "user", "content": "Hello"}]}]}
    )

    model: str = Field(min_length=1, max_length=100 + MAX_MODEL, examples=["CodeActAgent/gpt-5"])
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA, examples=[{CONVERSATION: ID}])] | None = None
    response_format: ResponseFormat | None = None
    deckhands: dict[str, Any] | None = None
    tools: Annotated[list[Any], Field(max_length=0, description="agents have their own tools")] | None = None
    functions: Annotated[list[Any], Field(max_length=0, description="agents have their own tools")] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def conversation_id(self) -> str:
        """The conversation to continue; empty for a new one."""
        return (self.metadata or {}).get(CONVERSATION, "")

    @property
    def is_formed(self) -> bool:
        """Whether the answer must be JSON of a schema."""
        return self.response_format is not None and self.response_format.json_schema is not None

    @property
    def agent(self) -> str:
        """The agent that the model's name chooses."""
        return self.model.partition("/")[0]

    @property
    def model_of_agent(self) -> str | None:
        """The model that the agent should use; None for the workers' default."""
        return self.model.partition("/")[2] or None

    def task(self) -> NewConversation:
        """Return the task of a new conversation, with the pictures of all messages.

        Raises:
            UsageError: the request cannot create a conversation; the text says why.
        """
        form = self.response_format.json_schema if self.response_format is not None else None
        return NewConversation.of_protocol(
            {
                "task": render_transcript(self.messages),
                "agent": self.agent,
                "model": self.model_of_agent,
                "labels": {name: text for name, text in (self.metadata or {}).items() if name != CONVERSATION},
                "output": form.schema_ if form is not None else None,
                "images": [url for message in self.messages for url in message.images],
            },
            self.deckhands,
        )

    def message(self) -> tuple[str, tuple[str, ...]]:
        """Return the text and the pictures that continue a conversation: all messages after the last answer.

        Raises:
            UsageError: the messages are empty or too long.
        """
        last = max((n for n, each in enumerate(self.messages) if each.role == "assistant"), default=-1)
        new = [each for each in self.messages[last + 1 :] if each.role == "user"]
        text = "\n\n".join(each.text for each in new).strip()
        images = tuple(url for each in new for url in each.images)
        if not text or len(text) > MAX_TASK_CHARS or len(images) > MAX_IMAGES:
            raise UsageError(
                "messages: after the last answer, there must be a message of the user with a text of up to "
                f"{MAX_TASK_CHARS:,} characters and up to {MAX_IMAGES} pictures.",
                remedy="Send one.",
            )
        return text, images


def render_transcript(messages: list[ChatMessage]) -> str:
    """Return messages as one task: a single message as it is, several with their roles."""
    said = [message for message in messages if message.text]
    if len(said) == 1:
        return said[0].text
    return "\n\n".join(f"{message.role.capitalize()}:\n{message.text}" for message in said)
