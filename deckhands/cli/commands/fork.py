"""`deckhands fork`: continue a conversation from any of its events in another way."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from broker.contract import ConversationCreated, Event, WorkspaceSpec
from broker.runtime import new_conversation_id
from deckhands.cli.authorship import author_options, record_operation
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import POINT
from deckhands.cli.options import json_option
from deckhands.client import (
    Client,
    ForkPoint,
    IsArchived,
    RunIsOver,
    build_fork,
    check_task,
    cluster_client,
    conversation_client,
    copy_events,
    lend_upload,
    load_binary,
    note,
    print_json,
    print_text,
    read_events,
    require_served,
    resolve_local_directory,
)
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"fork": "Start again from any event of a conversation, in one or more copies."}


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options of `fork`; `point` is ID@EVENT."""

    point: str
    model: str | None
    copies: int
    workspace: Path | None
    message: str | None
    title: str
    as_json: bool


@click.command()
@click.argument("point", metavar="ID@EVENT", type=POINT)
@click.option("--model", help="Another model for the forks.")
@click.option("--copies", type=click.IntRange(1, 1_000), default=1, show_default=True, help="How many forks.")
@click.option("-w", "--workspace", type=click.Path(path_type=Path), help="The directory that the forks work on.")
@click.option("-m", "--message", help="A message to the forks; without one, they continue from the event.")
@click.option("--title", default="", help="A name for listings.")
@json_option
@author_options
@with_options(ForkOptions)
def fork(options: ForkOptions) -> None:
    """Start conversations with the events of another up to EVENT, and continue from there. Prints their ids.

    The original does not change. Files are not part of a log: a fork works on the directory given by -w, or on the one
    that the user named for the original. If there is neither, it starts with a checkpoint of the original's files, or
    with the original's initial files.
    """
    settings = CliSettings.from_env()
    if options.message is not None:
        check_task(options.message, name="message")
    point = ForkPoint.parse(options.point)
    for conversation_id in asyncio.run(_fork(settings, point, options)):
        if options.as_json:
            print_json({"conversation_id": conversation_id, "forked_from": point.conversation_id})
        else:
            print_text(conversation_id)


async def _fork(settings: CliSettings, point: ForkPoint, options: ForkOptions) -> list[str]:
    named = options.workspace
    directory = resolve_local_directory(named, settings.environment) if named is not None else None
    events = point.events_until(await read_events(settings, point.conversation_id))
    place = _workspace(events, directory)
    ids = [new_conversation_id() for _ in range(options.copies)]
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(conversation_client(settings, point.conversation_id))
        except (RunIsOver, IsArchived):  # the forks run on the cluster
            client = await stack.enter_async_context(cluster_client(settings))
        await require_served(client.store, place)
        for conversation_id in ids:
            created = build_fork(events, conversation_id, model=options.model, workspace=place, title=options.title)
            await _create(client, point.conversation_id, created, copy_events(events, model=options.model))
            if options.message is not None:
                await client.send_message(conversation_id, options.message)
            await record_operation(client, "fork", f"{point.conversation_id} as {conversation_id}")
    return ids


async def _create(client: Client, source_id: str, created: ConversationCreated, events: list[Event]) -> None:
    blobs = await load_binary(client.log, client.archive, source_id, events)

    async def create(shards: int) -> None:
        await lend_upload(client.store, client.archive, source_id, created.conversation_id, created.workspace)
        await client.log.create_from(created, events, key=f"fork:{created.forked_from}", shards=shards, blobs=blobs)

    await client.store.repeat_if_raised(created.conversation_id, create)


def _workspace(events: list[Event], directory: Path | None) -> WorkspaceSpec:
    created = events[0]
    assert isinstance(created, ConversationCreated)
    if directory is not None:
        return created.workspace.model_copy(update={"path": str(directory), "source": None})
    if created.workspace.source is not None:
        note("The forks start with the checkpoint nearest to that event, or with the original's initial files.")
    elif created.workspace.path is None:
        note("The forks start with the checkpoint nearest to that event, or empty; -w names a directory with files.")
    else:
        note(f"The forks work on {created.workspace.path}, as it is now; -w names another directory.")
    return created.workspace
