"""Agents behind OpenAI's Responses API: like chat completions, with ids that continue a conversation.

Holds: the id of a response names its conversation and the event before it, so any server can resolve it; the text of an
answer is the agent's last message; a stream has all its messages, as they are written, each word once. The pieces of a
text or a summary, put together, equal its `done` event and the response. All the agent's messages form one message
item, and all its actions one reasoning item; each is opened by its first part, and closed before the response is
completed.
Does not: store responses; `GET /conversations/ID` shows the result of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import ID
from deckhands.server.problems import to_openai_error, to_problem
from deckhands.server.protocols.answer_text import AnswerText
from deckhands.server.protocols.chat import (
    AgentRunFailed,
    ChatTurn,
    answer_in,
    start_turn,
    stream_turn,
    wait_for_answer,
)
from deckhands.server.protocols.chat_messages import CONVERSATION, ChatRequest
from deckhands.server.protocols.progress import describe
from deckhands.server.protocols.response_messages import ResponseRequest
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS
from deckhands.server.streams import Item

routes = APIRouter(prefix="/v1", tags=["openai"])
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
    deltas: Annotated[bool, Query(description="false: a stream has only the answer, and has it whole")] = True,
    key: IdempotencyKey = None,
) -> Response:
    """Create a conversation with the input, or continue the one of `previous_response_id` with it.

    The answer is sent when the conversation has settled. After the timeout its status is `incomplete`, and the
    conversation continues.
    """
    chat = asked.as_chat()
    is_live = bool(asked.stream) and deltas and not chat.is_formed
    turn = await start_turn(gateway, principal, request, chat, key, is_live=is_live)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    written = ResponseWriter(turn, asked, chat, is_live=is_live)
    if asked.stream:
        events = stream_turn(gateway, principal, turn, is_live=is_live)
        return SseResponse(gateway, events, headers, head=ALIVE + written.first(), written=written.of)
    result = await wait_for_answer(gateway, request, turn, timeout_seconds)
    return JSONResponse(written.whole(result.summary if result.is_settled else None), headers=headers)


class ResponseWriter:
    """One response.

    Args:
        is_live: stream the agent's messages as they are written.

    Attributes:
        _opened: the open items of the output, `msg` or `rs`, in their order.
        _said: the pieces of the message.
        _done: the parts of the reasoning summary.
    """

    def __init__(self, turn: ChatTurn, asked: ResponseRequest, chat: ChatRequest, *, is_live: bool = False) -> None:
        self._turn, self._asked, self._chat = turn, asked, chat
        self._spoken = AnswerText(turn.steps + 1) if is_live else None
        self._name = f"{turn.conversation_id}_{turn.after}"
        self._opened: list[str] = []
        self._said: list[str] = []
        self._done: list[str] = []
        self._number = 0

    def whole(self, summary: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the response with its answer; without a summary, it has none yet."""
        if summary is None:
            return self._response("incomplete", [])
        return self._response("completed", [self._message("completed", answer_in(summary, self._chat))], summary)

    def first(self) -> bytes:
        """Return the first events of a stream."""
        begun = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in kinds)

    def of(self, item: Item) -> bytes:
        """Convert an item to server-sent events."""
        if item.kind == "problem":
            return self._write_error(item.content)
        if item.kind == "end":
            return b"".join(self._end(item.content["summary"]))
        if self._spoken is not None and item.kind == "delta":
            return b"".join(self._write_text(self._spoken.add_piece(item.content)))
        if self._spoken is not None and item.content.get("kind") == "model.reply":
            return b"".join(self._write_text(self._spoken.add_reply(item.content)))
        return b"".join(self._write_action(describe(item.content, has_thought=self._spoken is None)))

    def _write_text(self, words: str) -> Iterator[bytes]:
        """Send a piece of the agent's message."""
        if not words:
            return
        place = self._place("msg")
        if not self._said:
            yield from self._open("msg", self._message("in_progress"))
            yield self._event("response.content_part.added", **place, content_index=0, part=_text_part(""))
        self._said.append(words)
        yield self._event("response.output_text.delta", **place, content_index=0, delta=words, logprobs=[])

    def _write_action(self, deed: str) -> Iterator[bytes]:
        """Send an action of the agent, as one part of the summary."""
        if not deed:
            return
        if not self._done:
            yield from self._open("rs", self._reasoning("in_progress"))
        text = f"{deed}\n"
        place = {**self._place("rs"), "summary_index": len(self._done)}
        self._done.append(text)
        yield self._event("response.reasoning_summary_part.added", **place, part=_summary_part(""))
        yield self._event("response.reasoning_summary_text.delta", **place, delta=text)
        yield self._event("response.reasoning_summary_text.done", **place, text=text)
        yield self._event("response.reasoning_summary_part.done", **place, part=_summary_part(text))

    def _end(self, summary: Mapping[str, Any]) -> Iterator[bytes]:
        if summary["state"] == "error":
            yield self._write_error(to_problem(AgentRunFailed(self._turn.conversation_id, summary)))
            return
        answer = answer_in(summary, self._chat)
        yield from self._write_text(answer if self._spoken is None else self._spoken.finish(answer))
        if not self._said:  # an empty answer still needs a message item
            yield from self._open("msg", self._message("in_progress"))
            part = _text_part("")
            yield self._event("response.content_part.added", **self._place("msg"), content_index=0, part=part)
        place = self._place("msg")
        text = "".join(self._said)
        yield self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, content_index=0, part=_text_part(text))
        output = self._output("completed")
        for index, item in enumerate(output):
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event("response.completed", response=self._response("completed", output, summary))

    def _write_error(self, details: Mapping[str, Any]) -> bytes:
        error = to_openai_error(details)["error"]
        failure = {"code": "server_error", "message": error["message"]}
        failed = self._response("failed", self._output("incomplete")) | {"error": failure}
        return self._event("response.failed", response=failed)

    def _open(self, kind: str, item: Mapping[str, Any]) -> Iterator[bytes]:
        self._opened.append(kind)
        yield self._event("response.output_item.added", output_index=self._opened.index(kind), item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        """Return the index of an item that is open or about to be opened."""
        index = self._opened.index(kind) if kind in self._opened else len(self._opened)
        return {"item_id": f"{kind}_{self._name}", "output_index": index}

    def _output(self, status: str) -> list[dict[str, Any]]:
        """Return the items opened so far."""
        text = "".join(self._said)
        made = {"msg": self._message(status, text), "rs": self._reasoning(status)}
        return [made[kind] for kind in self._opened]

    def _message(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _reasoning(self, status: str) -> dict[str, Any]:
        parts = [_summary_part(text) for text in self._done]
        return {"id": f"rs_{self._name}", "type": "reasoning", "status": status, "summary": parts}

    def _response(
        self, status: str, output: list[dict[str, Any]], summary: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        head = self._turn.head("response")
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": status,
            "output": output,
            "usage": None if summary is None else self._usage(summary),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._asked.instructions,
            "metadata": {**(self._asked.metadata or {}), CONVERSATION: self._turn.conversation_id},
            "parallel_tool_calls": False,
            "previous_response_id": self._asked.previous_response_id,
            "tool_choice": "none",
            "tools": [],
        }

    def _usage(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        used = self._turn.usage(summary)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        self._number += 1
        data = json.dumps({"type": kind, "sequence_number": self._number - 1, **content}, ensure_ascii=True)
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
