"""`deckhands why`: the chain from a conversation's state to the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from broker.runtime import SYSTEM_CLOCK
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import conversation_or_task
from deckhands.cli.options import json_option
from deckhands.client import (
    ConversationFacts,
    IsArchived,
    Link,
    RunIsOver,
    Why,
    clean_line,
    conversation_reader,
    explain,
    fold_history,
    print_json,
    print_text,
    read_events,
)
from deckhands.cluster import Home
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {"why": "Explain why a conversation makes no progress, and how to change that."}

LINE_CHARS = 1_000
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class WhyOptions:
    """Options of `why`."""

    conversation_id: str
    task: str | None
    as_json: bool


@click.command()
@conversation_or_task()
@json_option
@with_options(WhyOptions)
def why(options: WhyOptions) -> None:
    """Explain why a conversation makes no progress: from its state to the cause, link by link.

    Each link shows since when it has held, until when if that is known, and how to change it. If the conversation waits
    for a delegate, the delegate is explained in the same way, below its parent.
    """
    found = asyncio.run(_why(CliSettings.from_env(), options.conversation_id))
    if options.as_json:
        print_json(found.as_json())
        return
    print_text("\n".join(lines_of(found)))


async def _why(settings: CliSettings, conversation_id: str) -> Why:
    home = Home(settings.home)
    is_run = home.has_run(conversation_id)
    logs = (home.run_folder(conversation_id) if is_run else home.cluster) / "logs"
    try:
        async with conversation_reader(settings, conversation_id) as reader:
            return await reader.why(conversation_id, worker_logs=logs if logs.is_dir() else None)
    except (RunIsOver, IsArchived):
        history = fold_history(await read_events(settings, conversation_id, is_lenient=True))
        now = SYSTEM_CLOCK.now()
        return explain(
            ConversationFacts(conversation_id=conversation_id, now=now, row=None, history=history, is_run=is_run)
        )


def lines_of(found: Why) -> list[str]:
    """Return an explanation as lines of text."""
    return list(_lines(found.links, found.at, ""))


def _lines(links: Sequence[Link], now: datetime, margin: str) -> Iterator[str]:
    for link in links:
        yield f"{margin}- {clean_line(link.text, limit=LINE_CHARS)}"
        within = f"{margin}  "
        if link.since is not None:
            yield f"{within}since: {_moment(link.since)} ({_span((now - link.since).total_seconds())} ago)"
        if link.until is not None:
            seconds = (link.until - now).total_seconds()
            yield f"{within}until: {_moment(link.until)} ({f'in {_span(seconds)}' if seconds > 0 else 'by now'})"
        if link.remedy:
            yield f"{within}what changes it: {clean_line(link.remedy, limit=LINE_CHARS)}"
        yield from (f"{within}| {clean_line(line, limit=LINE_CHARS)}" for line in link.lines)
        yield from _lines(link.links, now, f"{margin}    ")


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _span(seconds: float) -> str:
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in UNITS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
