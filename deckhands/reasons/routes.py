"""Why a conversation makes no progress, over HTTP."""

from __future__ import annotations

from typing import Any, Self

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, Field

from deckhands.access.api_keys import Scope
from deckhands.reasons.link import Cause, Link, Why
from deckhands.server.conversations import Seen
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.models import ID, MOMENT

routes = APIRouter(prefix="/conversations", tags=["conversations"])


class ShownLink(BaseModel):
    """One step from what one sees to its cause.

    Attributes:
        cause: what it says, for programs.
        text: one sentence. It may hold text that a model or a command has written.
        since: when it began; null: not known.
        until: when it is expected to end; null: nobody can say.
        remedy: what would change it; empty: only time.
        details: the same in values.
        lines: of a log, the latest last.
        links: why it is so where that is another conversation's matter.
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
        """Return a link in the form of the API."""
        return cls.model_validate(link.as_json())


class ShownWhy(BaseModel):
    """Why a conversation is where it is: a chain of links from what one sees to its cause."""

    conversation_id: str = Field(examples=[ID])
    state: str = Field(examples=["rate_limited"])
    wait_reason: str = Field(examples=["rate_limit"])
    at: AwareDatetime = Field(examples=[MOMENT])
    links: list[ShownLink]

    @classmethod
    def of(cls, why: Why) -> Self:
        """Return an explanation in the form of the API."""
        return cls.model_validate(why.as_json())


@routes.get("/{conversation_id}/why", summary="Explain a wait")
async def why(gateway: GatewayOf, principal: Reader, conversation_id: Seen) -> ShownWhy:
    """Explain why the conversation is where it is, and what would change it.

    Workers and nodes are named to keys with the scope `admin` for all tenants.
    """
    is_admin = principal.key is None or Scope.ADMIN in principal.key.scopes
    return ShownWhy.of(await gateway.client.why(conversation_id, shows_workers=principal.sees_all and is_admin))
