"""`deckhands store`: the number of a store's shards."""

from __future__ import annotations

from dataclasses import dataclass

import click

from broker.coordination import raise_shards
from broker.runtime import format_count
from deckhands.cli.authorship import author_options, recording, refuse_author
from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.client import Client, note, on_cluster, print_json, print_text

SECTION = "Operate a cluster"
SUMMARIES = {"store": "Show the number of the store's shards, or raise it while conversations run."}


@dataclass(frozen=True, slots=True)
class ShardsOptions:
    """Options of `store shards`."""

    number: int | None
    as_json: bool


@click.group()
def store() -> None:
    """Show the number of the store's shards, or raise it while conversations run."""


@store.command()
@click.argument("number", type=click.IntRange(1), required=False)
@json_option
@author_options
@with_options(ShardsOptions)
def shards(options: ShardsOptions) -> int:
    """Show the number of shards; with NUMBER, raise it to that.

    Conversations stay in their shards, and new ones are spread over all. An interrupted call can be repeated. It waits
    half a minute for the workers to read the new shards; exit code 1: some do not yet.
    """
    if options.number is None:
        refuse_author("without NUMBER, nothing changes")
        numbers = on_cluster(_read_numbers)
        if options.as_json:
            print_json({"shards": numbers[-1], "before": list(numbers[:-1])})
        else:
            history = f", raised from {', '.join(map(str, numbers[:-1]))}" if numbers[:-1] else ""
            print_text(f"{format_count(numbers[-1], 'shard')}{history}")
        return 0
    number = options.number
    done = on_cluster(recording(lambda client: raise_shards(client.store, number), "store.shards", str(number)))
    if options.as_json:
        print_json({"shards": done.after, "before": done.before, "unaware": list(done.unaware)})
    else:
        note(f"The store has {format_count(done.after, 'shard')}; before, it had {done.before}.")
        for worker in done.unaware:
            note(f"The worker {worker} does not read the new shards yet.")
    return int(bool(done.unaware))


async def _read_numbers(client: Client) -> tuple[int, ...]:
    await client.store.refresh()
    return client.store.layout.numbers
