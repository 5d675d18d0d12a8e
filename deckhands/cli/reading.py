"""`deckhands ls`, `show`, `logs` and `export`: reading, from a cluster or from what runs have left."""

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
from deckhands.cli.options import json_option
from deckhands.cli.output import EventPrinter, cost_text, note, print_json, summary_lines, table
from deckhands.cli.reach import (
    NoCluster,
    RunIsOver,
    cluster_client,
    conversation_client,
    read_events,
    read_summary,
    read_wait_reason,
)
from deckhands.client.forking import Point
from deckhands.cluster.home import Home
from deckhands.openhands.trajectories import trajectory_of
from deckhands.reading.summary import Tally, summarize
from deckhands.reading.terminal import clean_line, print_ascii, print_text
from deckhands.runs.records import RunFolder
from deckhands.settings import FaceSettings

WAITS = {
    "newer_worker": "a controller worker of a newer version of Deckhands, which has written in its log (newer_worker)"
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


@click.command()
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
def ls(*, limit: int, as_json: bool) -> None:
    """List conversations of the cluster and runs, the newest first."""
    found, is_whole = asyncio.run(_listed(FaceSettings.from_env(), limit))
    if as_json:
        for listed in found:
            print_json(asdict(listed))
    elif found:
        print_text("\n".join(table(HEAD, [listed.cells() for listed in found])))
    elif is_whole:
        note("There are no conversations and no runs yet. `deckhands run -t TASK` makes one.")


@click.command()
@click.argument("point", metavar="ID[@EVENT]")
@json_option
def show(*, point: str, as_json: bool) -> None:
    """Show what came of a conversation, or with @EVENT how it stood after that event."""
    settings, asked = FaceSettings.from_env(), Point.parse(point)
    events: list[Event] = []
    if asked.at is None:
        summary = asyncio.run(read_summary(settings, asked.conversation_id))
    else:
        events = asked.cut(asyncio.run(read_events(settings, asked.conversation_id, is_lenient=True)))
        summary = summarize(events)
    waits_for = asyncio.run(read_wait_reason(settings, asked.conversation_id)) if asked.at is None else ""
    if as_json:
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
@click.option("-f", "--follow", is_flag=True, help="Go on until the conversation is over.")
@json_option
def logs(*, conversation_id: str, follow: bool, as_json: bool) -> None:
    """Show the events of a conversation in a readable form."""
    settings = FaceSettings.from_env()
    printer = EventPrinter(as_json=as_json)
    if follow:
        with contextlib.suppress(RunIsOver):
            asyncio.run(_follow(settings, conversation_id, printer))
            return
    for event in asyncio.run(read_events(settings, conversation_id, is_lenient=True)):
        printer.event(event)


@click.command()
@click.argument("conversation_id")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; standard output if none.")
@click.option("--format", "style", type=click.Choice(["events", "openhands"]), default="events", show_default=True)
def export(*, conversation_id: str, output: Path | None, style: str) -> None:
    """Write the events of a conversation: id, kind, source, cause_id, timestamp and more, a JSON object a line.

    With --format openhands: one JSON list, a trajectory as OpenHands V0 saves and reads it.
    """
    events = asyncio.run(read_events(FaceSettings.from_env(), conversation_id, is_lenient=True))
    if style == "openhands":
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
            f"The file {output} cannot be written: {error.strerror}.", remedy="Name another by -o."
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
    """Return what there is, the newest first, and whether that is all."""
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
            wait_reason="" if folder.is_over else "under way, or killed",
            iterations=summary.iterations,
            cost_usd=summary.cost_usd,
            has_unknown_cost=summary.has_unknown_cost,
            updated=summary.updated.isoformat() if summary.updated else "",
            title=summary.title,
        )
