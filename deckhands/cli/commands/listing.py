"""`deckhands ls`: the conversations of the cluster and the runs of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC
from typing import TYPE_CHECKING

import click

from broker.log import ConversationQuery, ConversationRow, Conversations, Selection, is_any_of
from broker.runtime import CorruptEntry, UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.cli.selection import label_option, parse_labels, parse_states, state_option
from deckhands.client import (
    NoCluster,
    clean_line,
    count_columns,
    fit_width,
    note,
    open_cluster,
    print_json,
    print_text,
    render_cost,
    render_table,
)
from deckhands.cluster import Home
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from deckhands.client import (
        ArchivedConversation,
        FoundConversation,
        RunFolder,
        SearchPage,
        SearchQuery,
        TextMatch,
        TextSearch,
    )

SECTION = "Read conversations"
SUMMARIES = {"ls": "List conversations and runs."}

HEAD = ("CONVERSATION", "WHERE", "STATE", "STEPS", "COST", "UPDATED (UTC)", "LABELS", "TITLE")
SPARE = ("LABELS", "UPDATED (UTC)", "STEPS", "COST", "WHERE")
"""The columns that a narrow terminal leaves out, in this order."""
LABELS = HEAD.index("LABELS")
"""This column is left out if no row has a label."""


@dataclass(frozen=True, slots=True)
class ListedItem:
    """A conversation or a run as a listing shows it.

    Attributes:
        is_run: it is a run of this machine, made by `deckhands run`.
        is_archived: it is in the archive.
        match: where it has the text that was searched for; None without a search.
        updated: a time in ISO 8601, or empty.
        labels: given by its producer.
        not_before: its start time, in ISO 8601; empty if it does not wait for one.
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
    labels: Mapping[str, str] = field(default_factory=dict)
    not_before: str = ""
    is_archived: bool = False
    match: TextMatch | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row in the table."""
        state = f"{self.state} ({self.wait_reason})" if self.wait_reason else self.state
        if self.not_before:
            state = f"scheduled ({self.not_before[:19].replace('T', ' ')} UTC)"
        moment = self.updated[:19].replace("T", " ")
        cost = render_cost(self.cost_usd, is_whole=not self.has_unknown_cost)
        where = "run" if self.is_run else "archive" if self.is_archived else "cluster"
        labels = " ".join(f"{name}={value}" for name, value in sorted(self.labels.items()))
        return (self.conversation_id, where, state, str(self.iterations), cost, moment, labels, self.title)


@dataclass(slots=True)
class Totals:
    """The totals of the last line."""

    number: int = 0
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    states: Counter[str] = field(default_factory=Counter)

    def add(self, listed: Sequence[ListedItem]) -> None:
        """Add a listed item."""
        self.number += len(listed)
        self.iterations += sum(one.iterations for one in listed)
        self.cost_usd += sum(one.cost_usd for one in listed)
        self.has_unknown_cost |= any(one.has_unknown_cost for one in listed)
        self.states.update(one.state for one in listed)

    def line(self, count: int) -> str:
        """Return the last line: how many of how many, in which states, and their cost."""
        number = format_count(self.number, "conversation") if self.number == count else f"{self.number:,} of {count:,}"
        states = ", ".join(f"{found:,} {state}" for state, found in self.states.most_common())
        cost = render_cost(self.cost_usd, is_whole=not self.has_unknown_cost)
        return f"{number}: {states}; {format_count(self.iterations, 'step')}, cost: {cost}"


@dataclass(frozen=True, slots=True)
class LsOptions:
    """Options of `ls`; `is_all` lists without a limit."""

    limit: int
    is_all: bool
    is_archived: bool
    labels: tuple[str, ...]
    states: str
    text: str | None
    as_json: bool


@click.command()
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The most to list.")
@click.option("--all", "is_all", is_flag=True, help="List all of them, however many there are.")
@click.option("--archived", "is_archived", is_flag=True, help="List the archive instead.")
@label_option
@state_option
@click.option(
    "--text",
    metavar="WORDS",
    help="Search: only those with a title, task or other event that has all of these words; also archived ones.",
)
@json_option
@with_options(LsOptions)
def ls(options: LsOptions) -> None:
    """List the conversations of the cluster and the runs of this machine, newest first, with totals.

    With --all, the runs come first, then the conversations in the order of their creation.

    With --archived, it lists the conversations of the archive that DECKHANDS_ARCHIVE names, last archived first, and
    needs no cluster. A filter then reads every file until the limit is reached.

    With --text, it searches the runs, the cluster and the archive, in this order and each newest first, and shows where
    the words are. There is no index: every log may have to be read.
    """
    selection = Selection(parse_labels(options.labels), parse_states(options.states))
    settings = CliSettings.from_env()
    if options.is_archived and not settings.archive:
        raise UsageError("There is no archive.", remedy="Set DECKHANDS_ARCHIVE to where archived conversations are.")
    listing = _search if options.text is not None else _list_archived if options.is_archived else _list
    asyncio.run(listing(settings, selection, options))


async def _list(settings: CliSettings, selection: Selection, options: LsOptions) -> None:
    home = Home(settings.home)
    folders = _find_runs(home)
    runs = (
        [] if selection.labels else list(_items_of_runs(folders, None if options.is_all else options.limit, selection))
    )
    count = len(folders)
    is_whole = True
    sums = Totals()
    printed = _Printer(sums, as_json=options.as_json)
    try:
        store = await open_cluster(settings=settings)
        try:
            count += await Conversations(store).count()
            rows = ConversationQuery(store, selection).iterate_pages()
            if options.is_all:
                printed.print(runs)
                async for page in rows:
                    printed.print([_item_of_row(row) for row in page])
            else:
                runs += await _first(rows, options.limit)
        finally:
            await store.aclose()
    except NoCluster:
        is_whole = not home.has_had_cluster
        if not is_whole:
            note("The cluster is not up, so its conversations are not listed.")
        if options.is_all:
            printed.print(runs)
    if not options.is_all:
        runs.sort(key=lambda listed: listed.updated, reverse=True)
        printed.print(runs[: options.limit])
    _print_end(sums, count, options, "conversation")
    if is_whole and not count and not options.as_json:
        note("There are no conversations and no runs yet. `deckhands run -t TASK` starts one.")


def _find_runs(home: Home) -> list[RunFolder]:
    """Return the runs of this machine that have events. Without any, the events' classes are not imported."""
    if not (places := home.run_folders()):
        return []
    from deckhands.client import RunFolder

    return [folder for folder in map(RunFolder, places) if folder.has_events]


