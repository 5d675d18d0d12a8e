"""Agents behind OpenAI's Responses API: like chat completions, with ids that continue a conversation.

Holds: the id of a response names its conversation and the event before it, so any server can resolve it; the text of an
answer is the agent's last message; a stream has all its messages, as they are written, each word once. The pieces of a
text or a summary, put together, equal its `done` event and the response. All the agent's messages form one message
item, and all its actions one reasoning item; each is opened by its first part, and closed before the response is
completed. Any server can read a response again from the log. The events of such a stream follow from the log alone, so
their numbers are always the same. A stream with its text word by word has no stable numbers, so only a response in the
background can be followed from a number.
Does not: store responses; they are turns of conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from broker.contract import AgentState, ConversationCreated, Event, EventSource, MessageAction, OperatorActed
from broker.runtime import UnknownConversation, UsageError
from deckhands.client import Tally, load_quoted_texts
from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Operator, Reader, Writer
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import ID, event_json
from deckhands.server.problems import Problem, to_openai_error, to_problem
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
from deckhands.server.protocols.response_messages import RESPONSE_ID, ResponseRequest
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS
from deckhands.server.streams import EventStream, Item, reserve_stream, with_full_message

routes = APIRouter(prefix="/v1", tags=["openai"])
CANCEL_SECONDS = 20.0
"""How long a request to stop waits until the agent has stopped."""
WAITS = frozenset({AgentState.PAUSED, AgentState.AWAITING_USER_CONFIRMATION})
"""States of a conversation that has settled without an answer, and gives one when it continues."""
STATUSES = {AgentState.STOPPED: "cancelled", **dict.fromkeys(WAITS, "incomplete")}
"""The status of a response by the state in which its conversation has settled, if it is not `completed`."""
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
    is_live = bool(asked.stream) and deltas and not chat.is_formed and not asked.background
    turn = await start_turn(gateway, principal, request, chat, key, is_live=is_live)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    if asked.background:
        kept = await _load(gateway, f"{turn.conversation_id}_{turn.after}")
        return kept.stream(gateway, principal) if asked.stream else JSONResponse(kept.whole(), headers=headers)
    written = ResponseWriter(turn, asked, chat, is_live=is_live)
    if asked.stream:
        events = stream_turn(gateway, principal, turn, is_live=is_live)
        return SseResponse(gateway, events, headers, head=ALIVE + written.first(), written=written.of)
    result = await wait_for_answer(gateway, request, turn, timeout_seconds)
    return JSONResponse(written.whole(result.summary if result.is_settled else None), headers=headers)


ResponseId = Annotated[str, Path(pattern=f"^{RESPONSE_ID.pattern}$", examples=[f"resp_{ID.lower()}_0"])]
STORED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": EXAMPLE}}}}
DELETED = {"id": f"resp_{ID.lower()}_0", "object": "response.deleted", "deleted": True}


@routes.get(
    "/responses/{response_id}", response_class=Response, responses=ANSWERS, summary="Show or follow a response (OpenAI)"
)
async def retrieve(
    gateway: GatewayOf,
    principal: Reader,
    response_id: ResponseId,
    *,
    stream: Annotated[bool, Query(description="follow it as it grows")] = False,
    starting_after: Annotated[
        int,
        Query(ge=-1, description="the number of the last event that the reader has, of a response in the background"),
    ] = -1,
) -> Response:
    """Show a response as far as it is complete, or follow its events, from the start or after one, until it is over."""
    kept = await _find(gateway, principal, response_id)
    if not stream:
        return JSONResponse(kept.whole())
    reserve_stream(gateway, principal)
    return kept.stream(gateway, principal, starting_after)


@routes.post("/responses/{response_id}/cancel", responses=STORED, summary="Stop a response (OpenAI)")
async def cancel(gateway: GatewayOf, principal: Operator, _reader: Reader, response_id: ResponseId) -> dict[str, Any]:
    """Stop the agent's work on a response. A response that is over does not change."""
    kept = await _find(gateway, principal, response_id)
    if not kept.is_over:
        client = gateway.client_for(principal, "cancel", "asked for by OpenAI's API")
        await client.cancel(kept.conversation_id, wait_seconds=CANCEL_SECONDS)
        kept = await _find(gateway, principal, response_id)
    return kept.whole()


