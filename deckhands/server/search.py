"""The search in the texts of all conversations, over HTTP.

Holds: a request works for two seconds; a tenant has one search at a time, and the server two, whose tenants take turns.
The query is words, not a pattern, so no query costs more than another.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, BaseModel, Field

from deckhands.client import FoundConversation, SearchQuery
from deckhands.server.conversations import make_selection
from deckhands.server.dependencies import MAX_EVENT_ID, GatewayOf, Reader
from deckhands.server.models import ID, MOMENT

routes = APIRouter(prefix="/search", tags=["conversations"])


class FoundMatch(BaseModel):
    """Where a conversation has the words: the first event that has all of them; null for its title."""

    event_id: int | None = Field(default=None, ge=1, le=MAX_EVENT_ID, examples=[7])
    snippet: str = Field(examples=["the parser test fails with a timeout"])


class SearchedConversation(BaseModel):
    """A conversation that has the words."""

    conversation_id: str = Field(examples=[ID])
    title: str = Field(examples=["Fix the parser"])
    state: str = Field(examples=["finished"])
    tenant: str = Field(default="", examples=["acme"])
    labels: dict[str, str] = Field(default_factory=dict, examples=[{"team": "billing"}])
    updated: AwareDatetime | None = Field(default=None, examples=[MOMENT])
    is_archived: bool = False
    match: FoundMatch


class SearchResults(BaseModel):
    """The conversations that a request has found, and how far it has come.

    Attributes:
        searched: the number of conversations that this request has searched to their end.
        unreadable: the number of those whose log is damaged, or encrypted with a key that the server lacks.
        place: where the search continues: `store`, `archive`, or `listing` while the server lists the archive.
        reached: the search has seen what was created (in the archive: written) after this time.
        next_cursor: for the next request; null at the end.
    """

    conversations: list[SearchedConversation]
    searched: int = Field(examples=[120])
    unreadable: int = Field(default=0, examples=[0])
    place: Literal["store", "listing", "archive"] = "store"
    reached: AwareDatetime | None = Field(default=None, examples=[MOMENT])
    next_cursor: str | None = Field(default=None, examples=["czowOjE3NjM5MTYwMDAwMDA6MDFLOQ"])


@routes.get("", summary="Search the texts of conversations")
async def search(
    gateway: GatewayOf,
    principal: Reader,
    text: Annotated[
        str, Query(description="up to ten words; a title, task or other event has all of them", max_length=300)
    ],
    state: Annotated[list[str], Query(description="only conversations in one of these states")] = [],  # noqa: B006
    *,
    label: Annotated[list[str], Query(description="KEY=VALUE; all must match")] = [],  # noqa: B006
    tenant: Annotated[
        str | None, Query(description="only this tenant's; for keys of all tenants", max_length=64)
    ] = None,
    place: Annotated[
        Literal["", "store", "archive"], Query(description="search only the store or only the archive")
    ] = "",
    cursor: Annotated[str, Query(description="`next_cursor` of the previous request", max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> SearchResults:
    """Search the conversations of the key's tenant, newest first: those of the store, then archived ones.

    A request ends after about two seconds, also when it has found nothing yet; continue with `next_cursor` until it
    is null.
    """
    query = SearchQuery.parse(text, make_selection(principal, state, label, tenant), place)
    if not principal.is_for_all_tenants and tenant not in (None, principal.tenant):
        return SearchResults(conversations=[], searched=0)
    end = await gateway.searches.take(principal.tenant)
    try:
        async with gateway.search_slots:
            page = await gateway.client.text_search.load_page(query, cursor, limit=limit)
    finally:
        end()
    return SearchResults(
        conversations=[_show(found) for found in page.found],
        searched=page.searched,
        unreadable=page.unreadable,
        place=page.place,
        reached=page.reached,
        next_cursor=page.next_cursor,
    )


def _show(found: FoundConversation) -> SearchedConversation:
    return SearchedConversation(
        conversation_id=found.conversation_id,
        title=found.title,
        state=found.state,
        tenant=found.tenant,
        labels=dict(found.labels),
        updated=found.updated,
        is_archived=found.is_archived,
        match=FoundMatch(event_id=found.match.event_id, snippet=found.match.snippet),
    )
