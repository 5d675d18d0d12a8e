"""`deckhands rm`: delete conversations and all of their keys."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import click

from broker.contract import AgentState, is_settled
from broker.log import ConversationRow
from broker.runtime import UnknownConversation
from deckhands.cli.choosing import BulkAction, ChosenToEnd, chosen_options, do_to_chosen, yes_option
from deckhands.cli.commands.control import CANCEL_WAIT_SECONDS
from deckhands.cli.options import json_option
from deckhands.cli.verbs import options_as
from deckhands.client import Client, NotStopped

SECTION = "Control a conversation"
VERBS = {"rm": "Delete conversations: their logs, results, files in the store and secrets."}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions(ChosenToEnd):
    """Options of `rm`."""

    must_cancel: bool
    as_json: bool


@click.command()
@chosen_options
@click.option("--cancel", "must_cancel", is_flag=True, help="Cancel running conversations first, and delete them too.")
@yes_option
@json_option
@options_as(RemoveOptions)
def rm(options: RemoveOptions) -> int:
    """Delete idle conversations: logs, results, secrets and all their other keys in the store.

    Name conversations, or choose them by --label and --state; chosen ones that run are skipped. Delegates that have
    ended are deleted with their parent. Workspaces end as those of closed conversations do. An archived conversation
    given by its full id is deleted from the archive too, as is a restored one. A deletion cannot be undone; repeat the
    command to complete an interrupted one.
    """

    async def remove(client: Client, conversation_id: str) -> None:
        if options.must_cancel:
            with contextlib.suppress(UnknownConversation):  # nothing runs in the archive
                if not (await client.row(conversation_id)).is_closed:
                    await _cancel(client, conversation_id)
        await client.delete(conversation_id)

    def fits(row: ConversationRow) -> bool:
        return options.must_cancel or _may_be_removed(row)

    action = BulkAction("deleted", remove, fits, is_end=True, reaches_archive=True)
    return asyncio.run(do_to_chosen(options, action, as_json=options.as_json, is_sure=options.is_sure))


async def _cancel(client: Client, conversation_id: str) -> None:
    """Stop a conversation and wait until it is idle.

    Raises:
        NotStopped: it is not within 30 s.
    """
    summary = await client.cancel(conversation_id, wait_seconds=CANCEL_WAIT_SECONDS)
    if not is_settled(AgentState(summary.state)):
        raise NotStopped(conversation_id, CANCEL_WAIT_SECONDS)


def _may_be_removed(row: ConversationRow) -> bool:
    return row.is_closed or (row.state in set(AgentState) and is_settled(AgentState(row.state)))
