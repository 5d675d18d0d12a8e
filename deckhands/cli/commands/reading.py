"""`deckhands show`, `logs` and `export`: read conversations, of a cluster or from the files of runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.contract import AgentState, Event, RiskyAction
from broker.log import render_event_line
from broker.runtime import UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import POINT, conversation_or_task
from deckhands.cli.options import json_option, plain_option
from deckhands.cli.screen_printer import printer_for
from deckhands.client import (
    EventPrinter,
    ForkPoint,
    IsArchived,
    RunIsOver,
    Summary,
    Tally,
    clean_line,
    conversation_client,
    note,
    print_ascii,
    print_json,
    print_text,
    read_events,
    read_pages,
    read_summary,
    read_wait_reason,
    render_summary,
    summarize,
)
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from deckhands.client import Stopped

SECTION = "Read conversations"
SUMMARIES = {
    "show": "Show the result of a conversation, or its state at any event.",
    "logs": "Show the events of a conversation; -f follows it.",
    "export": "Write the events of a conversation, one JSON object per line.",
}

FORMATS = ("events", "openhands", "openhands-sdk", "atif", "inspect", "sft")
FIRST_PAGE = 32
"""How many events `logs` reads before it prints the first one."""
WAITS = {
    "batch": "a batch of model calls at its provider (batch)",
    "delegate": "its delegates (delegate)",
    "newer_worker": "a controller worker of the newer version of Deckhands that wrote to its log (newer_worker)",
    "locked": "a controller worker with the master key that decrypts it (locked)",
    "pinned_version": "a controller worker of the version that it is pinned to (pinned_version)",
    "rate_limit": "its turn at the model's quota (rate_limit)",
    "tool": "a running action (tool)",
    "waiting_for_budget": "money: a budget of its tenant or experiment is used up. `deckhands budget ls` shows it, and "
    "`deckhands budget add` lets the conversation continue (waiting_for_budget)",
}
"""Descriptions of wait reasons that need more than a word."""


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of `show`; `point` is ID or ID@EVENT."""

    point: str
    task: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class LogsOptions:
    """Options of `logs`."""

    conversation_id: str
    task: str | None
    follow: bool
    is_whole: bool
    is_plain: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of `export`; `style` is one of `FORMATS`."""

    conversation_id: str
    task: str | None
    output: Path | None
    style: str


@click.command()
@conversation_or_task("point", "[ID[@EVENT]]", POINT)
@json_option
@with_options(ShowOptions)
def show(options: ShowOptions) -> None:
    """Show the state and the result of a conversation; with @EVENT, its state after that event."""
    settings = CliSettings.from_env()
    asked = ForkPoint.parse(options.point)
    events: list[Event] = []
    if asked.at is None:
        summary = asyncio.run(read_summary(settings, asked.conversation_id))
    else:
        events = asked.events_until(asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True)))
        summary = summarize(events)
    waits_for = asyncio.run(read_wait_reason(settings, asked.conversation_id)) if asked.at is None else ""
    stops: list[Stopped] = []
    if summary.state in (AgentState.STOPPED, AgentState.PAUSED):
        events = events or asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True))
        from deckhands.client import fold_history

        stops = fold_history(events).stops.parties
    if options.as_json:
        more: dict[str, object] = {"wait_reason": waits_for} if waits_for else {}
        more |= {"stopped": [asdict(stop) for stop in stops]} if stops else {}
        print_json(summary.as_json() | more)
        return
    printer = EventPrinter(as_json=False)
    if asked.at is not None:
        printer.event(events[-1])
    print_text("\n".join(render_summary(summary)))
    for stop in stops:
        print_text(f"{'':<14}{clean_line(str(stop), limit=1_000)}")
    if waits_for:
        print_text(f"{'Waits for:':<14}{clean_line(WAITS.get(waits_for, waits_for), limit=1_000)}")
    if summary.message:
        print_text("\n" + summary.message)
    if summary.asked_id is not None:
        events = events or asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True))
        action = events[summary.asked_id - 1]
        assert isinstance(action, RiskyAction)
        printer.question(action)


@click.command()
@conversation_or_task()
@click.option("-f", "--follow", is_flag=True, help="Follow the conversation until it is over.")
@click.option("--full", "is_whole", is_flag=True, help="On a terminal: fold no output and no diff.")
@plain_option
@json_option
@with_options(LogsOptions)
def logs(options: LogsOptions) -> int:
    """Show the events of a conversation in a readable form. With -f, exit with the code that `run` would have."""
    settings = CliSettings.from_env()
    conversation_id = options.conversation_id
    printer = printer_for(
        as_json=options.as_json, is_plain=options.is_plain, is_whole=options.is_whole, has_status=options.follow
    )
    if options.follow:
        with contextlib.suppress(RunIsOver, IsArchived):
            return int(asyncio.run(_follow(settings, conversation_id, printer)).exit_code)
    tally = Tally() if options.follow else None
    asyncio.run(_print_events(settings, conversation_id, printer, tally))
    return int(tally.summary().exit_code) if tally is not None else 0


@click.command()
@conversation_or_task()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; by default standard output.")
@click.option("--format", "style", type=click.Choice(FORMATS), default="events", show_default=True)
@with_options(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write the events of a conversation, one JSON object per line: id, kind, source, cause_id, timestamp and more.

    With --format openhands, write one JSON list: a trajectory as OpenHands V0 saves and reads it. With --format
    openhands-sdk, write a conversation directory of OpenHands' SDK (V1); -o names the directory, which must not exist.
    With --format atif, inspect or sft, write it as an evaluation would: a trajectory of Harbor, a log of inspect_ai, or
    an example for fine-tuning.
    """
    output = options.output
    events = asyncio.run(read_events(CliSettings.from_env(), options.conversation_id, is_lenient=True))
    if options.style == "openhands-sdk":
        _write_sdk_directory(options.conversation_id, events, output)
        return
    if options.style == "openhands":
        from deckhands.interop import to_trajectory

        trajectory, left_out = to_trajectory(events)
        _report_left_out(left_out)
        text = json.dumps(trajectory, indent=4) + "\n"
    elif options.style in ("atif", "inspect", "sft"):
        from deckhands.evaluation import export_conversation

        text = export_conversation(options.conversation_id, events, options.style)
    else:
        text = "".join(render_event_line(event) + "\n" for event in events)
    if output is None:
        print_ascii(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The file {output} cannot be written: {error.strerror}.", remedy="Name another with -o."
        ) from error


