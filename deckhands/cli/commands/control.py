"""`deckhands message`, `pause`, `resume`, `recover`, `cancel`, `close`, `rm` and `restore`: control conversations."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from broker.contract import TERMINAL_STATES, AgentState, MessagePolicy, is_settled
from broker.log import ConversationRow
from broker.runtime import UnknownConversation, format_count
from deckhands.cli.authorship import author_options, record_operation, with_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import CONVERSATION_ID, conversation_argument
from deckhands.cli.options import json_option, read_task
from deckhands.cli.progress import ProgressCounter
from deckhands.cli.selection import (
    BulkAction,
    Chosen,
    ChosenToEnd,
    chosen_options,
    require_confirmation,
    run_on_chosen,
    yes_option,
)
from deckhands.client import (
    Client,
    NotStopped,
    cluster_client,
    note,
    on_conversation,
    print_json,
    print_text,
    render_state,
)
from deckhands.settings import CliSettings

SECTION = "Control a conversation"
SUMMARIES = {
    "message": "Send a message to the agent; the conversation continues.",
    "pause": "Pause conversations: nothing new is started.",
    "resume": "Continue conversations that were paused or stopped.",
    "recover": "Get an agent out of a loop.",
    "cancel": "Stop conversations and their running work.",
    "close": "Close conversations that are over; their workspaces are removed after a week.",
    "rm": "Delete conversations: their logs, results, files in the store and secrets.",
    "restore": "Bring archived conversations back into the store.",
}

CANCEL_WAIT_SECONDS = 30.0
model_option = click.option("--model", help="The model to continue with; by default the same as before.")
WAYS = {"wait": 1, "go-on": 2, "stop": 3}
"""The ways out of a loop, and OpenHands' numbers for them."""


