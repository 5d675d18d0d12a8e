"""`deckhands import`: bring conversations recorded elsewhere onto the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from broker.contract import ConversationCreated, Event
from broker.log import render_event_line
from broker.runtime import UsageError, format_count, new_conversation_id
from deckhands.cli.command_group import with_options
from deckhands.client import cluster_client, note, print_text
from deckhands.interop import read_exported_log, read_sdk_directory, read_trajectory
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"import": "Import a recorded conversation into the cluster."}


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of `import`; with `output`, a file is written instead."""

    path: Path
    output: Path | None


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a file of events instead.")
@with_options(ImportOptions)
def import_(options: ImportOptions) -> None:
    """Import a recorded conversation into the cluster and print its id.

    PATH is a trajectory of OpenHands (a JSON list of events), a conversation directory of OpenHands' SDK, or a file
    written by `deckhands export` (.jsonl). An unfinished conversation continues as soon as a worker finds it.
    """
    path, output = options.path, options.output
    conversation_id = new_conversation_id()
    if path.is_dir():
        events, findings = read_sdk_directory(path, conversation_id)
    elif path.suffix == ".jsonl":
        events, findings = read_exported_log(path, conversation_id)
    else:
        events, findings = read_trajectory(path, conversation_id)
    for line in findings.lines():
        note(line)
    if output is not None:
        try:
            output.write_text("".join(render_event_line(event) + "\n" for event in events), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"The file {output} cannot be written: {error.strerror}.", remedy="Name another."
            ) from error
        note(f"{output} has {format_count(len(events), 'event')}.")
        return
    print_text(asyncio.run(_adopt(CliSettings.from_env(), events)))


async def _adopt(settings: CliSettings, events: list[Event]) -> str:
    created = events[0].model_copy(update={"id": 0})
    assert isinstance(created, ConversationCreated)
    async with cluster_client(settings) as client:
        await client.log.create_from(created, events[1:], key="import")
    return created.conversation_id
