"""The conversations that a command acts on: given by id, or selected by label and state.

Holds: conversations selected by label or state are ended or deleted only after the user has confirmed their number, or
has passed --yes.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from broker.contract import AgentState
from broker.log import SCHEDULED, WAITING, ConversationQuery, ConversationRow, Selection
from broker.runtime import DeckhandsError, UnknownConversation, UsageError, format_count
from deckhands.cli.conversation_ids import CONVERSATION_ID, convert_error_of_task
from deckhands.client import (
    IsArchived,
    NotStopped,
    ask,
    cluster_client,
    conversation_client,
    for_each,
    note,
    print_json,
)
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from deckhands.client import Client

SHOWN_FAILURES = 10
YES = ("y", "yes")


label_option = click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Conversations with this label. May be repeated; all must match.",
)
state_option = click.option(
    "--state",
    "states",
    default="",
    metavar="STATE,…",
    help="Only those in one of these states, such as running or error. `scheduled` ones wait for their "
    "time, `waiting` ones for anything else.",
)
yes_option = click.option("-y", "--yes", "is_sure", is_flag=True, help="Do not ask first.")
task_option = click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK",
    help="The conversation of the Celery task with this id. May be repeated.",
)
many_argument = click.argument("conversation_ids", metavar="[ID]...", nargs=-1, type=CONVERSATION_ID)


def chosen_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options of `Chosen`."""

    @wraps(command)
    def call(*, tasks: tuple[str, ...], conversation_ids: tuple[str, ...], **values: Any) -> Any:
        from deckhands.client import derive_task_conversation_id

        ids = (*conversation_ids, *map(derive_task_conversation_id, tasks))
        return command(tasks=tasks, conversation_ids=ids, **values)

    for option in (state_option, label_option, task_option, many_argument):
        call = option(call)
    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The arguments and options that `chosen_options` adds to a command."""

    conversation_ids: tuple[str, ...]
    tasks: tuple[str, ...]
    labels: tuple[str, ...]
    states: str

    @property
    def is_selection(self) -> bool:
        """Whether the conversations are selected by label or state."""
        return bool(self.labels or self.states)

    @property
    def only_id(self) -> str | None:
        """The only conversation given by id; None if there are several, or a selection."""
        return self.conversation_ids[0] if len(self.conversation_ids) == 1 and not self.is_selection else None

    def selection(self) -> Selection:
        """Return the selection by label and state.

        Raises:
            UsageError: a label or a state is invalid.
        """
        return Selection(parse_labels(self.labels), parse_states(self.states))

    def check(self) -> None:
        """Check that either ids or a selection are given.

        Raises:
            UsageError: none or both are given.
        """
        if self.is_selection == bool(self.conversation_ids):
            raise UsageError(
                "It is not clear which conversations are meant.",
                remedy="Name their ids, or pass --task, --label or --state.",
            )
        self.selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenToEnd(Chosen):
    """`Chosen` for a command that ends or deletes conversations.

    Attributes:
        is_sure: whether to skip the confirmation.
    """

    is_sure: bool


@dataclass(frozen=True, slots=True)
class BulkAction:
    """The action of a command on each conversation.

    Attributes:
        done: the participle: `paused`, `deleted`.
        fits: whether the action applies to a conversation of a selection; others are skipped.
        is_end: whether the user must confirm the action for a selection.
        reaches_archive: whether it also applies to archived conversations, given by their full ids.
    """

    done: str
    act: Callable[[Client, str], Awaitable[object]]
    fits: Callable[[ConversationRow], bool]
    is_end: bool = False
    reaches_archive: bool = False


@dataclass(slots=True)
class _BulkOutcomes:
    """The outcomes of many actions, printed as they arrive."""

    action: BulkAction
    as_json: bool
    failures: list[str] = field(default_factory=list)
    done: int = 0
    failed: int = 0

    async def do(self, client: Client, conversation_id: str) -> None:
        """Act on one conversation. Errors of the store that concern all of them are raised."""
        from broker.log import NotDeleted

        try:
            await self.action.act(client, conversation_id)
        except (UsageError, NotDeleted, NotStopped) as error:
            self.fail(conversation_id, error)
        else:
            self.done += 1
            if self.as_json:
                print_json({"conversation_id": conversation_id, "done": True})

    def fail(self, conversation_id: str, error: DeckhandsError) -> None:
        """Count a refused conversation."""
        self.failed += 1
        if len(self.failures) < SHOWN_FAILURES:
            self.failures.append(error.message)
        if self.as_json:
            reported = {"code": error.code, "message": error.message}
            print_json({"conversation_id": conversation_id, "done": False} | reported)

    def close(self) -> int:
        """Print the totals, and return the exit code."""
        for failure in self.failures:
            note(failure)
        if self.failed > len(self.failures):
            note(f"… and {self.failed - len(self.failures):,} more.")
        note(f"{format_count(self.done, 'conversation')} {self.action.done}.")
        return 1 if self.failed else 0


async def run_on_chosen(chosen: Chosen, action: BulkAction, *, as_json: bool, is_sure: bool = False) -> int:
    """Act on every chosen conversation, and return the exit code: 1 if any was refused.

    Raises:
        UsageError: the choice is missing or ambiguous, or there is no terminal for the confirmation.
        click.Abort: the user does not confirm.
        StoreError: the store is unavailable; the action has taken effect for the printed conversations.
    """
    from deckhands.cli.progress import ProgressCounter
    from deckhands.client import derive_task_conversation_id

    chosen.check()
    settings = CliSettings.from_env()
    outcomes = _BulkOutcomes(action, as_json)
    if not chosen.is_selection:
        tasks = {derive_task_conversation_id(task): task for task in chosen.tasks}
        for conversation_id in chosen.conversation_ids:
            try:
                async with conversation_client(settings, conversation_id) as client:
                    await outcomes.do(client, conversation_id)
            except UnknownConversation as error:
                if not (action.reaches_archive and isinstance(error, IsArchived)):
                    of_task = tasks.get(conversation_id)
                    outcomes.fail(conversation_id, convert_error_of_task(error, of_task) if of_task else error)
                    continue
                async with cluster_client(settings) as client:
                    await outcomes.do(client, conversation_id)
        return outcomes.close()
    selection = chosen.selection()
    async with cluster_client(settings) as client:
        number = 0
        async for _ in _ids(client, selection, action):
            number += 1
        if number and action.is_end and not is_sure:
            require_confirmation(format_count(number, "conversation"), action.done)
        with ProgressCounter(f"conversations {action.done}", number) as progress:

            async def do(conversation_id: str) -> None:
                await outcomes.do(client, conversation_id)
                progress.add()

            await for_each(_ids(client, selection, action), do)
    return outcomes.close()


async def _ids(client: Client, selection: Selection, action: BulkAction) -> AsyncIterator[str]:
    async for page in ConversationQuery(client.store, selection).iterate_pages():
        for row in page:
            if action.fits(row):
                yield row.conversation_id


def require_confirmation(what: str, done: str) -> None:
    """Ask the user at the terminal to confirm.

    Raises:
        UsageError: there is no terminal.
        click.Abort: the user does not confirm.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{what} would be {done}, and there is no terminal to confirm it.", remedy="Pass --yes.")
    ask(f"{what} will be {done}. Continue? [y/N] ")
    if sys.stdin.readline().strip().lower() not in YES:
        raise click.Abort


def parse_labels(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse labels given as KEY=VALUE.

    Raises:
        UsageError: one is invalid, or two contradict each other.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--label {ascii(text)[:200]} is not KEY=VALUE.", remedy="Write --label team=billing.")
        if found.get(name, value) != value:
            raise UsageError(f"--label {ascii(name)[:200]} is given twice.", remedy="A label has one value.")
        found[name] = value
    if not found:
        return found
    from deckhands.client import to_labels  # imports all that describes a task

    return dict(to_labels(found))


def parse_states(text: str) -> frozenset[str]:
    """Parse states separated by commas.

    Raises:
        UsageError: there is no such state.
    """
    states = [part for part in (part.strip().lower() for part in text.split(",")) if part]
    known = [*(state.value for state in AgentState), WAITING, SCHEDULED]
    for state in states:
        if state not in known:
            raise UsageError(f"There is no state {ascii(state)[:100]}.", remedy=f"Known: {', '.join(known)}.")
    return frozenset(states)
