"""`deckhands inbox`: producers with their own inbox stream."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from broker.coordination import ANY_TENANT, Producer, Producers
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.client import Client, count_columns, note, on_cluster, print_json, print_text, render_table

SECTION = "Operate a cluster"
SUMMARIES = {"inbox": "Add, list and remove producers with their own inbox stream."}
HEAD = ("PRODUCER", "TENANT", "WAITING", "STREAM", "REPLIES")


@dataclass(frozen=True, slots=True)
class AddProducerOptions:
    """Options of `inbox add`."""

    name: str
    tenant: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class RemoveProducerOptions:
    """Options of `inbox rm`."""

    name: str
    discard: bool


@click.group()
def inbox() -> None:
    """Add, list and remove producers with their own inbox stream: `deck:inbox:NAME`."""


@inbox.command()
@click.argument("name")
@click.option(
    "--tenant", required=True, help="The tenant of its conversations; '*' means the tenant that an entry names."
)
@json_option
@author_options
@with_options(AddProducerOptions)
def add(options: AddProducerOptions) -> None:
    """Add the producer NAME and create its stream; print the command that creates its store user."""
    producer = on_cluster(
        recording(lambda client: Producers(client.store).add(options.name, options.tenant), "inbox.add", options.name)
    )
    if options.as_json:
        print_json(_as_json(producer, 0))
        return
    note(f"The producer {producer.name} adds entries to {producer.stream}. As the store's admin, create its user:")
    print_text(f"ACL SETUSER {producer.name} reset on >A-LONG-PASSWORD {producer.acl}")


@inbox.command()
@json_option
@with_options(ListOptions)
def ls(options: ListOptions) -> None:
    """List the producers, their tenants, and how many of their entries are unfinished."""
    found = on_cluster(_list_producers)
    if options.as_json:
        for producer, waiting in found:
            print_json(_as_json(producer, waiting))
    elif found:
        rows = [
            (each.name, "any" if each.tenant == ANY_TENANT else each.tenant, str(waiting), each.stream, each.replies)
            for each, waiting in found
        ]
        print_text("\n".join(render_table(HEAD, rows, columns=count_columns(sys.stdout), spare=("REPLIES", "STREAM"))))
    else:
        note("No producer has its own stream. `deckhands inbox add` creates one.")


@inbox.command()
@click.argument("name")
@click.option("--discard", is_flag=True, help="Remove it even if entries wait; they are lost.")
@author_options
@with_options(RemoveProducerOptions)
def rm(options: RemoveProducerOptions) -> None:
    """Remove the producer NAME and its stream. Its conversations continue, and its store user stays."""
    on_cluster(
        recording(
            lambda client: Producers(client.store).remove(options.name, discard=options.discard),
            "inbox.remove",
            options.name,
        )
    )
    note(f"The producer {options.name} is removed. As the store's admin, remove its user: ACL DELUSER {options.name}")


async def _list_producers(client: Client) -> list[tuple[Producer, int]]:
    producers = Producers(client.store)
    return [(producer, await producers.count_waiting(producer)) for producer in (await producers.load_all()).values()]


def _as_json(producer: Producer, waiting: int) -> dict[str, str | int]:
    return {
        "name": producer.name,
        "tenant": producer.tenant,
        "stream": producer.stream,
        "replies": producer.replies,
        "acl": producer.acl,
        "waiting": waiting,
    }
