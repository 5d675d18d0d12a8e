"""`deckhands import`: bring conversations recorded elsewhere onto the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from broker.contract.events import ConversationCreated, Event
from broker.log.export import event_line, events_from_lines
from broker.runtime.errors import UsageError
from broker.runtime.ids import new_conversation_id
from deckhands.cli.connecting import cluster_client
from deckhands.cli.output import note
from deckhands.cli.verbs import options_as
from deckhands.client.forking import fork_of
from deckhands.openhands.sdk_conversation import read_sdk_directory
from deckhands.openhands.trajectories import read_trajectory
from deckhands.reading.terminal import counted, print_text
from deckhands.settings import FaceSettings

SECTION = "Start a conversation"
VERBS = {"import": "Import a recorded conversation into the cluster."}


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of `import`; with `output`, a file is written instead."""

    path: Path
    output: Path | None


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a file of events instead.")
@options_as(ImportOptions)
def import_(options: ImportOptions) -> None:
    """Import a recorded conversation into the cluster and print its id.

    PATH is a trajectory of OpenHands (a JSON list of events), a conversation directory of OpenHands' SDK, or a file
    that `deckhands export` has written (.jsonl). A conversation that was not over continues as soon as a worker finds
    it.
    """
    path, output = options.path, options.output
    if path.is_dir():
        events, left_out = read_sdk_directory(path, new_conversation_id())
        for what, count in sorted(left_out.items()):
            note(f"Left out: {count} {what}.")
    else:
        events = _read(path)
    if output is not None:
        try:
            output.write_text("".join(event_line(event) + "\n" for event in events), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"The file {output} cannot be written: {error.strerror}.", remedy="Name another."
            ) from error
        note(f"{output} has {counted(len(events), 'event')}.")
        return
    print_text(asyncio.run(_adopt(FaceSettings.from_env(), events)))


def _read(path: Path) -> list[Event]:
    if path.suffix != ".jsonl":
        return read_trajectory(path, new_conversation_id())
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file {path} cannot be read: {error}.", remedy="Name another.") from error
    events = events_from_lines(lines, source=str(path))
    if not events:
        raise UsageError(f"The file {path} holds no events.", remedy="Name another.")
    return [fork_of(events, new_conversation_id()).model_copy(update={"id": 1}), *events[1:]]


async def _adopt(settings: FaceSettings, events: list[Event]) -> str:
    created = events[0].model_copy(update={"id": 0})
    assert isinstance(created, ConversationCreated)
    async with cluster_client(settings) as client:
        await client.log.adopt(created, events[1:], key="import")
    return created.conversation_id
