"""`deckhands dead`: conversations that crashed three workers, and entries that no worker could read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from broker.coordination.unreadable import Unreadable, UnreadableEntry
from broker.log.conversations import Conversations, Takeover
from broker.runtime.errors import UsageError
from deckhands.cli.abbreviations import CONVERSATION_ID
from deckhands.cli.connecting import on_cluster
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json, table
from deckhands.cli.verbs import options_as
from deckhands.client.client import Client
from deckhands.reading.terminal import counted, print_text

SECTION = "Operate a cluster"
VERBS = {"dead": "List conversations that crashed three workers, and let them continue."}

HEAD = ("DEAD", "WHAT", "WHY")


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of `dead ls`."""

    as_json: bool


@dataclass(frozen=True, slots=True)
class RequeueOptions:
    """Options of `dead requeue`."""

    conversation_ids: tuple[str, ...]
    is_all: bool


@dataclass(frozen=True, slots=True)
class DeadConversation:
    """A conversation that nobody takes any more.

    Attributes:
        workers: that died while it acted, as far as the store remembers them, the latest last.
    """

    conversation_id: str
    title: str
    workers: tuple[str, ...]


@click.group()
def dead() -> None:
    """Show dead letters, and let conversations continue.

    A conversation is dead once three workers in a row have died while it acted. An entry of a stream is dead if nobody
    could read it; it was never work of ours.
    """


@dead.command(name="ls")
@json_option
@options_as(ListOptions)
def list_dead(options: ListOptions) -> None:
    """List dead conversations and entries, with the cause."""
    conversations, entries = on_cluster(_found)
    if options.as_json:
        for conversation in conversations:
            print_json({"kind": "conversation"} | asdict(conversation))
        for entry in entries:
            print_json({"kind": "entry"} | asdict(entry))
        return
    rows = [("conversation", found.conversation_id, _cause(found)) for found in conversations]
    rows += [("entry", " ".join(filter(None, (entry.key, entry.entry_id))), entry.why) for entry in entries]
    if rows:
        print_text("\n".join(table(HEAD, rows)))
    if conversations:
        note("`deckhands dead requeue ID` gives a conversation another three workers.")
    elif not rows:
        note("There are no dead letters.")


@dead.command()
@click.argument("conversation_ids", metavar="[ID]...", nargs=-1, type=CONVERSATION_ID)
@click.option("--all", "is_all", is_flag=True, help="All dead conversations.")
@options_as(RequeueOptions)
def requeue(options: RequeueOptions) -> None:
    """Let dead conversations continue, from where they were."""
    if options.is_all == bool(options.conversation_ids):
        raise UsageError("It is not clear which conversations are meant.", remedy="Name their ids, or pass --all.")
    requeued = on_cluster(lambda client: _requeue(client, options.conversation_ids, is_all=options.is_all))
    note(f"{counted(len(requeued), 'conversation')} can continue.")


async def _found(client: Client) -> tuple[list[DeadConversation], list[UnreadableEntry]]:
    index = Conversations(client.store)
    takeovers = await index.takeovers()
    dead_ones = [await _described(index, cid, takeovers) for cid in await index.dead_letters()]
    return dead_ones, await Unreadable(client.store).all()


async def _described(index: Conversations, conversation_id: str, takeovers: Sequence[Takeover]) -> DeadConversation:
    workers = [found.from_worker for found in takeovers if found.conversation_id == conversation_id]
    title = (await index.row(conversation_id)).title
    return DeadConversation(conversation_id, title, tuple(workers[-3:]))


async def _requeue(client: Client, conversation_ids: Sequence[str], *, is_all: bool) -> list[str]:
    index = Conversations(client.store)
    dead_ones = await index.dead_letters()
    alive = sorted(set(conversation_ids) - set(dead_ones))
    if alive:
        raise UsageError(f"No dead letter: {', '.join(alive)}.", remedy="`deckhands dead ls` lists them.")
    chosen = dead_ones if is_all else list(conversation_ids)
    for conversation_id in chosen:
        await index.requeue(conversation_id)
        await client.resume(conversation_id)
    return chosen


def _cause(conversation: DeadConversation) -> str:
    if not conversation.workers:
        return "three workers died while it acted"
    return f"workers died while it acted: {', '.join(conversation.workers)}"
