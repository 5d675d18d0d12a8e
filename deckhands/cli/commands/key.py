"""`deckhands key`: the API keys of the server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import click

from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.cli.timing_options import parse_duration
from deckhands.client import Client, count_columns, note, on_cluster, print_json, print_text, render_table
from deckhands.server import (
    DEFAULT_BODY_BYTES,
    DEFAULT_REQUESTS_PER_MINUTE,
    DEFAULT_STREAMS,
    ApiKeys,
    ListedKey,
    Scope,
)

SECTION = "Operate a cluster"
SUMMARIES = {"key": "Create, list and revoke API keys of the server."}
HEAD = ("KEY", "NAME", "TENANT", "SCOPES", "STATE", "EXPIRES (UTC)", "LAST USED (UTC)", "PER MINUTE")
SPARE = ("PER MINUTE", "EXPIRES (UTC)", "LAST USED (UTC)")


@dataclass(frozen=True, slots=True)
class AddKeyOptions:
    """Options of `key add`."""

    name: str
    tenant: str
    scopes: tuple[str, ...]
    expires: str | None
    per_minute: int
    body_bytes: int
    streams: int
    as_json: bool


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The argument of `key revoke` and `key rm`."""

    key_id: str


@click.group()
def key() -> None:
    """Create, list and revoke API keys of the server (`deckhands serve`)."""


@key.command()
@click.argument("name")
@click.option("--tenant", required=True, help="The tenant whose conversations it may see; '*' means all tenants.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=("read", "write"),
    show_default=True,
    help="A scope of the key. May be repeated; no scope implies another.",
)
@click.option(
    "--expires", metavar="DURATION", help="How long it is valid, such as 90d; by default until it is revoked."
)
@click.option("--per-minute", type=click.IntRange(1, 1_000_000), default=DEFAULT_REQUESTS_PER_MINUTE, show_default=True)
@click.option(
    "--body-bytes",
    type=click.IntRange(1_024, 64 * 2**20),
    default=DEFAULT_BODY_BYTES,
    show_default=True,
    help="The largest body of a request, in bytes; files may be larger.",
)
@click.option(
    "--streams",
    type=click.IntRange(1, 100_000),
    default=DEFAULT_STREAMS,
    show_default=True,
    help="How many streams and waiting requests it may have open at one server.",
)
@json_option
@author_options
@with_options(AddKeyOptions)
def add(options: AddKeyOptions) -> None:
    """Create a key and print it. It cannot be shown again."""
    life = None if options.expires is None else timedelta(seconds=parse_duration(options.expires, "--expires"))

    async def create(client: Client) -> None:
        made, token = await ApiKeys(client.store).add(
            options.name,
            tenant=options.tenant,
            scopes=map(Scope, options.scopes),
            life=life,
            requests_per_minute=options.per_minute,
            body_bytes=options.body_bytes,
            streams=options.streams,
        )
        if options.as_json:
            print_json({"id": made.id, "token": token})
        else:
            note(f"The key {made.id} is shown once:")
            print_text(token)

    on_cluster(recording(create, "key.add", f"{options.name} for {options.tenant}"))


@key.command()
@json_option
@with_options(ListOptions)
def ls(options: ListOptions) -> None:
    """List the keys, with their last use. Their secrets are not in the store."""
    found = on_cluster(_list_keys)
    if options.as_json:
        for listed, state in found:
            print_json(_as_json(listed, state))
    elif found:
        rows = [_cells(listed, state) for listed, state in found]
        print_text("\n".join(render_table(HEAD, rows, columns=count_columns(sys.stdout), spare=SPARE)))
    else:
        note("There are no API keys. `deckhands key add` creates one.")


@key.command()
@click.argument("key_id", metavar="KEY")
@author_options
@with_options(KeyOptions)
def revoke(options: KeyOptions) -> None:
    """Revoke KEY; its open streams end within 15 s."""
    revoked = on_cluster(
        recording(lambda client: ApiKeys(client.store).revoke(options.key_id), "key.revoke", options.key_id)
    )
    note(f"The key {revoked.id} ({revoked.name}) is revoked.")


@key.command()
@click.argument("key_id", metavar="KEY")
@author_options
@with_options(KeyOptions)
def rm(options: KeyOptions) -> None:
    """Delete KEY, which is refused from now on."""
    on_cluster(recording(lambda client: ApiKeys(client.store).remove(options.key_id), "key.remove", options.key_id))
    note(f"The key {options.key_id} is removed.")


async def _list_keys(client: Client) -> list[tuple[ListedKey, str]]:
    now = client.store.clock.now()
    return [(listed, listed.key.state(now)) for listed in await ApiKeys(client.store).all()]


def _cells(listed: ListedKey, state: str) -> tuple[str, ...]:
    found = listed.key
    scopes = ",".join(scope.value for scope in Scope if scope in found.scopes)
    times = (_format_time(found.expires, "never"), _format_time(listed.used, "never"))
    return (found.id, found.name, found.tenant, scopes, state, *times, str(found.requests_per_minute))


def _as_json(listed: ListedKey, state: str) -> dict[str, Any]:
    found = listed.key.model_dump(mode="json", exclude={"digest"})
    used = listed.used.isoformat() if listed.used is not None else None
    return found | {"scopes": sorted(listed.key.scopes), "state": state, "last_used": used}


def _format_time(moment: datetime | None, otherwise: str) -> str:
    return otherwise if moment is None else moment.isoformat(sep=" ", timespec="minutes")[:16]
