"""The events of a conversation: pages, optionally of some kinds, and single events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from broker.contract import Event, decode_any
from broker.runtime import CorruptEntry, UnknownConversation
from deckhands.client import Client
from deckhands.server.conversations import ReadableId
from deckhands.server.dependencies import MAX_EVENT_ID, GatewayOf, Reader
from deckhands.server.models import EVENT, EventPage, count_chars, event_json
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/conversations/{conversation_id}/events", tags=["events"])
SCANNED = 2_000
"""A page ends after this many events were read, even if too few of them belong to it."""
PAGE_CHARS = 256 * 1024
"""The total length of the texts of a page, unless it has only one event."""
WHOLE_EVENTS = 50


async def _read_events(
    client: Client, conversation_id: str, after: int, limit: int, *, is_whole: bool = False
) -> list[Event]:
    """Return up to `limit` events above `after`, from the store or the archive."""
    try:
        events = await client.log.read(conversation_id, after=after, until=after + limit, decode=decode_any)
        if not events:
            await client.log.load_last_id(conversation_id)
        if is_whole:
            events = [await client.log.blobs.restore_event(conversation_id, event) for event in events]
    except (UnknownConversation, CorruptEntry):
        if not await client.is_archived(conversation_id):
            raise
        events = await client.events(conversation_id, after=after, is_whole=is_whole, is_lenient=True)
        events = events[:limit]
    return events


@routes.get("", summary="List events")
async def page(
    gateway: GatewayOf,
    _principal: Reader,
    conversation_id: ReadableId,
    after: Annotated[int, Query(ge=0, le=MAX_EVENT_ID, description="only events with a higher id")] = 0,
    *,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    whole: Annotated[bool, Query(description="long texts are sent in full; a page then has up to 50 events")] = False,
    kind: Annotated[list[str], Query(description="only events of one of these kinds, such as `action.message`")] = [],  # noqa: B006
) -> EventPage:
    """List events in order, from the store or the archive. Long texts are cut to head and tail; a single event has all.

    A page may hold fewer than `limit` if texts are long or `kind` is given; continue with `next_after` until it is
    null.
    """
    limit = min(limit, WHOLE_EVENTS) if whole else limit
    found: list[dict[str, Any]] = []
    place, room = after, PAGE_CHARS
    while len(found) < limit and place - after < SCANNED:
        wanted = limit if not kind or whole else 500
        events = await _read_events(gateway.client, conversation_id, place, wanted, is_whole=whole)
        for event in events:
            if not kind or event.kind in kind:
                content = dict(event_json(event))
                room -= count_chars(content)
                if len(found) == limit or (found and room < 0):
                    return EventPage(events=found, next_after=place)
                found.append(content)
            place = event.id
        if len(events) < wanted:
            return EventPage(events=found)
    return EventPage(events=found, next_after=place)


SINGLE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": EVENT}}}}


@routes.get("/{event_id}", summary="Show an event", responses=SINGLE)
async def single(
    gateway: GatewayOf, _principal: Reader, conversation_id: ReadableId, event_id: Annotated[int, Path(le=MAX_EVENT_ID)]
) -> dict[str, Any]:
    """Show one event with its full texts."""
    client = gateway.client
    events = await _read_events(client, conversation_id, event_id - 1, 1) if event_id > 0 else []
    if not events:
        raise Problem(404, "unknown_event", f"The conversation has no event {event_id}.")
    if await client.is_archived(conversation_id):
        whole = await client.events(conversation_id, after=event_id - 1, is_whole=True, is_lenient=True)
        return dict(event_json(whole[0]))
    return dict(event_json(await client.log.blobs.restore_event(conversation_id, events[0])))
