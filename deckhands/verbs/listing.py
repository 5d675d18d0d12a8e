"""`deckhands ls`: the conversations of the cluster and the runs of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from broker.log.conversations import ConversationRow, Conversations
from broker.runtime.errors import CorruptEntry, UsageError
from broker.specs.agent_state import AgentState
from deckhands.cli.connecting import cluster_client
from deckhands.cli.options import json_option
from deckhands.cli.output import cost_text, note, print_json, table
from deckhands.cli.verbs import options_as
from deckhands.client.errors import NoCluster
from deckhands.home import Home
from deckhands.reading.terminal import columns_of, counted, fitted, print_text
from deckhands.runs.records import RunFolder
from deckhands.settings import FaceSettings

SECTION = "Read conversations"
VERBS = {"ls": "List conversations and runs."}

HEAD = ("CONVERSATION", "WHERE", "STATE", "STEPS", "COST", "UPDATED (UTC)", "TITLE")
SPARE = ("UPDATED (UTC)", "STEPS", "COST", "WHERE")
"""What a narrow terminal does without, the first one first."""
WAITING = "waiting"
"""In --state: for anything or anybody."""
WAITING_STATES = frozenset({AgentState.AWAITING_USER_INPUT, AgentState.AWAITING_USER_CONFIRMATION})
FIRST_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Listed:
    """A conversation or a run as a listing shows it.

    Attributes:
        is_run: it is a run of this machine, made by `deckhands run`.
        updated: a time in ISO 8601, or empty.
    """

    conversation_id: str
    state: str
    wait_reason: str
    iterations: int
    cost_usd: float
    has_unknown_cost: bool
    updated: str
    title: str
    is_run: bool

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its line in the table."""
        state = f"{self.state} ({self.wait_reason})" if self.wait_reason else self.state
        moment = self.updated[:19].replace("T", " ")
        cost = cost_text(self.cost_usd, is_whole=not self.has_unknown_cost)
        where = "run" if self.is_run else "cluster"
        return (self.conversation_id, where, state, str(self.iterations), cost, moment, self.title)

    def is_in(self, states: Sequence[str]) -> bool:
        """Say whether it is in one of the states; in none of them means in any."""
        is_waiting = bool(self.wait_reason) or self.state in WAITING_STATES
        return not states or self.state in states or (is_waiting and WAITING in states)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is listed, newest first.

    Attributes:
        count: how many there are in all, in whatever state.
        is_whole: False: there may be more, in a cluster that is not up.
    """

    found: list[Listed]
    count: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of `ls`."""

    limit: int
    states: str
    as_json: bool


@click.command()
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option(
    "--state",
    "states",
    default="",
    metavar="STATE,…",
    help="Only those in one of these states, such as running or error; waiting: for anything or anybody.",
)
@json_option
@options_as(ListOptions)
def ls(options: ListOptions) -> None:
    """List the conversations of the cluster and the runs of this machine, newest first, and add them up."""
    listing = asyncio.run(_listing(FaceSettings.from_env(), options.limit, _states_in(options.states)))
    if options.as_json:
        for listed in listing.found:
            print_json(asdict(listed))
    elif listing.found:
        columns = columns_of(sys.stdout)
        rows = [listed.cells() for listed in listing.found]
        print_text("\n".join(table(HEAD, rows, columns=columns, spare=SPARE)))
        total = _total(listing)
        print_text(total if columns is None else fitted(total, columns))
    elif listing.count:
        note(f"None of {counted(listing.count, 'conversation')} is in the state {options.states}.")
    elif listing.is_whole:
        note("There are no conversations and no runs yet. `deckhands run -t TASK` starts one.")


def _states_in(text: str) -> tuple[str, ...]:
    """Return the states that a person names, separated by commas.

    Raises:
        UsageError: there is no such state.
    """
    states = tuple(part for part in (part.strip().lower() for part in text.split(",")) if part)
    known = [*(state.value for state in AgentState), WAITING]
    for state in states:
        if state not in known:
            raise UsageError(f"There is no state {ascii(state)[:100]}.", remedy=f"Known: {', '.join(known)}.")
    return states


def _total(listing: Listing) -> str:
    """Return the last line: how many of how many, in which states, and what they have cost."""
    found = listing.found
    number = (
        counted(len(found), "conversation") if len(found) == listing.count else f"{len(found):,} of {listing.count:,}"
    )
    states = ", ".join(f"{count:,} {state}" for state, count in Counter(one.state for one in found).most_common())
    cost = cost_text(sum(one.cost_usd for one in found), is_whole=not any(one.has_unknown_cost for one in found))
    return f"{number}: {states}; {counted(sum(one.iterations for one in found), 'step')}, cost: {cost}"


async def _listing(settings: FaceSettings, limit: int, states: Sequence[str]) -> Listing:
    home = Home(settings.home)
    folders = [folder for folder in map(RunFolder, home.run_folders()) if folder.has_events]
    found, count, is_whole = list(_listed_runs(folders, limit, states)), len(folders), True
    try:
        async with cluster_client(settings) as client:
            index = Conversations(client.store)
            found += [one for one in await _rows(index, limit, states) if one.is_in(states)]
            count += await index.count()
    except NoCluster:
        is_whole = not home.has_had_cluster
        if not is_whole:
            note("The cluster is not up, so its conversations are not listed.")
    found.sort(key=lambda listed: listed.updated, reverse=True)
    return Listing(found[:limit], count, is_whole)


async def _rows(index: Conversations, limit: int, states: Sequence[str]) -> list[Listed]:
    """Return the newest conversations, enough for `limit` in these states, or all of them."""
    asked = max(limit, FIRST_PAGE) if states else limit
    while True:
        rows = [_listed_row(row) for row in await index.recent(limit=asked)]
        if len(rows) < asked or sum(row.is_in(states) for row in rows) >= limit:
            return rows
        asked *= 4


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
        is_run=False,
    )


def _listed_runs(folders: Sequence[RunFolder], limit: int, states: Sequence[str]) -> Iterator[Listed]:
    number = 0
    for folder in folders:
        try:
            summary = folder.summary()
        except CorruptEntry as error:
            note(str(error))
            continue
        listed = Listed(
            conversation_id=summary.conversation_id,
            state=summary.state,
            wait_reason="" if folder.is_over else "in progress, or killed",
            iterations=summary.iterations,
            cost_usd=summary.cost_usd,
            has_unknown_cost=summary.has_unknown_cost,
            updated=summary.updated.isoformat() if summary.updated else "",
            title=summary.title,
            is_run=True,
        )
        if listed.is_in(states):
            yield listed
            number += 1
        if number >= limit:
            return
