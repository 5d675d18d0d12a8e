"""Agents behind the API of OpenAI's chat completions.

Holds: the text of an answer is the agent's last message; a stream has all the agent's messages, as they are written,
each word once. The agent's actions are `reasoning_content`, which clients show separately or leave out. If the client
disconnects, the conversation continues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from broker.log import LiveText
from broker.runtime import SYSTEM_CLOCK, DeckhandsError, UsageError
from deckhands.server.cluster import agents, models
from deckhands.server.conversations import result_of, submit_once
from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer, fingerprint, scoped_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.live import ALIVE, SseResponse, wait_until_settled
from deckhands.server.models import ConversationResult
from deckhands.server.problems import Problem, status_of_error, to_openai_error, to_problem
from deckhands.server.protocols.answer_text import AnswerText
from deckhands.server.protocols.chat_messages import CONVERSATION, ChatRequest
from deckhands.server.protocols.progress import describe
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS
from deckhands.server.streams import EventStream, Item, reserve_stream

routes = APIRouter(prefix="/v1", tags=["openai"])
EXAMPLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Three files."}}]}
LISTED = {"object": "list", "data": [{"id": "CodeActAgent", "object": "model", "owned_by": "deckhands"}]}
MODELS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": LISTED}}}}
COMPLETIONS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {"example": EXAMPLE},
            "text/event-stream": {"example": "data: [DONE]\n\n"},
        }
    }
}


class AgentRunFailed(Problem):
    """The conversation ended in an error. Sending the request again would create another one."""

    def __init__(self, conversation_id: str, summary: Mapping[str, Any]) -> None:
        code = str(summary["error_code"] or "agent_failed")
        message = f"The conversation {conversation_id} ended in an error: {summary['last_error']}"
        headers = {"Location": f"/conversations/{conversation_id}"}
        super().__init__(502, code, message, headers=headers, remedy=str(summary.get("remedy", "")))


@routes.get("/models", summary="List agents as models", responses=MODELS)
async def listed(gateway: GatewayOf, principal: Reader) -> dict[str, Any]:
    """List each agent, with the workers' default model, and with each profile as `AGENT/PROFILE`."""
    names = (await agents(gateway, principal)).names
    profiles = (await models(gateway, principal)).profiles
    found = [name + behind for name in names for behind in ("", *(f"/{profile}" for profile in profiles))]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "deckhands"} for name in found]
    return {"object": "list", "data": data}


@routes.post(
    "/chat/completions",
    response_class=Response,
    responses=COMPLETIONS,
    summary="Let an agent answer (OpenAI's chat completions)",
)
async def complete(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    request: Request,
    *,
    chat: ChatRequest,
    timeout_seconds: Annotated[float, Query(gt=0, le=LONGEST_SECONDS)] = DEFAULT_SECONDS,
    deltas: Annotated[bool, Query(description="false: a stream has only the answer, and has it whole")] = True,
    key: IdempotencyKey = None,
) -> Response:
    """Create a conversation with the messages, or continue `metadata.conversation_id` with the user's new ones.

    The answer is sent when the conversation has settled. After the timeout it has the finish reason `length`, and the
    conversation continues. `metadata.conversation_id` of the answer names it.
    """
    is_live = bool(chat.stream) and deltas and not chat.is_formed
    turn = await start_turn(gateway, principal, request, chat, key, is_live=is_live)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    if chat.stream:
        events = stream_turn(gateway, principal, turn, is_live=is_live)
        return SseResponse(gateway, events, headers, head=ALIVE, written=Chunks(turn, chat, is_live=is_live).of)
    result = await wait_for_answer(gateway, request, turn, timeout_seconds)
    message = {
        "role": "assistant",
        "content": answer_in(result.summary, chat) if result.is_settled else "",
        "refusal": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop" if result.is_settled else "length",
        "logprobs": None,
    }
    found = turn.head("chat.completion") | {"choices": [choice], "usage": turn.usage(result.summary)}
    return JSONResponse(found, headers=headers)


