"""Agents behind OpenAI's Responses API: what chat completions are, with ids that continue a conversation.

Holds: the id of a response names its conversation and the event before it, so any server knows it; the text of an
answer is what the agent said last, whole.
Does not: keep responses; `GET /conversations/ID` has what became of one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from broker.runtime.errors import EventsLost, UsageError
from deckhands.client.errors import NotSettled
from deckhands.doors.chat import AgentFailed, Turn, answer_in, turn_of
from deckhands.doors.chat_messages import CONVERSATION, MAX_MESSAGES, MAX_METADATA, MAX_PARTS, ChatRequest
from deckhands.doors.progress import described
from deckhands.server.conversations import result_of
from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import ID, MAX_MODEL, ImageUrl
from deckhands.server.problems import as_openai, problem_of
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS
from deckhands.server.streams import EventStream, Item
from deckhands.tasks.tasks import MAX_TASK_CHARS

routes = APIRouter(prefix="/v1", tags=["openai"])
RESPONSE_ID = re.compile(r"resp_([A-Za-z0-9][A-Za-z0-9_-]{2,63})_([0-9]{1,15})")
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Three files.", "annotations": []}],
}
EXAMPLE = {"id": f"resp_{ID.lower()}_0", "object": "response", "status": "completed", "output": [SAID]}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {"example": EXAMPLE},
            "text/event-stream": {"example": 'event: response.completed\ndata: {"type":"response.completed"}\n\n'},
        }
    }
}


class InputPart(BaseModel):
    """A part of a message: a text or a picture."""

    type: Literal["input_text", "output_text", "input_image"]
    text: str = Field(default="", max_length=MAX_TASK_CHARS)
    image_url: ImageUrl | None = None


class InputItem(BaseModel):
    """One message; calls of tools are not taken, because agents have their own."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class TextFormat(BaseModel):
    """What the answer is: a text, or JSON of a schema."""

    type: Literal["text", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """Of the text of the answer."""

    format: TextFormat | None = None


class ResponseRequest(BaseModel):
    """A request for a response.

    Attributes:
        model: `AGENT` or `AGENT/MODEL`, see chat completions.
        previous_response_id: the answer that this continues.
        tools: refused, unless empty: agents have their own.
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
    tools: Annotated[list[Any], Field(max_length=0, description="agents have their own tools")] | None = None
    background: Annotated[Literal[False], Field(description="follow the conversation instead")] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the chat completion that asks for the same.

        Raises:
            UsageError: it cannot be asked for so; says why.
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
                {"model": self.model, "messages": messages, "metadata": metadata, "response_format": shape}
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


@routes.post(
    "/responses", response_class=Response, responses=ANSWERS, summary="Let an agent answer (OpenAI's responses)"
)
async def respond(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    request: Request,
    *,
    asked: ResponseRequest,
    timeout_seconds: Annotated[float, Query(gt=0, le=LONGEST_SECONDS)] = DEFAULT_SECONDS,
    key: IdempotencyKey = None,
) -> Response:
    """Begin a conversation with the input, or continue the one of `previous_response_id` with it.

    The answer comes when the conversation has settled. After the timeout its status is `incomplete`, and the
    conversation continues.
    """
    chat = asked.as_chat()
    turn = await turn_of(gateway, principal, request, chat, key)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    written = _Written(turn, asked, chat)
    if asked.stream:
        events = EventStream(gateway, principal, turn.conversation_id, after=turn.after, until_settled=True)
        return SseResponse(gateway, events, headers, head=ALIVE + written.first(), written=written.of)
    with contextlib.suppress(NotSettled, EventsLost):
        await gateway.follower.wait_until_settled(turn.conversation_id, timeout_seconds=timeout_seconds)
    result = await result_of(gateway.client, turn.conversation_id)
    if result.is_settled and result.summary["state"] == "error":
        raise AgentFailed(turn.conversation_id, result.summary)
    return JSONResponse(written.response(result.summary if result.is_settled else None), headers=headers)


class _Written:
    """One response, as an object and as the events of a stream."""

    def __init__(self, turn: Turn, asked: ResponseRequest, chat: ChatRequest) -> None:
        self._turn, self._asked, self._chat = turn, asked, chat
        self._id = f"resp_{turn.conversation_id}_{turn.after}"
        self._number = 0

    def response(self, summary: Mapping[str, Any] | None, status: str = "incomplete") -> dict[str, Any]:
        """Return the object; without a summary, it has no answer yet."""
        output, usage = [], None
        if summary is not None:
            status, output = "completed", [self._item(answer_in(summary, self._chat))]
            used = self._turn.usage(summary)
            usage = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            }
        head = self._turn.head("response")
        return {
            "id": self._id,
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": status,
            "output": output,
            "usage": usage,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._asked.instructions,
            "metadata": {**(self._asked.metadata or {}), CONVERSATION: self._turn.conversation_id},
            "parallel_tool_calls": False,
            "previous_response_id": self._asked.previous_response_id,
            "tool_choice": "none",
            "tools": [],
        }

    def _item(self, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        status = "in_progress" if text is None else "completed"
        return {
            "id": f"msg{self._id[4:]}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def first(self) -> bytes:
        """Return what a stream begins with."""
        begun = self.response(None, "in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in kinds)

    def of(self, item: Item) -> bytes:
        """Return an item as server-sent events."""
        if item.kind == "problem":
            return self._failed(item.content)
        if item.kind == "event" and (said := described(item.content)):
            place = {"item_id": f"rs{self._id[4:]}", "output_index": 0, "summary_index": 0}
            return self._event("response.reasoning_summary_text.delta", **place, delta=f"{said}\n")
        if item.kind != "end":
            return b""
        summary = item.content["summary"]
        if summary["state"] == "error":
            return self._failed(problem_of(AgentFailed(self._turn.conversation_id, summary)))
        return b"".join(self._end(summary))

    def _end(self, summary: Mapping[str, Any]) -> Iterator[bytes]:
        text = answer_in(summary, self._chat)
        place = {"item_id": f"msg{self._id[4:]}", "output_index": 0, "content_index": 0}
        yield self._event("response.output_item.added", output_index=0, item=self._item(None))
        yield self._event("response.content_part.added", **place, part=_text_part(""))
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_text_part(text))
        yield self._event("response.output_item.done", output_index=0, item=self._item(text))
        yield self._event("response.completed", response=self.response(summary))

    def _failed(self, details: Mapping[str, Any]) -> bytes:
        error = as_openai(details)["error"]
        failure = {"code": "server_error", "message": error["message"]}
        return self._event("response.failed", response=self.response(None, "failed") | {"error": failure})

    def _event(self, kind: str, **content: Any) -> bytes:
        self._number += 1
        data = json.dumps({"type": kind, "sequence_number": self._number - 1, **content}, ensure_ascii=True)
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
