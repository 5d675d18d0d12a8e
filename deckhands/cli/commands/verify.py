"""`deckhands verify`: check logs against the specification of a log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from broker.log import ConversationQuery, Selection
from broker.runtime import UnknownConversation, UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import find_full_id
from deckhands.cli.options import json_option
from deckhands.client import (
    IsArchived,
    NoCluster,
    RunIsOver,
    Verification,
    clean_line,
    cluster_client,
    conversation_client,
    note,
    print_json,
    print_text,
    read_events,
    verify_file,
    verify_log,
)
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {"verify": "Check logs against the specification of a log, and show the violations."}

EVENTS_FILE = "events.jsonl"
LINE_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `verify`; each source is a conversation, a run, or a file of events."""

    sources: tuple[str, ...]
    is_all: bool
    as_json: bool


@click.command()
@click.argument("sources", metavar="[ID|FILE]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Check every conversation of the cluster and of its archive.")
@json_option
@with_options(VerifyOptions)
def verify(options: VerifyOptions) -> int:
    """Check logs against the specification of a log, which shares no code with the workers that wrote them.

    ID names a conversation of the cluster or of its archive, or a run; FILE is a file of events written by `deckhands
    export`. Exits with 0 if all logs hold. Otherwise it exits with 1 and says for each log what does not hold. With
    --json, it prints one object for each log.
    """
    if options.is_all == bool(options.sources):
        raise UsageError("It is not clear which logs are meant.", remedy="Name ids or files, or pass --all.")
    sources = [_find_file(source) or find_full_id(source) for source in options.sources]
    return asyncio.run(_verify(CliSettings.from_env(), sources, options))


def _find_file(source: str) -> Path | None:
    path = Path(source)
    path = path / EVENTS_FILE if path.is_dir() else path
    return path if path.suffix or path.exists() else None


async def _verify(settings: CliSettings, sources: Sequence[Path | str], options: VerifyOptions) -> int:
    checked = broken = 0
    async with aclosing(_verify_all(settings) if options.is_all else _verify_each(settings, sources)) as results:
        async for found in results:
            checked += 1
            broken += not found.holds
            if options.as_json:
                print_json(found.as_json())
            elif not (options.is_all and found.holds):
                print_text("\n".join(_render(found)))
    if checked != 1 and not options.as_json:
        note(f"{format_count(checked, 'log')} checked; {broken:,} do not hold.")
    return 1 if broken else 0


async def _verify_each(settings: CliSettings, sources: Sequence[Path | str]) -> AsyncGenerator[Verification, None]:
    for source in sources:
        if isinstance(source, Path):
            yield verify_file(source)
            continue
        try:
            async with conversation_client(settings, source) as client:
                yield await client.verify(source)
        except (RunIsOver, IsArchived, NoCluster):
            yield verify_log(source, await read_events(settings, source, is_lenient=True), conversation_id=source)


async def _verify_all(settings: CliSettings) -> AsyncGenerator[Verification, None]:
    """Yield the logs of the store, then those of the archive; each as soon as it is checked."""
    async with cluster_client(settings) as client:
        seen = set[str]()
        async for page in ConversationQuery(client.store, Selection()).iterate_pages():
            for row in page:
                seen.add(row.conversation_id)
                with suppress(UnknownConversation):  # deleted meanwhile
                    yield await client.verify(row.conversation_id)
        for name in [] if client.archive is None else await client.archive.names():
            if name not in seen:
                with suppress(UnknownConversation):
                    yield await client.verify(name)


def _render(found: Verification) -> Iterator[str]:
    number = format_count(found.events, "event")
    yield f"{clean_line(found.source, limit=LINE_CHARS)}: {number}, {'correct.' if found.holds else 'not correct:'}"
    for violation in found.violations:
        yield f"  {clean_line(violation.text, limit=LINE_CHARS)} ({violation.rule})"
