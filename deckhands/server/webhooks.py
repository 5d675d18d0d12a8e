"""Webhooks over HTTP: a key manages the webhooks of its tenant.

Holds: a webhook of another tenant appears not to exist; a secret is shown once.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.responses import Response

from broker.runtime import BrokerSettings
from deckhands.operations import (
    MAX_CHOSEN,
    MAX_URL_CHARS,
    SETTLED,
    Chosen,
    Delivery,
    UnknownWebhook,
    Webhook,
    WebhookCheck,
    WebhookRepository,
    parse_networks,
    resolve_address,
)
from deckhands.server.dependencies import (
    MATCHED,
    GatewayOf,
    IfMatch,
    Operator,
    Precondition,
    Reader,
    Reason,
    ReasonQuery,
    etag_of,
)
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import ID, MOMENT
from deckhands.server.openapi.json_body import JsonBody

routes = APIRouter(prefix="/webhooks", tags=["webhooks"])
WebhookId = Annotated[str, Path(pattern=r"^wh_[a-z2-7]{16}$", examples=["wh_aaaabbbbccccdddd"])]
DeliveryId = Annotated[str, Path(pattern=r"^msg_[0-9a-f]{32}$", examples=["msg_0123456789abcdef0123456789abcdef"])]


class NewWebhook(JsonBody):
    """The address to notify, and the events to notify it about; see docs/producing-work.md#webhooks."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(min_length=9, max_length=MAX_URL_CHARS, examples=["https://app.example/deckhands"])
    events: list[Chosen] = Field(default=[SETTLED], min_length=1, max_length=MAX_CHOSEN, examples=[[SETTLED]])
    conversation_id: str = Field(
        default="", max_length=64, description="the only conversation to report; empty for all of the tenant"
    )
    reason: str = Field(min_length=1, max_length=500, examples=["the billing service asks for it"])


class ShownWebhook(BaseModel):
    """A webhook without its secret."""

    id: str = Field(examples=["wh_aaaabbbbccccdddd"])
    tenant: str = Field(examples=["acme"])
    url: str = Field(examples=["https://app.example/deckhands"])
    events: list[str] = Field(examples=[[SETTLED]])
    conversation_id: str = Field(examples=[""])
    is_enabled: bool
    created: AwareDatetime = Field(examples=[MOMENT])
    why_off: str = Field(examples=[""], description="why it was disabled automatically; empty if it was not")


