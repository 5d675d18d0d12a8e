"""Agents behind OpenAI's Responses API: what chat completions are, with ids that continue a conversation.

Holds: the id of a response names its conversation and the event before it, so any server knows it; the text of an
answer is what the agent said last, and of a stream all that it says, as it is written, each word once.
Does not: keep responses; `GET /conversations/ID` has what became of one.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from broker.runtime.errors import EventsLost
from deckhands.client.errors import NotSettled
from deckhands.protocols.chat import AgentFailed, turn_of
from deckhands.protocols.response_events import Written
from deckhands.protocols.response_messages import ResponseRequest
from deckhands.server.conversations import result_of
from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import ID
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS
from deckhands.server.streams import EventStream

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
    """Begin a conversation with the input, or continue the one of `previous_response_id` with it.

    The answer comes when the conversation has settled. After the timeout its status is `incomplete`, and the
    conversation continues.
    """
    chat = asked.as_chat()
    is_live = bool(asked.stream) and deltas and not chat.is_formed
    turn = await turn_of(gateway, principal, request, chat, key, is_live=is_live)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    written = Written(turn, asked, chat, is_live=is_live)
    if asked.stream:
        events = EventStream(
            gateway,
            principal,
            turn.conversation_id,
            after=turn.after,
            deltas=is_live,
            until_settled=True,
            is_said_whole=True,
        )
        return SseResponse(gateway, events, headers, head=ALIVE + written.first(), written=written.of)
    with contextlib.suppress(NotSettled, EventsLost):
        await gateway.follower.wait_until_settled(turn.conversation_id, timeout_seconds=timeout_seconds)
    result = await result_of(gateway.client, turn.conversation_id)
    if result.is_settled and result.summary["state"] == "error":
        raise AgentFailed(turn.conversation_id, result.summary)
    return JSONResponse(written.whole(result.summary if result.is_settled else None), headers=headers)
