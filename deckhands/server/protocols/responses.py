"""Agents behind OpenAI's Responses API: like chat completions, with ids that continue a conversation.

Holds: the id of a response names its conversation and the event before it, so any server can resolve it; the text of an
answer is the agent's last message; a stream has all its messages, as they are written, each word once.
Does not: store responses; `GET /conversations/ID` shows the result of one.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import ID
from deckhands.server.protocols.chat import answered, events_of, turn_of
from deckhands.server.protocols.response_events import Written
from deckhands.server.protocols.response_messages import ResponseRequest
from deckhands.server.runs import DEFAULT_SECONDS, LONGEST_SECONDS

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
    turn = await turn_of(gateway, principal, request, chat, key, is_live=is_live)
    headers = {"Location": f"/conversations/{turn.conversation_id}"}
    written = Written(turn, asked, chat, is_live=is_live)
    if asked.stream:
        events = events_of(gateway, principal, turn, is_live=is_live)
        return SseResponse(gateway, events, headers, head=ALIVE + written.first(), written=written.of)
    result = await answered(gateway, request, turn, timeout_seconds)
    return JSONResponse(written.whole(result.summary if result.is_settled else None), headers=headers)
