"""The events of a conversation by the routes of OpenHands' agent server: search, count, get, and send a message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import JSONResponse, Response

from deckhands.server.dependencies import GatewayOf, Writer
from deckhands.server.openhands import running
from deckhands.server.openhands.conversations import CONFLICT, Success
from deckhands.server.openhands.parts import Parts, ReadableId, WritableId
from deckhands.server.openhands.requests import ConfirmationReply, SentMessage
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/api/conversations/{conversation_id}/events", tags=["openhands-events"])
MAX_PAGE = 100
MAX_IDS = 100
EVENT = {
    "kind": "MessageEvent",
    "id": "5b5f7a3e-7f0f-5a55-9c0b-2b8a5f7c1d2e",
    "timestamp": "2026-03-01T06:00:00.000000",
    "source": "user",
    "llm_message": {"role": "user", "content": [{"type": "text", "text": "List the files"}]},
}
PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": {"items": [EVENT], "next_page_id": None}}}}
}
SINGLE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": EVENT}}}}


class Filters:
    """Which events a request is about."""

    def __init__(
        self,
        kind: Annotated[str | None, Query(max_length=300, description="a kind of event, such as `ActionEvent`")] = None,
        source: Annotated[str | None, Query(max_length=100, description="`agent`, `user` or `environment`")] = None,
        body: Annotated[str | None, Query(max_length=1_000, description="a part of the text, in any case")] = None,
        timestamp__gte: Annotated[
            datetime | None, Query(description="only events at or after this time; in UTC without a zone")
        ] = None,
        timestamp__lt: Annotated[
            datetime | None, Query(description="only events before this time; in UTC without a zone")
        ] = None,
    ) -> None:
        self._kind = kind.rpartition(".")[2] if kind else None
        self._source, self._body = source, body.lower() if body else None
        self._first, self._end = format_moment(timestamp__gte), format_moment(timestamp__lt)

    def match(self, event: Mapping[str, Any]) -> bool:
        """Return whether the request is about an event."""
        return (
            (self._kind is None or event["kind"] == self._kind)
            and (self._source is None or event["source"] == self._source)
            and (self._first is None or event["timestamp"] >= self._first)
            and (self._end is None or event["timestamp"] < self._end)
            and (self._body is None or self._body in _text_of(event).lower())
        )


def format_moment(moment: datetime | None) -> str | None:
    """Return a time in the form used in events; None if there is none."""
    if moment is None:
        return None
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="microseconds")


def _text_of(event: Mapping[str, Any]) -> str:
    """Return the text of a message; empty for other events."""
    message = event.get("llm_message") or {}
    return "\n".join(str(part.get("text", "")) for part in message.get("content") or ())


@routes.get("/search", response_class=JSONResponse, responses=PAGE, summary="List events in OpenHands' form")
async def search(
    gateway: GatewayOf,
    parts: Parts,
    conversation_id: ReadableId,
    filters: Annotated[Filters, Depends()],
    page_id: Annotated[str | None, Query(max_length=100, description="`next_page_id` of the previous page")] = None,
    *,
    limit: Annotated[int, Query(gt=0, le=MAX_PAGE)] = MAX_PAGE,
    sort_order: Literal["TIMESTAMP", "TIMESTAMP_DESC"] = "TIMESTAMP",
) -> Response:
    """List the events that match, in the order of the log or in the opposite one."""
    log = await parts.logs.load(gateway.client, conversation_id, needs_events=True)
    is_reverse = sort_order == "TIMESTAMP_DESC"
    if page_id is not None and page_id not in log.places:
        raise Problem(400, "unknown_page", "page_id: there is no such event.", remedy="Start without page_id.")
    start = log.places.get(page_id or "", len(log.events) - 1 if is_reverse else 0)
    places = range(start, -1, -1) if is_reverse else range(start, len(log.events))
    items: list[dict[str, Any]] = []
    for place in places:
        event = log.events[place]
        if filters.match(event):
            if len(items) == limit:
                return JSONResponse({"items": items, "next_page_id": event["id"]})
            items.append(event)
    return JSONResponse({"items": items, "next_page_id": None})


@routes.get("/count", summary="Count events")
async def count(
    gateway: GatewayOf, parts: Parts, conversation_id: ReadableId, filters: Annotated[Filters, Depends()]
) -> int:
    """Count the events that match."""
    log = await parts.logs.load(gateway.client, conversation_id, needs_events=True)
    return sum(filters.match(event) for event in log.events)


@routes.post("/respond_to_confirmation", responses=CONFLICT, summary="Confirm or reject the pending action")
async def respond_to_confirmation(
    gateway: GatewayOf, principal: Writer, parts: Parts, conversation_id: WritableId, reply: ConfirmationReply
) -> Success:
    """Run the action that awaits confirmation, or reject it: the agent then waits for `…/run`."""
    await running.respond(gateway, parts, principal, conversation_id, reply)
    return Success()


@routes.get("/{event_id}", response_class=JSONResponse, responses=SINGLE, summary="Show an event in OpenHands' form")
async def single(
    gateway: GatewayOf, parts: Parts, conversation_id: ReadableId, event_id: Annotated[str, Path(max_length=100)]
) -> Response:
    """Show one event."""
    log = await parts.logs.load(gateway.client, conversation_id, needs_events=True)
    if event_id not in log.places:
        raise Problem(404, "unknown_event", "The conversation has no such event.")
    return JSONResponse(log.events[log.places[event_id]])


@routes.get("", response_class=JSONResponse, summary="Show several events in OpenHands' form")
async def batch(
    gateway: GatewayOf,
    parts: Parts,
    conversation_id: ReadableId,
    event_ids: Annotated[list[str], Query(max_length=MAX_IDS, description="the ids of events")],
) -> Response:
    """Show events by their ids; null for an unknown id."""
    log = await parts.logs.load(gateway.client, conversation_id, needs_events=True)
    return JSONResponse([log.events[log.places[name]] if name in log.places else None for name in event_ids])


@routes.post("", responses=CONFLICT, summary="Send a message to the agent")
async def send(
    gateway: GatewayOf, principal: Writer, parts: Parts, conversation_id: WritableId, message: SentMessage
) -> Success:
    """Send a message. The agent starts to work if `run` is true, and otherwise waits for `…/run`."""
    await running.send_message(gateway, parts, principal, conversation_id, message)
    return Success()
