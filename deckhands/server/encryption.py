"""The keys that encrypt conversations at rest: list, rotate and delete them, as `deckhands encryption` does.

Holds: no answer contains a key. An operation is recorded before it is performed.
Does not: let the store rewrite its append-only file after a deletion, which the server's user may not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from broker.store import DataKeyRecord
from deckhands.server.dependencies import AdminOfAll, GatewayOf, Reason, ReasonQuery
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/encryption", tags=["encryption"])
Tenant = Annotated[str, Query(max_length=200, description="the tenant; empty for conversations without one")]


class ShownDataKey(BaseModel):
    """The data key of a tenant. `is_readable` says whether this server has its master key."""

    tenant: str = Field(examples=["acme"])
    key: str = Field(description="the id of the data key", examples=["b0sTd8Qf"])
    master_key: str = Field(description="the id of the master key that encrypts it", examples=["2026-12"])
    is_readable: bool

    @classmethod
    def of(cls, record: DataKeyRecord, masters: Sequence[str]) -> Self:
        """Convert a record of the store."""
        is_readable = record.master_id in masters
        return cls(tenant=record.tenant, key=record.key_id, master_key=record.master_id, is_readable=is_readable)


class Rotated(BaseModel):
    """The outcome of a rotation: how many data keys were encrypted again, and with which master key."""

    changed: int = Field(examples=[12])
    master_key: str = Field(examples=["2026-12"])


class Forgotten(BaseModel):
    """The tenant whose data key was deleted: all data encrypted with it is unreadable."""

    tenant: str = Field(examples=["acme"])


@routes.get("/keys", summary="List the keys of tenants")
async def keys(gateway: GatewayOf, _principal: AdminOfAll) -> list[ShownDataKey]:
    """List the data keys of tenants, and the master key of each; see docs/archive.md#encryption-at-rest."""
    masters = gateway.store.masters.ids
    return [ShownDataKey.of(record, masters) for record in await gateway.store.encryption.list_keys()]


@routes.post(
    "/rotate",
    summary="Rotate the master key",
    responses={409: {"description": "this server has no master key"}, 503: {"description": "keys could not be read"}},
)
async def rotate(gateway: GatewayOf, principal: AdminOfAll, why: Reason) -> Rotated:
    """Encrypt the data keys with this server's first master key. Conversations stay as they are.

    Repeat it after a failure; that encrypts only the remaining keys.
    """
    masters = gateway.store.masters.ids
    if not masters:
        raise Problem(
            409,
            "no_master_key",
            "This server has no master key.",
            remedy="Set DECKHANDS_MASTER_KEYS or DECKHANDS_MASTER_KEYS_FILE.",
        )
    await gateway.record(principal, "encryption.rotate", masters[0], why.reason)
    changed = await gateway.store.encryption.rotate()
    return Rotated(changed=changed, master_key=masters[0])


@routes.delete(
    "/keys", summary="Delete the key of a tenant", responses={404: {"description": "the tenant has no data key"}}
)
async def forget(gateway: GatewayOf, principal: AdminOfAll, tenant: Tenant, reason: ReasonQuery) -> Forgotten:
    """Delete the data key of a tenant: its conversations, checkpoints and archives become unreadable, for ever."""
    await gateway.record(principal, "encryption.forget", tenant, reason)
    if not await gateway.store.encryption.delete_key(tenant):
        whose = f"the tenant {tenant}" if tenant else "no tenant"
        raise Problem(
            404, "unknown_data_key", f"There is no data key of {whose}.", remedy="GET /encryption/keys lists them."
        )
    return Forgotten(tenant=tenant)
