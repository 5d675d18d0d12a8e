"""Requests of OpenAI's Responses API, and the equivalent chat completions.

Does not: accept calls or results of tools; agents have their own.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import UsageError
from deckhands.client import MAX_TASK_CHARS, ImageUrl
from deckhands.server.models import MAX_MODEL
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.protocols.chat_messages import CONVERSATION, MAX_MESSAGES, MAX_METADATA, MAX_PARTS, ChatRequest

RESPONSE_ID = re.compile(r"resp_([A-Za-z0-9][A-Za-z0-9_-]{2,63})_([0-9]{1,15})")


class InputPart(BaseModel):
    """A part of a message: a text or a picture."""

    type: Literal["input_text", "output_text", "input_image"]
    text: str = Field(default="", max_length=MAX_TASK_CHARS)
    image_url: ImageUrl | None = None


class InputItem(BaseModel):
    """One message. Tool calls are not accepted, because agents have their own tools."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class TextFormat(BaseModel):
    """The format of the answer: text, or JSON of a schema."""

    type: Literal["text", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponseRequest(JsonBody):
    """A request for a response.

    Attributes:
        model: `AGENT` or `AGENT/MODEL`, see chat completions.
        previous_response_id: the response to continue.
        tools: refused, unless empty: agents have their own.
        deckhands: only for a new conversation: further fields of a task, see docs/tasks.md.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "CodeActAgent", "input": "List the files"}]})

    model: str = Field(min_length=1, max_length=100 + MAX_MODEL, examples=["CodeActAgent/gpt-5"])
    input: (
        Annotated[str, Field(min_length=1, max_length=MAX_TASK_CHARS)]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: Annotated[str, Field(max_length=MAX_TASK_CHARS)] | None = None
    previous_response_id: Annotated[str, Field(pattern=f"^{RESPONSE_ID.pattern}$")] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA - 1)] | None = None
    text: TextOptions | None = None
    deckhands: dict[str, Any] | None = None
    tools: Annotated[list[Any], Field(max_length=0, description="agents have their own tools")] | None = None
    background: Annotated[bool, Field(description="answer at once; `GET /v1/responses/ID` has the rest")] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion.

        Raises:
            UsageError: there is no equivalent; the text says why.
        """
        given = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else [_message(item) for item in self.input]
        )
        messages = ([{"role": "system", "content": self.instructions}] if self.instructions else []) + given
        metadata = dict(self.metadata or {})
        if self.previous_response_id is not None:
            found = RESPONSE_ID.fullmatch(self.previous_response_id)
            assert found is not None
            metadata[CONVERSATION] = found.group(1)
        form = self.text.format if self.text is not None else None
        shape = (
            {"type": "json_schema", "json_schema": {"schema": form.schema_}}
            if form is not None and form.schema_
            else None
        )
        try:
            return ChatRequest.model_validate(
                {
                    "model": self.model,
                    "messages": messages,
                    "metadata": metadata,
                    "response_format": shape,
                    "deckhands": self.deckhands,
                }
            )
        except ValueError as error:
            raise UsageError("input: it cannot be used as messages.", remedy="Send texts and pictures.") from error


def _message(item: InputItem) -> dict[str, Any]:
    if isinstance(item.content, str):
        return {"role": item.role, "content": item.content}
    parts = [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if part.type == "input_image"
        else {"type": "text", "text": part.text}
        for part in item.content
    ]
    return {"role": item.role, "content": parts}
