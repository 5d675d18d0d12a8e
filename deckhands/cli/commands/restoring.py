"""`deckhands restore`: bring archived conversations back into the store."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import click

from deckhands.cli.abbreviations import CONVERSATION_ID
from deckhands.cli.options import json_option
from deckhands.cli.progress import Progress
from deckhands.cli.verbs import options_as
from deckhands.client import cluster_client, note, print_json, print_text
from deckhands.settings import FaceSettings

SECTION = "Control a conversation"
VERBS = {"restore": "Bring archived conversations back into the store."}


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of `restore`."""

    conversation_ids: tuple[str, ...]
    as_json: bool


@click.command()
@click.argument("conversation_ids", metavar="ID...", nargs=-1, required=True, type=CONVERSATION_ID)
@json_option
@options_as(RestoreOptions)
def restore(options: RestoreOptions) -> None:
    """Bring archived conversations back into the store, so that they can be continued. Prints their ids.

    Name them by their full ids. The archive is the one that DECKHANDS_ARCHIVE names; the file stays in it. A
    conversation that is still in the store does not change. Secrets are not archived: set them again. A workspace
    starts with its last checkpoint, or with its initial files.
    """
    asyncio.run(_restore(FaceSettings.from_env(), options))


async def _restore(settings: FaceSettings, options: RestoreOptions) -> None:
    ids, shows_ids = options.conversation_ids, sys.stdout.isatty()
    async with cluster_client(settings) as client:
        with Progress("conversations restored", len(ids)) as progress:
            for conversation_id in ids:
                is_new = await client.restore(conversation_id)
                if not shows_ids:  # on a terminal, the printed ids show the progress
                    progress.add()
                if options.as_json:
                    print_json({"conversation_id": conversation_id, "restored": is_new})
                    continue
                if not is_new:
                    note(f"{conversation_id} is in the store already.")
                print_text(conversation_id)