def _report_left_out(left_out: Mapping[str, int]) -> None:
    for kind, count in sorted(left_out.items()):
        note(f"Left out: {format_count(count, 'event')} of the kind {kind}, which OpenHands has no name for.")


def _write_sdk_directory(conversation_id: str, events: Sequence[Event], output: Path | None) -> None:
    """Write a conversation directory of OpenHands' SDK.

    Args:
        output: None for the name by which the SDK finds it, in the current directory.
    """
    from deckhands.interop import to_sdk_conversation_id, to_sdk_directory_name, to_sdk_files

    folder = output or Path(to_sdk_directory_name(conversation_id))
    files, left_out = to_sdk_files(conversation_id, events)
    try:
        (folder / "events").mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The directory {folder} cannot be written: {error.strerror}.", remedy="Name a new one with -o."
        ) from error
    _report_left_out(left_out)
    note(
        f"{folder} has {format_count(len(files) - 1, 'event')}. The SDK's name of the conversation is "
        f"{to_sdk_conversation_id(conversation_id)}."
    )


async def _print_events(
    settings: CliSettings, conversation_id: str, printer: EventPrinter, tally: Tally | None
) -> None:
    """Print the existing events, each once it is read."""
    found = read_pages(settings, conversation_id, is_lenient=True, first_size=FIRST_PAGE)
    async with contextlib.aclosing(found) as pages:
        async for page in pages:
            for event in page:
                printer.event(event)
                if tally is not None:
                    tally.add(event)


async def _follow(settings: CliSettings, conversation_id: str, printer: EventPrinter) -> Summary:
    """Print events until the conversation is over."""
    from deckhands.client import Until, has_ended

    tally = Tally()
    async with (
        conversation_client(settings, conversation_id) as client,
        printer.live(),
        contextlib.aclosing(client.tail(conversation_id, is_whole=True, is_lenient=True, is_endless=True)) as events,
    ):
        async for event in events:
            printer.event(event)
            tally.add(event)
            if await has_ended(client, conversation_id, tally, until=Until.OVER):
                break
    return tally.summary()
