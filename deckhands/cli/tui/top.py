"""`deckhands top`: a live view of a cluster in the terminal."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import click

from broker.runtime import DeckhandsError, UsageError
from deckhands.cli.command_group import with_options
from deckhands.cli.tui.conversation_cache import SORTS
from deckhands.client import cluster_client
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {"top": "Watch a cluster live: workers, queues, conversations; open one and act on it."}


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Options of `top`."""

    words: tuple[str, ...]
    by: str


@click.command()
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option("--sort", "by", type=click.Choice(list(SORTS)), default="updated", show_default=True, help="The order.")
@with_options(TopOptions)
def top(options: TopOptions) -> None:
    """Watch a cluster live: its workers, its queues with age, and its conversations; act on them by keys.

    With words, only conversations that contain all of them: in their id, state, title, labels, tenant, worker or reason
    for waiting. `-word`, after `--`, excludes those that contain it.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("`deckhands top` needs a terminal.", remedy="`deckhands ls` prints a list.")
    asyncio.run(_top(CliSettings.from_env(), options))


async def _top(settings: CliSettings, options: TopOptions) -> None:
    try:
        from deckhands.cli.tui.top_app import Top
    except ImportError as error:
        raise DeckhandsError(
            f"`deckhands top` needs packages that are not installed: {error}.",
            remedy="Install them with `pip install 'deckhands[terminal]'`.",
        ) from error
    async with cluster_client(settings) as client:
        await Top(client, words=" ".join(options.words), by=options.by).run_async()