class AddedWebhook(ShownWebhook):
    """A new webhook, with the secret that verifies signatures; it is never shown again."""

    secret: str = Field(examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"])


class ShownDelivery(BaseModel):
    """A delivery and its progress."""

    id: str = Field(examples=["msg_0123456789abcdef0123456789abcdef"])
    conversation_id: str = Field(examples=[ID])
    event_id: int = Field(examples=[14])
    type: str = Field(examples=[SETTLED])
    planned: AwareDatetime = Field(examples=[MOMENT])
    state: str = Field(examples=["delivered"], description="waiting, delivered or failed")
    attempts: int = Field(examples=[1])
    next_attempt: AwareDatetime | None = Field(examples=[None])
    status: int | None = Field(
        examples=[204], description="the HTTP status of the latest attempt; null if there was no answer"
    )
    error: str = Field(examples=[""])


def _repository(gateway: Gateway) -> WebhookRepository:
    return WebhookRepository(gateway.store, gateway.client.secrets)


async def _visible(gateway: Gateway, principal: Principal, webhook_id: str) -> Webhook:
    found = await _repository(gateway).webhook(webhook_id)
    if not principal.is_for_all_tenants and found.tenant != principal.tenant:
        raise UnknownWebhook("There is no such webhook.", remedy="`deckhands webhook ls` lists them.")
    return found


def _to_shown_webhook(hook: Webhook) -> ShownWebhook:
    return ShownWebhook(**hook.model_dump(exclude={"secret", "token"}))


def _to_shown_delivery(delivery: Delivery) -> ShownDelivery:
    return ShownDelivery(**delivery.model_dump(exclude={"body"}))


@routes.get("", summary="List webhooks")
async def listing(gateway: GatewayOf, principal: Reader) -> list[ShownWebhook]:
    """List the webhooks of the tenant, oldest first."""
    found = await _repository(gateway).all()
    return [
        _to_shown_webhook(hook) for hook in found if principal.is_for_all_tenants or hook.tenant == principal.tenant
    ]


@routes.post("", status_code=201, summary="Add a webhook")
async def add(gateway: GatewayOf, principal: Operator, new: NewWebhook) -> AddedWebhook:
    """Add a webhook for all conversations of the key's tenant, or for one of them."""
    if new.conversation_id:
        await gateway.require_visible(principal, new.conversation_id)
    await resolve_address(new.url, parse_networks(BrokerSettings.from_env().webhook_private))
    await gateway.record(principal, "webhook.add", new.url[:200], new.reason)
    events = tuple(dict.fromkeys(new.events))
    hook, secret = await _repository(gateway).add(principal.tenant, new.url, events, new.conversation_id)
    return AddedWebhook(**_to_shown_webhook(hook).model_dump(), secret=secret)


@routes.get("/{webhook_id}", summary="Show a webhook")
async def show(gateway: GatewayOf, principal: Reader, webhook_id: WebhookId, response: Response) -> ShownWebhook:
    """Show a webhook, with an ETag; its secret is not shown."""
    shown = _to_shown_webhook(await _visible(gateway, principal, webhook_id))
    response.headers["ETag"] = etag_of(shown)
    return shown


def _make_check(precondition: Precondition) -> WebhookCheck:
    return lambda hook: precondition.check(etag_of(_to_shown_webhook(hook)))


async def _set_enabled(
    gateway: Gateway,
    principal: Principal,
    webhook_id: str,
    reason: str,
    precondition: Precondition,
    *,
    is_enabled: bool,
) -> ShownWebhook:
    check = _make_check(precondition)
    check(await _visible(gateway, principal, webhook_id))
    await gateway.record(principal, "webhook.enable" if is_enabled else "webhook.disable", webhook_id, reason)
    return _to_shown_webhook(await _repository(gateway).set_enabled(webhook_id, is_enabled=is_enabled, check=check))


@routes.post("/{webhook_id}/enable", summary="Enable a webhook", responses=MATCHED)
async def enable(
    gateway: GatewayOf, principal: Operator, webhook_id: WebhookId, why: Reason, precondition: IfMatch
) -> ShownWebhook:
    """Enable a webhook. It gets events that happen from now on."""
    return await _set_enabled(gateway, principal, webhook_id, why.reason, precondition, is_enabled=True)


@routes.post("/{webhook_id}/disable", summary="Disable a webhook", responses=MATCHED)
async def disable(
    gateway: GatewayOf, principal: Operator, webhook_id: WebhookId, why: Reason, precondition: IfMatch
) -> ShownWebhook:
    """Disable a webhook. It never gets events that happen while it is disabled; waiting deliveries are still sent."""
    return await _set_enabled(gateway, principal, webhook_id, why.reason, precondition, is_enabled=False)


@routes.delete("/{webhook_id}", status_code=204, summary="Remove a webhook", responses=MATCHED)
async def remove(
    gateway: GatewayOf, principal: Operator, webhook_id: WebhookId, reason: ReasonQuery, precondition: IfMatch
) -> Response:
    """Remove a webhook with all its deliveries."""
    check = _make_check(precondition)
    check(await _visible(gateway, principal, webhook_id))
    await gateway.record(principal, "webhook.remove", webhook_id, reason)
    await _repository(gateway).remove(webhook_id, check=check)
    return Response(status_code=204)


@routes.get("/{webhook_id}/deliveries", summary="List the deliveries of a webhook")
async def deliveries(
    gateway: GatewayOf, principal: Reader, webhook_id: WebhookId, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> list[ShownDelivery]:
    """List the latest deliveries, newest first: those that wait, and the last 200 that ended."""
    await _visible(gateway, principal, webhook_id)
    return [_to_shown_delivery(found) for found in await _repository(gateway).deliveries(webhook_id, limit=limit)]


@routes.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", summary="Repeat a delivery")
async def redeliver(
    gateway: GatewayOf, principal: Operator, webhook_id: WebhookId, delivery_id: DeliveryId, why: Reason
) -> ShownDelivery:
    """Repeat a delivery, under the same id and with the same body."""
    await _visible(gateway, principal, webhook_id)
    await gateway.record(principal, "webhook.redeliver", f"{webhook_id} {delivery_id}", why.reason)
    return _to_shown_delivery(await _repository(gateway).redeliver(webhook_id, delivery_id))