@routes.delete(
    "/responses/{response_id}",
    responses={200: {"content": {"application/json": {"example": DELETED}}}, 409: {"description": "it has others"}},
    summary="Delete a response (OpenAI)",
)
async def delete(gateway: GatewayOf, principal: Operator, _reader: Reader, response_id: ResponseId) -> dict[str, Any]:
    """Delete a response with its conversation, if the conversation is idle and has no other response."""
    kept = await _find(gateway, principal, response_id)
    if not kept.is_only:
        raise Problem(
            409,
            "conflict",
            "The response is one of several of its conversation, whose log is never cut.",
            remedy=f"Delete all of them: DELETE /conversations/{kept.conversation_id}.",
        )
    await gateway.record(principal, "delete", kept.conversation_id, "asked for by OpenAI's API")
    try:
        await gateway.client.delete(kept.conversation_id)
    except UnknownConversation:
        raise
    except UsageError as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _find(gateway: Gateway, principal: Principal, response_id: str) -> StoredResponse:
    """Return a response that the principal may see.

    Raises:
        UnknownConversation: its conversation does not exist, or belongs to another tenant.
        Problem: the conversation has no such response.
    """
    name = response_id.removeprefix("resp_")
    await gateway.require_visible(principal, name.rpartition("_")[0])
    return await _load(gateway, name)


async def _load(gateway: Gateway, name: str) -> StoredResponse:
    conversation_id, _, after = name.rpartition("_")
    client = gateway.client
    events = await client.events(conversation_id, is_lenient=True)
    whole = [await with_full_message(client, conversation_id, event) for event in events]
    return StoredResponse(conversation_id, int(after), await load_quoted_texts(client, conversation_id, whole))


class StoredResponse:
    """A response in the log of its conversation: the events from a user's message to the next after the agent settled.

    Other actions of users, such as pausing, resuming or confirming, are part of it.

    Args:
        after: the last event that was read before its message was sent.

    Attributes:
        is_over: nothing more follows, unless a user lets the agent continue.
        is_only: the conversation has no other response.

    Raises:
        Problem: no response starts there.
    """

    def __init__(self, conversation_id: str, after: int, events: Sequence[Event]) -> None:
        before = Tally.of(event for event in events if event.id <= after)
        self._events: list[Event] = []
        # Other events may have been appended before the message was.
        rest = list(dropwhile(lambda event: bool(after) and not _is_message(event), events[after:]))
        if not rest:
            raise Problem(404, "unknown_response", "There is no such response.", remedy="Check the id of the response.")
        self._tally = Tally.of(event for event in events if event.id < rest[0].id)
        has_message = False
        for event in rest:
            if self._tally.status.is_settled and has_message and (_is_message(event) or _is_said(event)):
                break
            self._tally.add(event)
            self._events.append(event)
            has_message = has_message or _is_said(event)
        self.conversation_id = conversation_id
        status = self._tally.status
        self._is_last = self._events[-1].id == events[-1].id
        self.is_over = status.is_settled and not (self._is_last and status.state in WAITS)
        self.is_only = after == 0 and sum(map(_is_said, events)) <= 1
        created = events[0]
        assert isinstance(created, ConversationCreated)
        model = f"{created.agent.name}/{created.agent.llm.model}" if created.agent.llm.model else created.agent.name
        first = before.summary() if after else None
        used = (first.prompt_tokens, first.completion_tokens) if first is not None else (0, 0)
        steps = first.iterations if first is not None else 0
        started = self._events[0].timestamp
        self._turn = ChatTurn(conversation_id, model, after=after, before=used, steps=steps, created=started)
        self._is_formed = created.agent.output is not None
        self._metadata = dict(created.labels or {})

    def whole(self) -> dict[str, Any]:
        """Return the response as far as it is complete."""
        written = self._writer()
        for event in self._events:
            written.of(Item("event", dict(event_json(event)), event.id))
        if not self.is_over:
            return written.unfinished()
        summary = self._tally.summary().as_json()
        written.of(Item("end", {"summary": summary}))
        return written.last

    def stream(self, gateway: Gateway, principal: Principal, starting_after: int = -1) -> Response:
        """Return the stream of its events after a number."""
        written = self._writer(starting_after)
        headers = {"Location": f"/conversations/{self.conversation_id}"}
        head = ALIVE + written.first()
        if self._is_last:
            after = self._events[0].id - 1
            rest = EventStream(
                gateway, principal, self.conversation_id, after=after, until_settled=True, is_said_whole=True
            )
            return SseResponse(gateway, rest, headers, head=head, written=written.of)
        items = [Item("event", dict(event_json(event)), event.id) for event in self._events]
        items.append(Item("end", {"summary": self._tally.summary().as_json()}))
        return Response(head + b"".join(map(written.of, items)), headers=headers, media_type=SseResponse.media_type)

    def _writer(self, starting_after: int = -1) -> ResponseWriter:
        asked = ResponseRequest.model_construct(
            model=self._turn.head("response")["model"], input="-", metadata=self._metadata
        )
        form = {"type": "json_schema", "json_schema": {"schema": {}}} if self._is_formed else None
        chat = ChatRequest.model_validate(
            {"model": "-", "messages": [{"role": "user", "content": "-"}], "response_format": form}
        )
        return ResponseWriter(
            self._turn,
            asked,
            chat,
            is_live=not self._is_formed,
            starting_after=starting_after,
            is_open=not self.is_over,
        )


