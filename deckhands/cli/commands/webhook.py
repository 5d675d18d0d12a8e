"""`deckhands webhook`: addresses to notify about conversations."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from broker.contract import Tenancy
from broker.runtime import BrokerSettings, UsageError, check_conversation_id
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.client import Client, count_columns, note, on_cluster, print_json, print_text, render_table
from deckhands.operations import (
    SETTLED,
    Delivery,
    Webhook,
    WebhookRepository,
    check_choice,
    parse_networks,
    resolve_address,
)

SECTION = "Operate a cluster"
SUMMARIES = {"webhook": "Notify other programs about conversations over HTTP: add, list and remove webhooks."}
HEAD = ("WEBHOOK", "TENANT", "URL", "EVENTS", "CONVERSATION", "STATE")
SPARE = ("CONVERSATION", "EVENTS")
DELIVERY_HEAD = ("DELIVERY", "CONVERSATION", "EVENT", "TYPE", "STATE", "ATTEMPTS", "STATUS", "ERROR")
DELIVERY_SPARE = ("ERROR", "ATTEMPTS", "TYPE")


@dataclass(frozen=True, slots=True)
class AddWebhookOptions:
    """Options of `webhook add`."""

    url: str
    tenant: str
    events: tuple[str, ...]
    conversation_id: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class RemoveWebhookOptions:
    """The argument of `webhook rm`."""

    webhook_id: str


@dataclass(frozen=True, slots=True)
class DeliveriesOptions:
    """Options of `webhook deliveries`."""

    webhook_id: str
    limit: int
    as_json: bool


@click.group()
def webhook() -> None:
    """Notify other programs about conversations over HTTP.

    The cluster needs a jobs worker, which `deckhands up` starts.
    """


@webhook.command()
@click.argument("url")
@click.option("--tenant", default="*", show_default=True, help="The tenant whose conversations it reports; '*': all.")
@click.option(
    "--event",
    "events",
    multiple=True,
    default=(SETTLED,),
    show_default=True,
    help="conversation.settled, conversation.waiting, conversation.state_changed, or a kind of event. May be repeated.",
)
@click.option("--conversation", "conversation_id", default="", metavar="ID", help="The only conversation to report.")
@json_option
@author_options
@with_options(AddWebhookOptions)
def add(options: AddWebhookOptions) -> None:
    """Add a webhook and print the secret that verifies its signatures. It cannot be shown again."""
    try:
        events = tuple(dict.fromkeys(map(check_choice, options.events)))
        if options.tenant != "*":
            Tenancy(tenant=options.tenant)
    except ValueError as error:
        raise UsageError(f"--event or --tenant cannot be used: {str(error).splitlines()[-1].strip()}.") from None
    conversation_id = check_conversation_id(options.conversation_id) if options.conversation_id else ""
    rules = parse_networks(BrokerSettings.from_env().webhook_private)

    async def create(client: Client) -> None:
        await resolve_address(options.url, rules)
        if conversation_id:
            await client.row(conversation_id)
        hook, secret = await _repository(client).add(options.tenant, options.url, events, conversation_id)
        if options.as_json:
            print_json({"id": hook.id, "secret": secret})
        else:
            note(f"The secret of the webhook {hook.id} is shown once:")
            print_text(secret)

    on_cluster(recording(create, "webhook.add", options.url[:200]))


@webhook.command()
@json_option
@with_options(ListOptions)
def ls(options: ListOptions) -> None:
    """List the webhooks. Their secrets are not shown."""
    found = on_cluster(lambda client: _repository(client).all())
    if options.as_json:
        for hook in found:
            print_json(hook.model_dump(mode="json", exclude={"secret", "token"}))
    elif found:
        rows = [_cells(hook) for hook in found]
        print_text("\n".join(render_table(HEAD, rows, columns=count_columns(sys.stdout), spare=SPARE)))
    else:
        note("There are no webhooks. `deckhands webhook add` creates one.")


@webhook.command()
@click.argument("webhook_id", metavar="WEBHOOK")
@author_options
@with_options(RemoveWebhookOptions)
def rm(options: RemoveWebhookOptions) -> None:
    """Delete WEBHOOK and its deliveries."""
    on_cluster(
        recording(lambda client: _repository(client).remove(options.webhook_id), "webhook.remove", options.webhook_id)
    )
    note(f"The webhook {options.webhook_id} is removed.")


@webhook.command()
@click.argument("webhook_id", metavar="WEBHOOK")
@click.option("--limit", type=click.IntRange(1, 1_000), default=20, show_default=True)
@json_option
@with_options(DeliveriesOptions)
def deliveries(options: DeliveriesOptions) -> None:
    """List the latest deliveries of WEBHOOK, newest first."""

    async def listed(client: Client) -> list[Delivery]:
        await _repository(client).webhook(options.webhook_id)
        return await _repository(client).deliveries(options.webhook_id, limit=options.limit)

    found = on_cluster(listed)
    if options.as_json:
        for delivery in found:
            print_json(delivery.model_dump(mode="json", exclude={"body"}))
    elif found:
        rows = [_delivery_cells(delivery) for delivery in found]
        print_text(
            "\n".join(render_table(DELIVERY_HEAD, rows, columns=count_columns(sys.stdout), spare=DELIVERY_SPARE))
        )
    else:
        note("There are no deliveries.")


def _repository(client: Client) -> WebhookRepository:
    return WebhookRepository(client.store, client.secrets)


def _cells(hook: Webhook) -> tuple[str, ...]:
    state = "on" if hook.is_enabled else "off"
    if not hook.is_enabled and hook.why_off:
        state = f"off: {hook.why_off}"
    return (hook.id, hook.tenant, hook.url, ",".join(hook.events), hook.conversation_id, state)


def _delivery_cells(delivery: Delivery) -> tuple[str, ...]:
    status = "" if delivery.status is None else str(delivery.status)
    about = (delivery.conversation_id, str(delivery.event_id), delivery.type, delivery.state)
    return (delivery.id, *about, str(delivery.attempts), status, delivery.error)
