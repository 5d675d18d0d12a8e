"""`deckhands ls`, `show`, `logs` and `export`: read conversations, of a cluster or from the files of runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from broker.contract.actions import RiskyAction
from broker.contract.events import Event
from broker.log.conversations import ConversationRow
from broker.log.export import event_line
from broker.runtime.errors import CorruptEntry, UsageError
from deckhands.cli.connecting import (
    RunIsOver,
    cluster_client,
    conversation_client,
    read_events,
    read_summary,
    read_wait_reason,
)
from deckhands.cli.options import json_option
from deckhands.cli.output import EventPrinter, cost_text, note, print_json, summary_lines, table
from deckhands.cli.verbs import options_as
from deckhands.client.errors import NoCluster
from deckhands.client.forking import Point
from deckhands.home import Home
from deckhands.openhands.trajectories import trajectory_of
from deckhands.reading.summary import Tally, summarize
from deckhands.reading.terminal import clean_line, print_ascii, print_text
from deckhands.runs.records import RunFolder
from deckhands.settings import FaceSettings

SECTION = "Read conversations"
VERBS = {
    "ls": "List conversations and runs.",
    "show": "Show the result of a conversation, or its state at any event.",
    "logs": "Show the events of a conversation; -f follows it.",
    "export": "Write the events of a conversation, one JSON object per line.",
}

WAITS = {
    "newer_worker": "a controller worker of a newer version of Deckhands, which has written to its log (newer_worker)"
}
"""Reasons to wait that need more than a word."""
HEAD = ("CONVERSATION", "STATE", "STEPS", "COST", "UPDATED (UTC)", "TITLE")


@dataclass(frozen=True, slots=True)
class Listed:
    """A conversation or a run as a listing shows it; `updated` is a time in ISO 8601, or empty."""

    conversation_id: str
    state: str
    wait_reason: str
    iterations: int
    cost_usd: float
    has_unknown_cost: bool
    updated: str
    title: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its line in the table."""
        state = f"{self.state} ({self.wait_reason})" if self.wait_reason else self.state
        moment = self.updated[:19].replace("T", " ")
        cost = cost_text(self.cost_usd, is_whole=not self.has_unknown_cost)
        return (self.conversation_id, state, str(self.iterations), cost, moment, self.title)


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of `ls`."""

    limit: int
    as_json: bool


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of `show`; `point` is ID or ID@EVENT."""

    point: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of `logs`."""

    conversation_id: str
    follow: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of `export`; `style` is `events` or `openhands`."""

    conversation_id: str
    output: Path | None
    style: str


@click.command()
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
@options_as(ListOptions)
def ls(options: ListOptions) -> None:
    """List the conversations of the cluster and the runs of this machine, newest first."""
    found, is_whole = asyncio.run(_listed(FaceSettings.from_env(), options.limit))
    if options.as_json:
        for listed in found:
            print_json(asdict(listed))
    elif found:
        print_text("\n".join(table(HEAD, [listed.cells() for listed in found])))
    elif is_whole:
        note("There are no conversations and no runs yet. `deckhands run -t TASK` starts one.")


@click.command()
@click.argument("point", metavar="ID[@EVENT]")
@json_option
@options_as(ShowOptions)
def show(options: ShowOptions) -> None:
    """Show the state and the result of a conversation; with @EVENT, its state after that event."""
    settings, asked = FaceSettings.from_env(), Point.parse(options.point)
    events: list[Event] = []
    if asked.at is None:
        summary = asyncio.run(read_summary(settings, asked.conversation_id))
    else:
        events = asked.cut(asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True)))
        summary = summarize(events)
    waits_for = asyncio.run(read_wait_reason(settings, asked.conversation_id)) if asked.at is None else ""
    if options.as_json:
        print_json(summary.as_json() | ({"wait_reason": waits_for} if waits_for else {}))
        return
    printer = EventPrinter(as_json=False)
    if events:
        printer.event(events[-1])
    print_text("\n".join(summary_lines(summary)))
    if waits_for:
        print_text(f"{'Waits for:':<14}{clean_line(WAITS.get(waits_for, waits_for))}")
    if summary.message:
        print_text("\n" + summary.message)
    if summary.asked_id is not None:
        events = events or asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True))
        action = events[summary.asked_id - 1]
        assert isinstance(action, RiskyAction)
        printer.question(action)


