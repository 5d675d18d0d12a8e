"""Login of a page with a one-time link."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from deckhands.server.auth.api_keys import Refused
from deckhands.server.dependencies import GatewayOf

routes = APIRouter(tags=["web"])


class NewEntry(BaseModel):
    """The ticket of a one-time link."""

    model_config = ConfigDict(extra="forbid")

    ticket: str = Field(pattern=r"^[\w-]{20,100}$", examples=["Yl3o0hQ2Xk5b9sVtq1cWmA7uZr8e4dGf6jTnPiLxOyE"])


class Entry(BaseModel):
    """The key of a one-time link."""

    token: str = Field(examples=["dh_…"])


@routes.post("/entries", status_code=201, summary="Enter by a one-time link")
async def enter(gateway: GatewayOf, new: NewEntry) -> Entry:
    """Exchange the ticket of `deckhands open --link` for its key, once. Needs no key."""
    token = await gateway.tickets.take_entry(new.ticket)
    if not token:
        raise Refused("unauthorized", "The link is no longer valid.", remedy="Make a new one: deckhands open --link.")
    return Entry(token=token)
