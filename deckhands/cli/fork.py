"""`deckhands fork`: go on from any event of a conversation, otherwise than it did."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import click

from broker.contract.events import ConversationCreated, Event, WorkspaceSpec
from broker.coordination.stored_files import StoredFiles
from broker.runtime.ids import new_conversation_id
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import RunIsOver, cluster_client, conversation_client, read_events
from deckhands.client.forking import Point, fork_of, taken_over
from deckhands.client.named_directory import own_directory, require_served
from deckhands.client.tasks import check_task
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings


@click.command()
@click.argument("point", metavar="ID@EVENT")
@click.option("--model", help="Another model for the forks.")
@click.option("--copies", type=click.IntRange(1, 1_000), default=1, show_default=True, help="How many forks.")
@click.option("-w", "--workspace", type=click.Path(path_type=Path), help="The directory the forks work on.")
@click.option("-m", "--message", help="What to say to the forks; without it they go on as they stood.")
@click.option("--title", default="", help="A name for listings.")
@json_option
def fork(
    *,
    point: str,
    model: str | None,
    copies: int,
    workspace: Path | None,
    message: str | None,
    title: str,
    as_json: bool,
) -> None:
    """Begin conversations with the events of another up to EVENT, and go on from there. Prints their ids.

    The original stays as it is. Its files are no part of its log: a fork works on the directory of -w, or on the
    original's own; if that was none of the user's, on the last checkpoint of its files, or on what it began with.
    """
    settings = FaceSettings.from_env()
    if message is not None:
        check_task(message, name="message")
    asked = Point.parse(point)
    directory = own_directory(workspace, settings.environment) if workspace is not None else None
    ids = asyncio.run(_fork(settings, asked, copies, message, model=model, directory=directory, title=title))
    for conversation_id in ids:
        if as_json:
            print_json({"conversation_id": conversation_id, "forked_from": asked.conversation_id})
        else:
            print_text(conversation_id)


async def _fork(
    settings: FaceSettings,
    point: Point,
    copies: int,
    message: str | None,
    *,
    model: str | None,
    directory: Path | None,
    title: str,
) -> list[str]:
    events = point.cut(await read_events(settings, point.conversation_id))
    place = _workspace(events, directory)
    ids = [new_conversation_id() for _ in range(copies)]
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(conversation_client(settings, point.conversation_id))
        except RunIsOver:  # it is gone on with on the cluster
            client = await stack.enter_async_context(cluster_client(settings))
        await require_served(client.store, place)
        for conversation_id in ids:
            created = fork_of(events, conversation_id, model=model, workspace=place, title=title)
            await StoredFiles(client.store).lend(point.conversation_id, conversation_id, created.workspace.source)
            await client.log.adopt(created, taken_over(events, model=model), key=f"fork:{created.forked_from}")
            if message is not None:
                await client.send_message(conversation_id, message)
    return ids


def _workspace(events: list[Event], directory: Path | None) -> WorkspaceSpec:
    created = events[0]
    assert isinstance(created, ConversationCreated)
    if directory is not None:
        return created.workspace.model_copy(update={"path": str(directory), "source": None})
    if created.workspace.source is not None:
        note("The forks begin with the last checkpoint of the files, or with what the original began with.")
    elif created.workspace.path is None:
        note("The forks begin with the last checkpoint of the files, or empty; -w names a directory with files.")
    else:
        note(f"The forks work on {created.workspace.path}, as it is now; -w names another directory.")
    return created.workspace
