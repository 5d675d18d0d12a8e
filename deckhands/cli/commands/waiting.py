"""`deckhands wait` and `results`: wait for many conversations, and print their results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from broker.contract import decode_any
from broker.log import ConversationQuery, ConversationRow, Conversations
from broker.runtime import CorruptEntry, UnknownConversation, UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.options import Amount, json_option
from deckhands.cli.progress import ProgressCounter
from deckhands.cli.selection import Chosen, chosen_options
from deckhands.client import (
    Client,
    ExitCode,
    Summary,
    Tally,
    Until,
    cluster_client,
    combine_exit_codes,
    ignore_closed_output,
    note,
    print_json,
    print_text,
    render_cost,
    render_result,
    render_table,
)
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {
    "wait": "Wait until conversations have settled.",
    "results": "Print or write the results of conversations that have settled.",
}

HEAD = ("CONVERSATION", "STATE", "COST", "RESULT")
READ_AT_ONCE = 8
TABLE_ROWS = 500
SHOWN_LOST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOptions(Chosen):
    """Options of `wait`."""

    timeout: float | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsOptions(Chosen):
    """Options of `results`."""

    output: Path | None
    as_json: bool


@click.command()
@chosen_options
@click.option("--timeout", type=Amount(min=0, min_open=True), help="Wait no longer than this many seconds.")
@json_option
@with_options(WaitOptions)
def wait(options: WaitOptions) -> int:
    """Wait until conversations have settled: nothing happens any more without input.

    Name them, or choose them by --label and --state as they are now. With --json, each is printed as it settles. Exit
    codes: 0 if all have finished; else the code of `run` if the others share one, else 1; 4 when the time is up.
    """
    options.check()
    return int(asyncio.run(_wait(options)))


@click.command()
@chosen_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A file to write, one JSON object per line, whole or not at all.",
)
@json_option
@with_options(ResultsOptions)
def results(options: ResultsOptions) -> None:
    """Print the results of settled conversations: the named ones, the chosen ones, or all.

    A line of JSON has the `conversation_id` and the `summary` that `show --json` prints.
    """
    if options.conversation_ids:
        options.check()
    options.selection()  # refuse an invalid label before creating a file
    with _open_output(options.output) as write, ProgressCounter("results written") as progress, ignore_closed_output():

        def write_one(result: dict[str, Any]) -> None:
            assert write is not None
            write(result)
            progress.add()

        number, others = asyncio.run(_results(options, write=write_one if write is not None else None))
    if others:
        note(f"{format_count(others, 'conversation')} without a result: not settled, or damaged.")
    if options.output is not None:
        note(f"{format_count(number, 'result')} written to {options.output}.")


async def _wait(options: WaitOptions) -> ExitCode:
    codes: Counter[ExitCode] = Counter()
    states: Counter[str] = Counter()
    lost: list[str] = []
    async with cluster_client(CliSettings.from_env()) as client:
        ids = [row.conversation_id async for row in _find_chosen(client, options)]
        if not ids:
            raise UsageError("There is no such conversation.", remedy="`deckhands ls` lists all conversations.")
        with ProgressCounter("conversations settled", len(ids)) as progress:
            async with client.watcher.ends() as ends:
                for conversation_id in ids:
                    ends.add(conversation_id)
                ends.complete()
                try:
                    async with asyncio.timeout(options.timeout):
                        async for conversation_id, end in ends:
                            if not isinstance(end, Summary):
                                lost.append(f"{conversation_id}: {end.message}")
                                continue
                            codes[end.exit_code] += 1
                            states[end.state] += 1
                            if options.as_json:
                                print_json(render_result(conversation_id, end))
                            progress.add()
                except TimeoutError:
                    note(f"{format_count(ends.waiting, 'conversation')} not settled within {options.timeout or 0:g} s.")
                    return ExitCode.OUT_OF_TIME
    for each in lost[:SHOWN_LOST]:
        note(each)
    note(f"Settled: {', '.join(f'{number:,} {state}' for state, number in states.most_common()) or 'none'}.")
    return ExitCode.ERROR if lost else combine_exit_codes(codes)


async def _find_chosen(client: Client, options: Chosen) -> AsyncIterator[ConversationRow]:
    """Yield the chosen conversations; all if there is no choice.

    Raises:
        UnknownConversation: a given id does not exist.
    """
    if options.conversation_ids:
        index = Conversations(client.store)
        for conversation_id in dict.fromkeys(options.conversation_ids):
            yield await index.load_row(conversation_id)
        return
    async for page in ConversationQuery(client.store, options.selection()).iterate_pages():
        for row in page:
            yield row


async def _results(options: ResultsOptions, *, write: Callable[[dict[str, Any]], object] | None) -> tuple[int, int]:
    """Print or write results; return how many, and how many conversations have none."""
    number = others = 0
    rows: list[tuple[str, ...]] = []
    has_head = False
    async with cluster_client(CliSettings.from_env()) as client:
        async for some in _in_groups(_find_chosen(client, options)):
            for found in await asyncio.gather(*(_summary(client, row) for row in some)):
                if found is None:
                    others += 1
                    continue
                number += 1
                if write is not None:
                    write(render_result(found.conversation_id, found))
                elif options.as_json:
                    print_json(render_result(found.conversation_id, found))
                else:
                    rows.append(_cells(found))
            if len(rows) >= TABLE_ROWS:
                _print_table(rows, has_head=has_head)
                rows = []
                has_head = True
    if rows:
        _print_table(rows, has_head=has_head)
    return number, others


async def _in_groups(rows: AsyncIterator[ConversationRow]) -> AsyncIterator[list[ConversationRow]]:
    some: list[ConversationRow] = []
    async for row in rows:
        some.append(row)
        if len(some) == READ_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


async def _summary(client: Client, row: ConversationRow) -> Summary | None:
    """Return the summary of a conversation; None if it has not settled."""
    if not Until.SETTLED.may_be_met(row.state):
        return None
    try:
        tally = Tally.of(await client.log.read(row.conversation_id, decode=decode_any))
    except (CorruptEntry, UnknownConversation):
        return None
    return tally.summary() if tally.last_event_id and Until.SETTLED.is_met(tally.status) else None


def _cells(summary: Summary) -> tuple[str, ...]:
    cost = render_cost(summary.cost_usd, is_whole=not summary.has_unknown_cost)
    reported = json.dumps(summary.outputs, ensure_ascii=False) if summary.outputs else summary.message
    return (summary.conversation_id, summary.state, cost, summary.last_error or reported)


def _print_table(rows: list[tuple[str, ...]], *, has_head: bool) -> None:
    lines = render_table(HEAD, rows)
    print_text("\n".join(lines[1:] if has_head else lines))


@contextlib.contextmanager
def _open_output(path: Path | None) -> Iterator[Callable[[dict[str, Any]], object] | None]:
    """Yield a function that writes a line to a file which replaces `path` at the end; None without a path.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.absolute().parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                yield lambda line: file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(0o666 & ~_umask())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(
            f"The file {path} cannot be written: {error.strerror}.", remedy="Name another with -o."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