class ResponseWriter:
    """One response.

    Args:
        is_live: whether to stream the agent's messages as they are written.
        starting_after: the number of the last event to leave out.
        is_open: whether the response stays open while the conversation waits to be continued.

    Attributes:
        _opened: the open items of the output, `msg` or `rs`, in order.
        _said: the pieces of the message so far.
        _done: the parts of the reasoning summary so far.
        last: the response in the last event that has it.
    """

    def __init__(
        self,
        turn: ChatTurn,
        asked: ResponseRequest,
        chat: ChatRequest,
        *,
        is_live: bool = False,
        starting_after: int = -1,
        is_open: bool = False,
    ) -> None:
        self._starting_after, self._is_open = starting_after, is_open
        self.last: dict[str, Any] = {}
        self._turn, self._asked, self._chat = turn, asked, chat
        self._spoken = AnswerText(turn.steps + 1) if is_live else None
        self._name = f"{turn.conversation_id}_{turn.after}"
        self._opened: list[str] = []
        self._said: list[str] = []
        self._done: list[str] = []
        self._number = 0

    def whole(self, summary: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the response with its answer; without a summary, the answer is missing."""
        if summary is None:
            return self._response("incomplete", [])
        if (status := STATUSES.get(summary["state"])) is not None:
            return self._response(status, [], summary)
        return self._response("completed", [self._message("completed", answer_in(summary, self._chat))], summary)

    def unfinished(self) -> dict[str, Any]:
        """Return the response as far as it is complete."""
        return self._response("in_progress", self._output("in_progress"))

    def first(self) -> bytes:
        """Return the first events of a stream."""
        begun = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in kinds)

    def of(self, item: Item) -> bytes:
        """Convert an item to server-sent events, or to a comment if the reader may return for the rest."""
        if item.kind == "problem":
            if item.content.get("retryable"):
                return f": {item.content['code']}\n\n".encode()
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
        if self._is_open and summary["state"] in WAITS:
            yield f": {summary['state']}\n\n".encode()
            return
        if (status := STATUSES.get(summary["state"])) is not None:
            ended = self._response(status, self._output("incomplete"), summary)
            yield self._event("response.incomplete", response=ended)
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
        self.last = content.get("response", self.last)
        if self._number - 1 <= self._starting_after:
            return b""
        data = json.dumps({"type": kind, "sequence_number": self._number - 1, **content}, ensure_ascii=True)
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _is_message(event: Event) -> bool:
    return isinstance(event, OperatorActed) and event.action == "message"


def _is_said(event: Event) -> bool:
    return isinstance(event, MessageAction) and event.source is EventSource.USER


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
