"""`deckhands dead`: conversations that crashed three workers, and unreadable entries of streams."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import click

from broker.contract import Event, decode_any
from broker.coordination import Quarantine, QuarantinedItem
from broker.log import Conversations
from broker.runtime import CorruptEntry, UsageError, format_count
from deckhands.cli.authorship import author_options, record_operation, with_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import CONVERSATION_ID
from deckhands.cli.options import json_option
from deckhands.cli.progress import ProgressCounter
from deckhands.cli.selection import label_option, parse_labels, require_confirmation, yes_option
from deckhands.client import (
    Client,
    Renderer,
    clean_line,
    for_each,
    is_coloured,
    note,
    on_cluster,
    print_coloured,
    print_json,
    print_text,
    render_table,
)
from deckhands.operations import DeadConversation, describe_death, find_dead_conversations

SECTION = "Operate a cluster"
SUMMARIES = {"dead": "Show conversations that crashed three workers, and unreadable entries; requeue or discard them."}

HEAD = ("DEAD", "WHAT", "WHY")
SHOWN_EVENTS = 12
"""How many of a log's last events are shown."""
REMEDY = "`deckhands dead ls` lists them."

Kind = Literal["conversation", "entry"]

kind_option = click.option(
    "--kind", type=click.Choice(["conversation", "entry"]), help="Only conversations, or only entries."
)
names_argument = click.argument("names", metavar="[ID]...", nargs=-1, type=CONVERSATION_ID)


@dataclass(frozen=True, slots=True)
class DeadListOptions:
    """Options of `dead ls`."""

    labels: tuple[str, ...]
    kind: Kind | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class DeadShowOptions:
    """Options of `dead show`; `name` is the id of a conversation or the name of an entry."""

    name: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class DeadRequeueOptions:
    """Options of `dead requeue`."""

    names: tuple[str, ...]
    is_all: bool
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadDiscardOptions(DeadRequeueOptions):
    """Options of `dead discard`."""

    kind: Kind | None
    is_sure: bool


@click.group()
def dead() -> None:
    """Show dead letters, let conversations continue, and discard those you do not need.

    A conversation is dead once three workers in a row have died while it acted. An entry of a stream is dead if no
    worker could read it. Deckhands never writes such an entry.
    """


@dead.command(name="ls")
@label_option
@kind_option
@json_option
@with_options(DeadListOptions)
def list_dead(options: DeadListOptions) -> None:
    """List dead conversations and entries, with the cause."""
    conversations, entries = on_cluster(lambda client: _find_dead(client, options.labels, options.kind))
    if options.as_json:
        for conversation in conversations:
            print_json({"kind": "conversation"} | asdict(conversation))
        for entry in entries:
            print_json({"kind": "entry"} | asdict(entry))
        return
    rows = [("conversation", found.conversation_id, _cause(found)) for found in conversations]
    rows += [("entry", entry.name, f"{_place(entry)}: {entry.why}") for entry in entries]
    if rows:
        print_text("\n".join(render_table(HEAD, rows)))
        note("`deckhands dead show ID` shows more; `dead requeue ID` gives a conversation another three workers.")
    else:
        note("There are no dead letters.")


@dead.command()
@click.argument("name", metavar="ID", type=CONVERSATION_ID)
@json_option
@with_options(DeadShowOptions)
def show(options: DeadShowOptions) -> None:
    """Show a dead conversation, its dead workers and the last events of its log; or an unreadable entry."""
    if ":" in options.name:
        _show_entry(on_cluster(lambda client: _entry(client, options.name)), as_json=options.as_json)
        return
    found, events = on_cluster(lambda client: _conversation(client, options.name))
    if options.as_json:
        last = [event.wire() | {"id": event.id} for event in events]
        print_json({"kind": "conversation"} | asdict(found) | {"last_events": last})
        return
    facts = {
        "Conversation": found.conversation_id,
        "Title": found.title,
        "Error": found.last_error,
        "Labels": " ".join(f"{name}={value}" for name, value in sorted(found.labels.items())),
    }
    lines = [f"{name + ':':<14}{clean_line(value, limit=1_000)}" for name, value in facts.items() if value]
    lines += [f"Died with it: {clean_line(name)} at {at}" for name, at in zip(found.workers, found.died, strict=True)]
    print_text("\n".join([*lines, "", "The end of its log:"]))
    renderer = Renderer(is_coloured=is_coloured(sys.stdout))
    for event in events:
        print_coloured(renderer.lines(event) or [renderer.style(f"[{event.id}] {event.kind}", "dim")])


@dead.command()
@names_argument
@click.option("--all", "is_all", is_flag=True, help="All dead conversations.")
@label_option
@author_options
@with_options(DeadRequeueOptions)
def requeue(options: DeadRequeueOptions) -> None:
    """Continue dead conversations from their last state."""
    if any(":" in name for name in options.names):
        raise UsageError(
            "An unreadable entry cannot be requeued: the store has only its first part.",
            remedy="Let its producer send it again, and discard it: `deckhands dead discard`.",
        )

    async def again(client: Client) -> int:
        async def one(conversation_id: str) -> None:
            await Conversations(client.store).requeue(conversation_id)
            await with_author(client, "requeue").resume(conversation_id)

        chosen, _ = await _find_chosen(client, options, "conversation")
        return await _each(chosen, one, "requeued")

    note(f"{format_count(on_cluster(again), 'conversation')} can continue.")


