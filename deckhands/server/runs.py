"""A whole run in one request: create a conversation, and wait for its end or follow it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from deckhands.server.conversations import submit_once
from deckhands.server.dependencies import GatewayOf, IdempotencyKey, Reader, Writer
from deckhands.server.live import SseResponse, wait_until_settled
from deckhands.server.models import ConversationResult, NewConversation
from deckhands.server.streams import EventStream, reserve_stream

routes = APIRouter(prefix="/runs", tags=["runs"])
DEFAULT_SECONDS = 300.0
LONGEST_SECONDS = 3_600.0
WAITS: dict[int | str, dict[str, Any]] = {
    202: {"model": ConversationResult, "description": "it has not settled within the timeout, and continues"}
}


@routes.post("/wait", responses=WAITS, response_model=ConversationResult, summary="Run a task and wait for its end")
async def wait(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    request: Request,
    *,
    task: NewConversation,
    timeout_seconds: Annotated[float, Query(gt=0, le=LONGEST_SECONDS)] = DEFAULT_SECONDS,
    key: IdempotencyKey = None,
) -> Response:
    """Create a conversation and answer when it has settled: it finished, failed, or needs an answer.

    After the timeout the answer has the status 202 and the run continues. A repeated request with the same
    `Idempotency-Key` waits for the same run.
    """
    reserve_stream(gateway, principal)
    conversation_id = await submit_once(gateway, principal, request, task, key)
    result = await wait_until_settled(gateway, request, conversation_id, timeout_seconds=timeout_seconds)
    return Response(
        result.model_dump_json(),
        200 if result.is_settled else 202,
        {"Location": f"/conversations/{conversation_id}"},
        "application/json",
    )


@routes.post(
    "/stream",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {"example": 'event: end\ndata: {"reason":"settled"}\n\n'}}}},
    summary="Run a task and follow it (server-sent events)",
)
async def stream(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    request: Request,
    *,
    task: NewConversation,
    deltas: Annotated[bool, Query(description="also send pieces of the current reply")] = False,
    key: IdempotencyKey = None,
) -> Response:
    """Create a conversation and follow it until it has settled.

    The header `Location` names it; an interrupted stream resumes at `GET /conversations/{id}/stream?until=settled`.
    """
    reserve_stream(gateway, principal)
    conversation_id = await submit_once(gateway, principal, request, task, key, is_watched=deltas)
    events = EventStream(gateway, principal, conversation_id, deltas=deltas, until_settled=True)
    return SseResponse(gateway, events, {"Location": f"/conversations/{conversation_id}"})
