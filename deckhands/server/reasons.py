"""Why a conversation makes no progress, over HTTP."""

from __future__ import annotations

from typing import Any, Self

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, Field

from broker.log import Conversations
from deckhands.client import Cause, Link, Why
from deckhands.server.auth.api_keys import Scope
from deckhands.server.conversations import ReadableId
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.models import ID, MOMENT

routes = APIRouter(prefix="/conversations", tags=["conversations"])


class ShownLink(BaseModel):
    """One step from the state to the cause.

    Attributes:
        cause: a code for programs.
        text: one sentence. It may contain text that a model or a command wrote.
        since: when it started; null if unknown.
        until: when it is expected to end; null if unknown.
        remedy: how to change it; empty if only time helps.
        details: the same as values.
        lines: of a log, oldest first.
        links: the explanation of another conversation that is the cause.
    """

    cause: Cause = Field(examples=["quota"])
    text: str = Field(examples=["Its next model call waits for its turn at the quota of openai/*."])
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    remedy: str = ""
    details: dict[str, Any] = Field(default_factory=dict, examples=[{"position": 3, "waiting": 12}])
    lines: list[str] = Field(default_factory=list)
    links: list[ShownLink] = Field(default_factory=list)

    @classmethod
    def of(cls, link: Link) -> Self:
        """Convert a link to the form of the API."""
        return cls.model_validate(link.as_json())


class ShownWhy(BaseModel):
    """Why a conversation is in its current state: a chain of links from the state to the cause."""

    conversation_id: str = Field(examples=[ID])
    state: str = Field(examples=["rate_limited"])
    wait_reason: str = Field(examples=["rate_limit"])
    at: AwareDatetime = Field(examples=[MOMENT])
    links: list[ShownLink]

    @classmethod
    def of(cls, why: Why) -> Self:
        """Convert an explanation to the form of the API."""
        return cls.model_validate(why.as_json())


class ShownTakeover(BaseModel):
    """A worker died, and its work on the conversation went to another.

    Attributes:
        action_id: the action that was taken over; null for the conversation itself.
        from_worker, to_worker: names, for keys with the scope `admin` for all tenants; empty for others.
    """

    at: AwareDatetime = Field(examples=[MOMENT])
    action_id: int | None = Field(examples=[None])
    from_worker: str = Field(examples=["n1:controller:4711"])
    to_worker: str = Field(examples=["n2:controller:17"])


@routes.get("/{conversation_id}/takeovers", summary="List takeovers")
async def takeovers(gateway: GatewayOf, principal: Reader, conversation_id: ReadableId) -> list[ShownTakeover]:
    """List the takeovers of the conversation and its actions from dead workers, oldest first.

    The store remembers the latest 10,000 takeovers of the cluster.
    """
    sees_workers = principal.is_for_all_tenants and Scope.ADMIN in principal.key.scopes
    return [
        ShownTakeover(
            at=one.at,
            action_id=one.action_id,
            from_worker=one.from_worker if sees_workers else "",
            to_worker=one.to_worker if sees_workers else "",
        )
        for one in await Conversations(gateway.store).list_takeovers()
        if one.conversation_id == conversation_id
    ]


@routes.get("/{conversation_id}/why", summary="Explain a wait")
async def why(gateway: GatewayOf, principal: Reader, conversation_id: ReadableId) -> ShownWhy:
    """Explain why the conversation is in its current state, and how to change that.

    Workers and nodes are shown only to keys with the scope `admin` for all tenants.
    """
    is_admin = Scope.ADMIN in principal.key.scopes
    return ShownWhy.of(
        await gateway.client.why(conversation_id, shows_workers=principal.is_for_all_tenants and is_admin)
    )