@dead.command()
@names_argument
@click.option("--all", "is_all", is_flag=True, help="All dead conversations and entries.")
@label_option
@kind_option
@yes_option
@author_options
@with_options(DeadDiscardOptions)
def discard(options: DeadDiscardOptions) -> None:
    """Close dead conversations and delete unreadable entries. The logs of the conversations stay readable."""

    async def away(client: Client) -> tuple[int, int]:
        conversations, entries = await _find_chosen(client, options, options.kind)
        number = len(conversations) + len(entries)
        if number and not options.names and not options.is_sure:
            require_confirmation(format_count(number, "dead letter"), "discarded")

        async def close(conversation_id: str) -> None:
            await record_operation(client, "discard", conversation_id)
            await Conversations(client.store).close(conversation_id)

        closed = await _each(conversations, close, "discarded")
        for name in entries:
            await record_operation(client, "discard", name)
        return closed, await Quarantine(client.store).discard(entries)

    closed, forgotten = on_cluster(away)
    parts = [format_count(closed, "conversation") + " closed"] if closed or not forgotten else []
    parts += [("1 entry" if forgotten == 1 else f"{forgotten:,} entries") + " forgotten"] if forgotten else []
    note(f"{', '.join(parts)}.")


async def _each(ids: Sequence[str], act: Callable[[str], Awaitable[object]], done: str) -> int:
    with ProgressCounter(f"conversations {done}", len(ids)) as progress:

        async def one(conversation_id: str) -> None:
            await act(conversation_id)
            progress.add()

        await for_each(ids, one)
    return len(ids)


async def _find_chosen(client: Client, options: DeadRequeueOptions, kind: Kind | None) -> tuple[list[str], list[str]]:
    """Return the chosen conversations and entries, by id and by name.

    Raises:
        UsageError: the choice is missing or ambiguous, or a given one is not dead.
    """
    is_selection = options.is_all or bool(options.labels)
    if is_selection == bool(options.names):
        raise UsageError(
            "It is not clear which conversations are meant.", remedy="Give their ids, or pass --label or --all."
        )
    if is_selection:
        conversations, found = await _find_dead(client, options.labels, kind, has_causes=False)
        return [one.conversation_id for one in conversations], [entry.name for entry in found]
    there = set(await Conversations(client.store).list_dead_letters())
    there |= {entry.name for entry in await Quarantine(client.store).list_items()}
    alive = sorted(set(options.names) - there)
    if alive:
        raise UsageError(f"No dead letter: {', '.join(alive)}.", remedy=REMEDY)
    names = list(dict.fromkeys(options.names))
    return [name for name in names if ":" not in name], [name for name in names if ":" in name]


async def _find_dead(
    client: Client, labels: tuple[str, ...], kind: Kind | None, *, has_causes: bool = True
) -> tuple[list[DeadConversation], list[QuarantinedItem]]:
    """Return the dead letters; with labels, only conversations that have them."""
    wanted = parse_labels(labels)
    entries = await Quarantine(client.store).list_items() if kind != "conversation" and not wanted else []
    if kind == "entry":
        return [], entries
    return await find_dead_conversations(client.store, labels=wanted, has_causes=has_causes), entries


async def _conversation(client: Client, conversation_id: str) -> tuple[DeadConversation, list[Event]]:
    index = Conversations(client.store)
    row = await index.load_row(conversation_id)
    if conversation_id not in await index.list_dead_letters():
        raise UsageError(f"No dead letter: {conversation_id}.", remedy=REMEDY)
    after = max(0, row.last_event_id - SHOWN_EVENTS)
    try:
        events = await client.log.read(conversation_id, after=after, decode=decode_any)
    except CorruptEntry as error:  # which may be the cause of the crashes
        note(error.message)
        events = []
    takeovers = [one for one in await index.list_takeovers() if one.conversation_id == conversation_id]
    return describe_death(row, takeovers), events


async def _entry(client: Client, name: str) -> QuarantinedItem:
    for entry in await Quarantine(client.store).list_items():
        if entry.name == name:
            return entry
    raise UsageError(f"There is no unreadable entry {ascii(name)[:100]}.", remedy=REMEDY)


def _show_entry(entry: QuarantinedItem, *, as_json: bool) -> None:
    if as_json:
        print_json({"kind": "entry"} | asdict(entry))
        return
    print_text(f"Entry:        {entry.name}\nOf:           {_place(entry)}\nWhy:          {entry.why}")
    print_text(f"Content:      {clean_line(entry.held, limit=2_000)}")


def _place(entry: QuarantinedItem) -> str:
    return " ".join(filter(None, (entry.key, entry.entry_id)))


def _cause(conversation: DeadConversation) -> str:
    if not conversation.workers:
        return "three workers died while it acted"
    return f"workers died while it acted: {', '.join(conversation.workers)}"