async def _list_archived(settings: CliSettings, selection: Selection, options: LsOptions) -> None:
    from deckhands.client import Archive, describe_all

    archive = Archive(settings.archive)
    sums = Totals()
    names = await archive.names()
    printed = _Printer(sums, as_json=options.as_json)
    async with aclosing(describe_all(archive, names, lambda error: note(error.message))) as pages:
        async for page in pages:
            chosen = [_item_of_archive(one) for one in page if selection.matches(one.state, one.labels)]
            printed.print(chosen if options.is_all else chosen[: options.limit - sums.number])
            if not options.is_all and sums.number >= options.limit:
                break
    _print_end(sums, len(names), options, "archived conversation")
    if not names and not options.as_json:
        note("The archive is empty.")


async def _search(settings: CliSettings, selection: Selection, options: LsOptions) -> None:
    from deckhands.client import SearchQuery

    query = SearchQuery.parse(options.text or "", selection, "archive" if options.is_archived else "")
    home = Home(settings.home)
    count = 0
    sums = Totals()
    printed = _Printer(sums, as_json=options.as_json)

    def print_found(found: list[ListedItem]) -> bool:
        """Print what was found, and return whether that was all that was asked for."""
        printed.print(found if options.is_all else found[: options.limit - sums.number])
        return not options.is_all and sums.number >= options.limit

    if not selection.labels and not options.is_archived:
        folders = _find_runs(home)
        count += len(folders)
        if print_found([item for folder in folders if (item := _search_run(folder, query)) is not None]):
            return
    async with _open_search(settings, needs_note=home.has_had_cluster and not options.is_archived) as text_search:
        count += await _search_all(text_search, query, print_found)
    if not sums.number and not options.as_json:
        note(f"None of the {format_count(count, 'conversation')} that were searched has this text.")


@asynccontextmanager
async def _open_search(settings: CliSettings, *, needs_note: bool) -> AsyncGenerator[TextSearch, None]:
    """Open the search in the cluster and the archive; without a cluster, only in the archive."""
    from deckhands.client import Archive, Client, TextSearch

    try:
        store = await open_cluster(settings=settings)
    except NoCluster:
        if needs_note:
            note("The cluster is not up, so its conversations are not searched.")
        with closing(TextSearch(None, Archive(settings.archive) if settings.archive else None)) as text_search:
            yield text_search
        return
    async with Client(store, settings.archive) as client:
        yield client.text_search


async def _search_all(
    text_search: TextSearch, query: SearchQuery, print_found: Callable[[list[ListedItem]], bool]
) -> int:
    """Search until everything that was asked for is printed; return how many conversations have been searched."""
    count = unreadable = 0
    cursor: str | None = ""
    while cursor is not None:
        page = await text_search.load_page(query, cursor)
        count += page.searched
        unreadable += page.unreadable
        if print_found([_item_of_found(found) for found in page.found]):
            break
        cursor = page.next_cursor
        if cursor is not None and sys.stderr.isatty():
            note(_describe_progress(count, page))
    if unreadable:
        note(
            f"{format_count(unreadable, 'conversation')} cannot be read: damaged, or encrypted with a key unknown here."
        )
    return count