RESUMABLE_STATES = frozenset({AgentState.PAUSED, AgentState.STOPPED, AgentState.ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOptions(Chosen):
    """Options of `pause`."""

    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions(Chosen):
    """Options of `resume`; without a model, the conversations keep their own."""

    model: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Options of `message`; without `text` and `file`, standard input is the message."""

    conversation_id: str
    model: str | None
    text: str | None
    file: Path | None
    double_texting: MessagePolicy | None


@dataclass(frozen=True, slots=True)
class RecoverOptions:
    """Options of `recover`; `way` is a key of `WAYS`."""

    conversation_id: str
    model: str | None
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOptions(ChosenToEnd):
    """Options of `cancel`."""

    no_wait: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseOptions(ChosenToEnd):
    """Options of `close`."""

    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions(ChosenToEnd):
    """Options of `rm`."""

    must_cancel: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of `restore`."""

    conversation_ids: tuple[str, ...]
    as_json: bool


@click.command()
@conversation_argument
@click.argument("text", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file that holds the message.")
@model_option
@click.option(
    "--double-texting",
    type=click.Choice(get_args(MessagePolicy)),
    help="The policy if the agent is working; by default that of the conversation.",
)
@author_options
@with_options(MessageOptions)
def message(options: MessageOptions) -> None:
    """Send a message to the agent, which then continues from any state. Without TEXT, standard input is the message."""
    name = options.conversation_id
    content = read_task(options.text, file=options.file)
    on_conversation(
        name,
        lambda client: with_author(client, "message").send_message(
            name, content, model=options.model, double_texting=options.double_texting
        ),
    )
    note("The message is in the log.")


@click.command()
@chosen_options
@json_option
@author_options
@with_options(PauseOptions)
def pause(options: PauseOptions) -> int:
    """Pause conversations: running work finishes, and nothing new starts.

    Name conversations, or choose them by --label and --state; chosen ones that are over are skipped.
    """
    action = BulkAction("paused", lambda client, name: with_author(client, "pause").pause(name), _may_be_paused)
    return _run_action(options, action, "The request is in the log.", as_json=options.as_json)


@click.command()
@chosen_options
@model_option
@json_option
@author_options
@with_options(ResumeOptions)
def resume(options: ResumeOptions) -> int:
    """Continue conversations that were paused or stopped, or have failed.

    Name them, or choose them by --label and --state; chosen ones in other states are skipped.
    """
    action = BulkAction(
        "resumed",
        lambda client, name: with_author(client, "resume").resume(name, model=options.model),
        lambda row: row.state in RESUMABLE_STATES and not row.is_closed,
    )
    return _run_action(options, action, "The request is in the log.", as_json=options.as_json)


@click.command()
@conversation_argument
@click.argument("way", type=click.Choice(list(WAYS)))
@model_option
@author_options
@with_options(RecoverOptions)
def recover(options: RecoverOptions) -> None:
    """Get an agent out of a loop: `wait` or `go-on` without the repeated part, or `stop`."""
    name = options.conversation_id
    option = WAYS[options.way]
    on_conversation(
        name, lambda client: with_author(client, "recover").recover(name, option=option, model=options.model)
    )
    note("The choice is in the log.")


@click.command()
@chosen_options
@click.option("--no-wait", is_flag=True, help="Do not wait until they have stopped.")
@yes_option
@json_option
@author_options
@with_options(CancelOptions)
def cancel(options: CancelOptions) -> int:
    """Stop conversations and their running work. Waits until the agents have stopped.

    Name conversations, or choose them by --label and --state; chosen ones that are over are skipped.
    """
    seconds = None if options.no_wait else CANCEL_WAIT_SECONDS
    if options.only_id is None:
        action = BulkAction(
            "cancelled",
            lambda client, name: with_author(client, "cancel").cancel(name, wait_seconds=seconds),
            lambda row: row.state not in TERMINAL_STATES and not row.is_closed,
            is_end=True,
        )
        return asyncio.run(run_on_chosen(options, action, as_json=options.as_json, is_sure=options.is_sure))
    name = options.only_id
    summary = on_conversation(name, lambda client: with_author(client, "cancel").cancel(name, wait_seconds=seconds))
    if options.as_json:
        print_json(summary.as_json())
    else:
        note("The request is in the log." if options.no_wait else f"The conversation {render_state(summary.state)}.")
    return 0


@click.command()
@chosen_options
@yes_option
@json_option
@author_options
@with_options(CloseOptions)
def close(options: CloseOptions) -> int:
    """Close conversations that are over: they take no more messages, and their workspaces are removed after a week.

    Name conversations, or choose them by --label and --state; chosen ones that are not over are skipped.
    """
    action = BulkAction(
        "closed",
        lambda client, name: with_author(client, "close").close(name),
        lambda row: row.state in TERMINAL_STATES and not row.is_closed,
        is_end=True,
    )
    return _run_action(options, action, "The conversation is closed.", as_json=options.as_json, is_sure=options.is_sure)


def _run_action(options: Chosen, action: BulkAction, said: str, *, as_json: bool, is_sure: bool = False) -> int:
    """Act on the chosen conversations; `said` is the note printed for a single one."""
    name = options.only_id
    if name is None or as_json:
        return asyncio.run(run_on_chosen(options, action, as_json=as_json, is_sure=is_sure))
    on_conversation(name, lambda client: action.act(client, name))
    note(said)
    return 0


def _may_be_paused(row: ConversationRow) -> bool:
    return row.state not in TERMINAL_STATES and row.state != AgentState.PAUSED and not row.is_closed


@click.command()
@chosen_options
@click.option("--cancel", "must_cancel", is_flag=True, help="Cancel running conversations first, and delete them too.")
@yes_option
@json_option
@author_options
@with_options(RemoveOptions)
def rm(options: RemoveOptions) -> int:
    """Delete idle conversations: logs, results, secrets and all their other keys in the store.

    Name conversations, or choose them by --label and --state; chosen ones that run are skipped. Delegates that have
    ended are deleted with their parent. Workspaces end as those of closed conversations do. An archived conversation
    given by its full id is deleted from the archive too, as is a restored one. A deletion cannot be undone, so at a
    terminal the command asks first; repeat it to complete an interrupted one.
    """

    async def remove(client: Client, conversation_id: str) -> None:
        if options.must_cancel:
            with contextlib.suppress(UnknownConversation):  # nothing runs in the archive
                if not (await client.row(conversation_id)).is_closed:
                    await _cancel(client, conversation_id)
        await record_operation(client, "delete", conversation_id)
        await client.delete(conversation_id)

    def fits(row: ConversationRow) -> bool:
        is_idle = row.is_closed or (row.state in set(AgentState) and is_settled(AgentState(row.state)))
        return options.must_cancel or is_idle

    named = len(options.conversation_ids)
    if named and sys.stdin.isatty() and not options.is_sure:
        require_confirmation(format_count(named, "conversation"), "deleted")
    action = BulkAction("deleted", remove, fits, is_end=True, reaches_archive=True)
    return asyncio.run(run_on_chosen(options, action, as_json=options.as_json, is_sure=options.is_sure))


async def _cancel(client: Client, conversation_id: str) -> None:
    """Stop a conversation and wait until it is idle.

    Raises:
        NotStopped: it is not within 30 s.
    """
    summary = await with_author(client, "cancel").cancel(conversation_id, wait_seconds=CANCEL_WAIT_SECONDS)
    if not is_settled(AgentState(summary.state)):
        raise NotStopped(conversation_id, CANCEL_WAIT_SECONDS)


@click.command()
@click.argument("conversation_ids", metavar="ID...", nargs=-1, required=True, type=CONVERSATION_ID)
@json_option
@author_options
@with_options(RestoreOptions)
def restore(options: RestoreOptions) -> None:
    """Bring archived conversations back into the store, so that they can be continued. Prints their ids.

    Name them by their full ids. The archive is the one that DECKHANDS_ARCHIVE names; the file stays in it. A
    conversation that is still in the store does not change. Secrets are not archived: set them again. A workspace
    starts with its last checkpoint, or with its initial files.
    """
    asyncio.run(_restore(CliSettings.from_env(), options))


async def _restore(settings: CliSettings, options: RestoreOptions) -> None:
    ids = options.conversation_ids
    shows_ids = sys.stdout.isatty()
    async with cluster_client(settings) as client:
        with ProgressCounter("conversations restored", len(ids)) as progress:
            for conversation_id in ids:
                is_new = await client.restore(conversation_id)
                await record_operation(client, "restore", conversation_id)
                if not shows_ids:  # on a terminal, the printed ids show the progress
                    progress.add()
                if options.as_json:
                    print_json({"conversation_id": conversation_id, "restored": is_new})
                    continue
                if not is_new:
                    note(f"{conversation_id} is in the store already.")
                print_text(conversation_id)
