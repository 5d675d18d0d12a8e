"""API keys over HTTP, for keys of operators: list, make and revoke them, as `deckhands key` does.

Holds: a new key has no scope that the key of its maker lacks, and expires no later than it. A token is shown once, and
is not kept for repeats. An operation is recorded before it is performed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from deckhands.server.auth.api_keys import (
    DEFAULT_BODY_BYTES,
    DEFAULT_REQUESTS_PER_MINUTE,
    DEFAULT_STREAMS,
    KEY_ID,
    ApiKey,
    ApiKeys,
    Scope,
)
from deckhands.server.dependencies import AdminOfAll, GatewayOf, ReasonQuery
from deckhands.server.models import MOMENT
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/keys", tags=["keys"])
KeyId = Annotated[str, Path(pattern=rf"^{KEY_ID.pattern}$", examples=["abcdefghij23"])]
MAX_DAYS = 3_660


class NewApiKey(JsonBody):
    """A key to make; see docs/serving.md#keys."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100, examples=["billing service"])
    tenant: str = Field(pattern=r"^(\*|[A-Za-z0-9_.-]{1,64})$", description="`*`: all tenants", examples=["acme"])
    scopes: list[Scope] = Field(default=[Scope.READ, Scope.WRITE], min_length=1, max_length=len(Scope))
    days: int | None = Field(default=None, ge=1, le=MAX_DAYS, description="its life; null: until it is revoked")
    requests_per_minute: int = Field(default=DEFAULT_REQUESTS_PER_MINUTE, ge=1, le=1_000_000)
    body_bytes: int = Field(default=DEFAULT_BODY_BYTES, ge=1_024, le=64 * 2**20)
    streams: int = Field(default=DEFAULT_STREAMS, ge=1, le=100_000)
    reason: str = Field(min_length=1, max_length=500, examples=["the billing service asks for it"])


class ShownApiKey(BaseModel):
    """A key without its secret. `state` is `good`, `expired` or `revoked`."""

    id: str = Field(examples=["abcdefghij23"])
    name: str = Field(examples=["billing service"])
    tenant: str = Field(examples=["acme"])
    scopes: list[str] = Field(examples=[["read", "write"]])
    state: str = Field(examples=["good"])
    created: AwareDatetime = Field(examples=[MOMENT])
    expires: AwareDatetime | None = Field(examples=[None])
    used: AwareDatetime | None = Field(default=None, examples=[MOMENT], description="its last use")
    requests_per_minute: int = Field(examples=[DEFAULT_REQUESTS_PER_MINUTE])


class AddedApiKey(ShownApiKey):
    """A new key with its token, which is never shown again."""

    token: str = Field(examples=["dh_abcdefghij23_…"])


@routes.get("", summary="List API keys")
async def listing(gateway: GatewayOf, _principal: AdminOfAll) -> list[ShownApiKey]:
    """List the API keys of this server, oldest first."""
    found = await ApiKeys(gateway.store).all()
    return [_to_shown(gateway, each.key).model_copy(update={"used": each.used}) for each in found]


@routes.post("", status_code=201, summary="Make an API key")
async def add(gateway: GatewayOf, principal: AdminOfAll, new: NewApiKey) -> AddedApiKey:
    """Make an API key, which expires no later than yours. A repeated request makes another one."""
    for scope in new.scopes:
        principal.require(scope)
    life = None if new.days is None else timedelta(days=new.days)
    now = gateway.store.clock.now()
    if principal.key.expires is not None and (life is None or now + life > principal.key.expires):
        raise Problem(
            403,
            "key_would_outlive",
            f"Your key expires at {principal.key.expires:%Y-%m-%d %H:%M} UTC, and this one would outlive it.",
            remedy="Use a key without an end, or `deckhands key add`.",
        )
    await gateway.record(principal, "key.add", f"{new.name} for {new.tenant}", new.reason)
    made, token = await ApiKeys(gateway.store).add(
        new.name,
        tenant=new.tenant,
        scopes=new.scopes,
        life=life,
        requests_per_minute=new.requests_per_minute,
        body_bytes=new.body_bytes,
        streams=new.streams,
    )
    return AddedApiKey(**_to_shown(gateway, made).model_dump(), token=token)


@routes.delete("/{key_id}", summary="Revoke an API key", responses={422: {"description": "there is no such key"}})
async def revoke(gateway: GatewayOf, principal: AdminOfAll, key_id: KeyId, reason: ReasonQuery) -> ShownApiKey:
    """Revoke an API key; its open streams end within 15 s. It stays in the listing."""
    await gateway.record(principal, "key.revoke", key_id, reason)
    return _to_shown(gateway, await ApiKeys(gateway.store).revoke(key_id))


def _to_shown(gateway: GatewayOf, key: ApiKey) -> ShownApiKey:
    return ShownApiKey(
        **key.model_dump(include={"id", "name", "tenant", "created", "expires", "requests_per_minute"}),
        scopes=sorted(key.scopes),
        state=key.state(gateway.store.clock.now()),
    )