def _describe_progress(count: int, page: SearchPage) -> str:
    if page.place == "listing":
        return "Listing the archive…"
    back_to = f", back to {page.reached:%Y-%m-%d %H:%M}" if page.reached else ""
    return f"Searched {format_count(count, 'conversation')}{back_to}…"


def _search_run(folder: RunFolder, query: SearchQuery) -> ListedItem | None:
    item = next(_items_of_runs([folder], None, query.selection), None)
    if item is None:
        return None
    try:
        match = query.find_in_log(item.title, folder.events())
    except CorruptEntry as error:
        note(str(error))
        return None
    return None if match is None else replace(item, match=match)


def _item_of_found(found: FoundConversation) -> ListedItem:
    return ListedItem(
        conversation_id=found.conversation_id,
        state=found.state,
        wait_reason="",
        iterations=found.iterations,
        cost_usd=found.cost_usd,
        has_unknown_cost=found.has_unknown_cost,
        updated=found.updated.astimezone(UTC).isoformat() if found.updated else "",
        title=found.title,
        is_run=False,
        labels=found.labels,
        is_archived=found.is_archived,
        match=found.match,
    )


def _print_end(sums: Totals, count: int, options: LsOptions, what: str) -> None:
    """Print the last line, or a note that no conversation matches."""
    if options.as_json:
        return
    if sums.number:
        columns = count_columns(sys.stdout)
        total = sums.line(count)
        print_text(total if columns is None else fit_width(total, columns))
    elif count and (options.states or options.labels):
        missing = [f"has the label {label}" for label in options.labels]
        missing += [f"is in the state {options.states}"] if options.states else []
        note(f"None of {format_count(count, what)} {' and '.join(missing)}.")


class _Printer:
    """Prints a listing page by page, and adds up its totals."""

    def __init__(self, sums: Totals, *, as_json: bool) -> None:
        self._sums = sums
        self._as_json = as_json
        self._has_head = False

    def print(self, listed: Sequence[ListedItem]) -> None:
        self._sums.add(listed)
        if self._as_json:
            for one in listed:
                print_json(asdict(one))
        elif listed:
            left_out = set() if any(one.labels for one in listed) else {LABELS}
            head, *rows = [
                [cell for column, cell in enumerate(cells) if column not in left_out]
                for cells in (HEAD, *(one.cells() for one in listed))
            ]
            spare = [name for name in SPARE if name in head]
            columns = count_columns(sys.stdout)
            top, *lines = render_table(head, rows, columns=columns, spare=spare)
            found = [_describe_match(one.match, columns) for one in listed]
            lines = [text for line, below in zip(lines, found, strict=True) for text in (line, below) if text]
            print_text("\n".join(lines if self._has_head else [top, *lines]))
            self._has_head = True


def _describe_match(match: TextMatch | None, columns: int | None) -> str:
    """Return the line below a conversation that was found; empty if its title has the words."""
    if match is None or match.event_id is None:
        return ""
    line = f"  [{match.event_id}] {clean_line(match.snippet)}"
    return line if columns is None else fit_width(line, columns)


async def _first(pages: AsyncIterator[list[ConversationRow]], limit: int) -> list[ListedItem]:
    """Return the first conversations, at most this many."""
    found: list[ListedItem] = []
    async for page in pages:
        found += [_item_of_row(row) for row in page[: limit - len(found)]]
        if len(found) >= limit:
            break
    return found


def _item_of_row(row: ConversationRow) -> ListedItem:
    return ListedItem(
        conversation_id=row.conversation_id,
        state=row.state,
        wait_reason=row.wait_reason,
        iterations=int(row.fields.get("iterations", 0)),
        cost_usd=float(row.fields.get("cost_usd", 0)),
        has_unknown_cost=row.fields.get("has_unknown_cost", "0") == "1",
        updated=row.updated.isoformat(),
        title=row.title,
        is_run=False,
        labels=dict(row.labels),
        not_before=row.not_before.isoformat() if row.not_before else "",
    )


def _item_of_archive(found: ArchivedConversation) -> ListedItem:
    updated = found.manifest.updated
    return ListedItem(
        conversation_id=found.conversation_id,
        state=found.state,
        wait_reason="",
        iterations=found.iterations,
        cost_usd=found.cost_usd,
        has_unknown_cost=found.has_unknown_cost,
        updated=updated.astimezone(UTC).isoformat() if updated else "",
        title=found.title,
        is_run=False,
        labels=found.labels,
        is_archived=True,
    )


def _items_of_runs(folders: Sequence[RunFolder], limit: int | None, selection: Selection) -> Iterator[ListedItem]:
    number = 0
    for folder in folders:
        try:
            summary = folder.summary()
        except CorruptEntry as error:
            note(str(error))
            continue
        listed = ListedItem(
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
        if is_any_of(listed.state, listed.wait_reason, selection.states):
            yield listed
            number += 1
        if limit is not None and number >= limit:
            return