@click.command()
@click.argument("conversation_id")
@click.option("-f", "--follow", is_flag=True, help="Follow the conversation until it is over.")
@json_option
@options_as(LogOptions)
def logs(options: LogOptions) -> None:
    """Show the events of a conversation in a readable form."""
    settings, conversation_id = FaceSettings.from_env(), options.conversation_id
    printer = EventPrinter(as_json=options.as_json)
    if options.follow:
        with contextlib.suppress(RunIsOver):
            asyncio.run(_follow(settings, conversation_id, printer))
            return
    for event in asyncio.run(read_events(settings, conversation_id, is_lenient=True)):
        printer.event(event)


@click.command()
@click.argument("conversation_id")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; by default standard output.")
@click.option("--format", "style", type=click.Choice(["events", "openhands"]), default="events", show_default=True)
@options_as(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write the events of a conversation, one JSON object per line: id, kind, source, cause_id, timestamp and more.

    With --format openhands, write one JSON list: a trajectory as OpenHands V0 saves and reads it.
    """
    output = options.output
    events = asyncio.run(read_events(FaceSettings.from_env(), options.conversation_id, is_lenient=True))
    if options.style == "openhands":
        text = json.dumps(trajectory_of(events), indent=4) + "\n"
    else:
        text = "".join(event_line(event) + "\n" for event in events)
    if output is None:
        print_ascii(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The file {output} cannot be written: {error.strerror}.", remedy="Name another with -o."
        ) from error


async def _follow(settings: FaceSettings, conversation_id: str, printer: EventPrinter) -> None:
    tally = Tally()
    async with (
        conversation_client(settings, conversation_id) as client,
        contextlib.aclosing(client.tail(conversation_id, is_whole=True, is_lenient=True)) as events,
    ):
        async for event in events:
            printer.event(event)
            tally.add(event)
            if tally.status.is_terminal and tally.last_event_id >= await client.log.last_id(conversation_id):
                return


async def _listed(settings: FaceSettings, limit: int) -> tuple[list[Listed], bool]:
    """Return what there is, newest first, and whether that is all."""
    home = Home(settings.home)
    found, is_whole = list(_listed_runs(home, limit)), True
    try:
        async with cluster_client(settings) as client:
            found += [_listed_row(row) for row in await client.recent(limit=limit)]
    except NoCluster:
        is_whole = not home.has_had_cluster
        if not is_whole:
            note("The cluster is not up, so its conversations are not listed.")
    return sorted(found, key=lambda listed: listed.updated, reverse=True)[:limit], is_whole


def _listed_row(row: ConversationRow) -> Listed:
    return Listed(
        conversation_id=row.conversation_id,
        state=row.state,
        wait_reason=row.wait_reason,
        iterations=int(row.fields.get("iterations", 0)),
        cost_usd=float(row.fields.get("cost_usd", 0)),
        has_unknown_cost=row.fields.get("has_unknown_cost", "0") == "1",
        updated=row.updated.isoformat(),
        title=row.title,
    )


def _listed_runs(home: Home, limit: int) -> Iterator[Listed]:
    for path in home.run_folders()[:limit]:
        folder = RunFolder(path)
        if not folder.has_events:
            continue
        try:
            summary = folder.summary()
        except CorruptEntry as error:
            note(str(error))
            continue
        yield Listed(
            conversation_id=summary.conversation_id,
            state=summary.state,
            wait_reason="" if folder.is_over else "in progress, or killed",
            iterations=summary.iterations,
            cost_usd=summary.cost_usd,
            has_unknown_cost=summary.has_unknown_cost,
            updated=summary.updated.isoformat() if summary.updated else "",
            title=summary.title,
        )
