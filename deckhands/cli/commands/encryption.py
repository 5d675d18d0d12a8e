"""`deckhands encryption`: the keys that encrypt conversations at rest."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import click

from broker.runtime import BrokerSettings, StoreMisconfigured, StoreRefused, UsageError, format_count
from broker.store import ClusterConnection, DataKeyRecord, MasterKeys
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.client import Client, count_columns, note, on_cluster, print_json, print_text, render_table

SECTION = "Operate a cluster"
SUMMARIES = {"encryption": "List, rotate and delete the keys that encrypt conversations at rest."}
HEAD = ("TENANT", "KEY", "MASTER KEY")


@dataclass(frozen=True, slots=True)
class ForgetOptions:
    """Options of `encryption forget`."""

    tenant: str
    yes: bool


@click.group()
def encryption() -> None:
    """List, rotate and delete the keys that encrypt conversations at rest."""


@encryption.command()
@json_option
@with_options(ListOptions)
def ls(options: ListOptions) -> None:
    """List the data keys of tenants, and the master key that each is encrypted with."""
    found = on_cluster(lambda client: client.store.encryption.list_keys())
    if options.as_json:
        for record in found:
            print_json({"tenant": record.tenant, "key": record.key_id, "master_key": record.master_id})
        return
    if found:
        rows = [(record.tenant or "(none)", record.key_id, record.master_id) for record in found]
        print_text("\n".join(render_table(HEAD, rows, columns=count_columns(sys.stdout))))
    else:
        note("No conversation is encrypted: DECKHANDS_MASTER_KEYS_FILE of the workers and clients starts it.")
    _note_missing(found)


@encryption.command()
@author_options
def rotate() -> None:
    """Encrypt the data keys with the first master key. Conversations stay as they are."""
    changed = on_cluster(recording(lambda client: client.store.encryption.rotate(), "encryption.rotate", ""))
    first = MasterKeys.load(BrokerSettings.from_env()).ids[0]
    note(f"{format_count(changed, 'data key')} changed to the master key {first}; all others had it before.")


@encryption.command()
@click.argument("tenant")
@click.option("--yes", is_flag=True, help="Do not ask.")
@author_options
@with_options(ForgetOptions)
def forget(options: ForgetOptions) -> None:
    """Delete the data key of TENANT ('' for none): its conversations, checkpoints and archives become unreadable."""
    whose = f"the tenant {options.tenant}" if options.tenant else "no tenant"
    if not options.yes:
        click.confirm(f"Nothing of {whose} can be read again. Delete its key?", abort=True)

    async def delete(client: Client) -> None:
        if not await client.store.encryption.delete_key(options.tenant):
            raise UsageError(f"There is no data key of {whose}.", remedy="`deckhands encryption ls` lists them.")

    on_cluster(recording(delete, "encryption.forget", options.tenant))
    note(f"The data key of {whose} is deleted. Every process forgets its copy within a second.")
    if not on_cluster(_rewrite_files):
        note("The store's append-only file still contains it, encrypted: call BGREWRITEAOF as the store's admin.")


async def _rewrite_files(client: Client) -> bool:
    """Let the store rewrite its append-only file, so that it no longer contains a deleted key."""
    connection = client.store.connection
    try:
        if isinstance(connection, ClusterConnection):
            await connection.call_each("BGREWRITEAOF")
        else:
            await connection.call("BGREWRITEAOF")
    except (StoreMisconfigured, StoreRefused):  # this store user may not, or a rewrite is under way
        return False
    return True


def _note_missing(found: list[DataKeyRecord]) -> None:
    """Note the master keys that this process does not have."""
    known = MasterKeys.load(BrokerSettings.from_env()).ids
    for master_id, count in Counter(record.master_id for record in found).items():
        if master_id not in known:
            note(f"This process does not have the master key {master_id} of {format_count(count, 'data key')}.")
