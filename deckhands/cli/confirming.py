"""`deckhands confirm` and `reject`, and the question that `deckhands run` asks at a terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from broker.contract.actions import RiskyAction
from broker.contract.planning import PlanAction
from broker.runtime.errors import UsageError
from deckhands.cli.output import note
from deckhands.cli.reach import on_conversation
from deckhands.reading.rendering import Renderer
from deckhands.reading.terminal import ask, print_coloured

QUESTION = "Run it? [y/N] "
QUESTION_OF_A_PLAN = "Carry the plan out? [y/N] "


@click.command()
@click.argument("conversation_id")
@click.option("--action", "action_id", type=int, help="The action's event id; refused if another is asked about.")
@click.option(
    "--edit", "edits", multiple=True, metavar="FIELD=VALUE", help="Run it with another value, such as command='ls -l'."
)
def confirm(*, conversation_id: str, action_id: int | None, edits: tuple[str, ...]) -> None:
    """Let the action run that a conversation asks about."""
    edited = _edited(edits)
    on_conversation(conversation_id, lambda client: client.confirm(conversation_id, action_id=action_id, edited=edited))
    note("The confirmation is in the log.")


@click.command()
@click.argument("conversation_id")
@click.option("--action", "action_id", type=int, help="The action's event id; refused if another is asked about.")
def reject(*, conversation_id: str, action_id: int | None) -> None:
    """Refuse the action that a conversation asks about; it waits for a message then."""
    on_conversation(conversation_id, lambda client: client.reject(conversation_id, action_id=action_id))
    note("The rejection is in the log.")


async def ask_at_terminal(action: RiskyAction) -> bool:
    """Show an action and wait for a line; everything but yes refuses it."""
    if isinstance(action, PlanAction):  # it stands above, whole
        ask(QUESTION_OF_A_PLAN)
    else:
        print_coloured(Renderer(is_coloured=sys.stderr.isatty()).question(action), err=True)
        ask(QUESTION)
    loop = asyncio.get_running_loop()
    has_line = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), has_line.set)  # a thread that reads could not be interrupted
    try:
        await has_line.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _edited(edits: tuple[str, ...]) -> dict[str, Any]:
    """Return fields and their values; a value that is JSON counts as what it says, any other as text."""
    edited: dict[str, Any] = {}
    for edit in edits:
        name, separator, text = edit.partition("=")
        if not separator or not name:
            raise UsageError(f"--edit {edit!r} is no FIELD=VALUE.", remedy="Write it as in --edit command='ls -l'.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        # What looks like a number may be a command all the same.
        edited[name] = text if name in ("command", "path", "code", "plan") else value
    return edited