class ChatTurn:
    """One request and its answer in a conversation.

    Args:
        after: the id of the last event before it.
        before: the tokens that the conversation had used before: of prompts and of completions.
        steps: the steps that the conversation had taken before.
        created: the time of the request; None for now.
    """

    def __init__(
        self,
        conversation_id: str,
        model: str,
        *,
        after: int = 0,
        before: tuple[int, int] = (0, 0),
        steps: int = 0,
        created: datetime | None = None,
    ) -> None:
        self.conversation_id, self.after, self.steps = conversation_id, after, steps
        self._model, self._before = model, before
        self._created = int((created or SYSTEM_CLOCK.now()).timestamp())

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields common to all objects of this answer."""
        return {
            "id": f"chatcmpl-{self.conversation_id}-{self.after}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "metadata": {CONVERSATION: self.conversation_id},
        }

    def usage(self, summary: Mapping[str, Any]) -> dict[str, int]:
        """Return the tokens of all model calls of this turn."""
        prompt = max(0, summary["prompt_tokens"] - self._before[0])
        completion = max(0, summary["completion_tokens"] - self._before[1])
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def start_turn(
    gateway: Gateway,
    principal: Principal,
    request: Request,
    chat: ChatRequest,
    key: str | None,
    *,
    is_live: bool = False,
) -> ChatTurn:
    """Create or continue a conversation.

    Args:
        is_live: stream the agent's messages as they are written.

    Raises:
        KeyReused: the key belongs to another request.
        UnknownConversation: the conversation does not exist, or belongs to another tenant.
        UsageError, Problem: the messages are invalid, or the conversation accepts none.
    """
    reserve_stream(gateway, principal)
    if not chat.conversation_id:
        return ChatTurn(
            await submit_once(gateway, principal, request, chat.task(), key, is_watched=is_live), chat.model
        )
    conversation_id = await gateway.require_visible(principal, chat.conversation_id)
    text, images = chat.message()
    own = scoped_key(principal, key)
    if own is not None:
        await gateway.repeated.start(own, await fingerprint(request))
    before = (await result_of(gateway.client, conversation_id)).summary
    if is_live:
        await LiveText(gateway.store, conversation_id).register_watcher()
    client = gateway.client_for(principal, "message", "", key=own)
    try:
        await client.send_message(conversation_id, text, images=images, model=chat.model_of_agent)
    except DeckhandsError as error:
        if own is not None and status_of_error(error) < 500:
            await gateway.repeated.forget(own)
        if isinstance(error, UsageError):
            raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
        raise
    used = before["prompt_tokens"], before["completion_tokens"]
    after, steps = before["last_event_id"], before["iterations"]
    return ChatTurn(conversation_id, chat.model, after=after, before=used, steps=steps)


def stream_turn(gateway: Gateway, principal: Principal, turn: ChatTurn, *, is_live: bool) -> EventStream:
    """Return the stream of a turn until the conversation has settled; see `turn_of`."""
    return EventStream(
        gateway,
        principal,
        turn.conversation_id,
        after=turn.after,
        deltas=is_live,
        until_settled=True,
        is_said_whole=True,
    )


async def wait_for_answer(
    gateway: Gateway, request: Request, turn: ChatTurn, timeout_seconds: float
) -> ConversationResult:
    """Wait until the conversation has settled, at most until the timeout.

    Raises:
        AgentFailed: the conversation ended in an error.
    """
    result = await wait_until_settled(gateway, request, turn.conversation_id, timeout_seconds=timeout_seconds)
    if result.is_settled and result.summary["state"] == "error":
        raise AgentRunFailed(turn.conversation_id, result.summary)
    return result


def answer_in(summary: Mapping[str, Any], chat: ChatRequest) -> str:
    """Return the agent's last message, or its structured output as JSON if a schema was given."""
    return json.dumps(summary["outputs"], ensure_ascii=False) if chat.is_formed else str(summary["message"])


class Chunks:
    """Converts the items of a stream to chunks of a completion.

    Args:
        is_live: stream the agent's messages as they are written.
    """

    def __init__(self, turn: ChatTurn, chat: ChatRequest, *, is_live: bool) -> None:
        self._turn, self._chat = turn, chat
        self._spoken = AnswerText(turn.steps + 1) if is_live else None
        self._has_usage = chat.stream_options is not None and chat.stream_options.include_usage
        self._is_begun = False

    def of(self, item: Item) -> bytes:
        """Convert an item to server-sent events."""
        if item.kind == "problem":
            return _data(to_openai_error(item.content))
        first = b"" if self._is_begun else self._chunk({"role": "assistant", "content": ""})
        self._is_begun = True
        if item.kind == "end":
            return first + self._end(item.content["summary"])
        words = thought = ""
        if self._spoken is None:
            thought = describe(item.content)
        elif item.kind == "delta":
            words = self._spoken.add_piece(item.content)
        elif item.content["kind"] == "model.reply":
            words = self._spoken.add_reply(item.content)
        else:
            thought = describe(item.content, has_thought=False)
        first += self._chunk({"content": words}) if words else b""
        return first + (self._chunk({"reasoning_content": f"{thought}\n"}) if thought else b"")

    def _end(self, summary: Mapping[str, Any]) -> bytes:
        if summary["state"] == "error":
            return _data(to_openai_error(to_problem(AgentRunFailed(self._turn.conversation_id, summary))))
        answer = answer_in(summary, self._chat)
        rest = answer if self._spoken is None else self._spoken.finish(answer)
        parts = [self._chunk({"content": rest}) if rest else b"", self._chunk({}, "stop")]
        if self._has_usage:
            head = self._turn.head("chat.completion.chunk")
            parts.append(_data(head | {"choices": [], "usage": self._turn.usage(summary)}))
        return b"".join((*parts, b"data: [DONE]\n\n"))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _data(self._turn.head("chat.completion.chunk") | {"choices": [choice]})


def _data(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")
