"""`deckhands confirm` and `reject`, and the confirmation prompt of `deckhands run` at a terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import click

from broker.contract import MCPAction, PlanAction, RiskyAction, asks_for_server
from broker.runtime import UsageError
from deckhands.cli.authorship import author_options, by_option, with_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import conversation_argument
from deckhands.client import Renderer, ask, is_coloured, note, on_conversation, print_coloured

SECTION = "Control a conversation"
SUMMARIES = {
    "confirm": "Run the action that awaits confirmation.",
    "reject": "Reject the action that awaits confirmation.",
}

QUESTION = "Run it? [y/N] "
QUESTION_OF_A_SERVER = "Answer the server, or agree to what it asks? [y/N] "
QUESTION_OF_A_PLAN = "Carry the plan out? [y/N] "


@dataclass(frozen=True, slots=True)
class RejectOptions:
    """Options of `reject`; without `action_id`, the action that awaits confirmation is rejected."""

    conversation_id: str
    action_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class ConfirmOptions:
    """Options of `confirm`; an edit is FIELD=VALUE."""

    conversation_id: str
    action_id: int | None
    edits: tuple[str, ...]


action_option = click.option(
    "--action", "action_id", type=int, help="The event id of the action; fails if another one awaits confirmation."
)


@click.command()
@conversation_argument
@action_option
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field before it runs, such as command='ls -l'.",
)
@author_options
@with_options(ConfirmOptions)
def confirm(options: ConfirmOptions) -> None:
    """Run the action that awaits confirmation in a conversation."""
    name = options.conversation_id
    edited = _parse_edits(options.edits)
    on_conversation(
        name, lambda client: with_author(client, "confirm").confirm(name, action_id=options.action_id, edited=edited)
    )
    note("The confirmation is in the log.")


@click.command()
@conversation_argument
@action_option
@click.option("--reason", default="", help="The reason, for the agent, which then continues.")
@by_option
@with_options(RejectOptions)
def reject(options: RejectOptions) -> None:
    """Reject the action that awaits confirmation in a conversation. Without a reason, it then waits for a message."""
    name = options.conversation_id
    on_conversation(
        name,
        lambda client: with_author(client, "reject").reject(name, reason=options.reason, action_id=options.action_id),
    )
    note("The rejection is in the log.")


async def ask_at_terminal(action: RiskyAction) -> bool | dict[str, Any]:
    """Show an action and read a line; any answer but yes rejects the action.

    For a question of an MCP server, read the values of its fields line by line and return them.
    """
    if isinstance(action, PlanAction):  # it was printed above in full
        ask(QUESTION_OF_A_PLAN)
    else:
        print_coloured(Renderer(is_coloured=is_coloured(sys.stderr)).render_question(action), err=True)
        ask(QUESTION_OF_A_SERVER if asks_for_server(action) else QUESTION)
    if (await _read_line()).lower() not in ("y", "yes"):
        return False
    if not isinstance(action, MCPAction) or not asks_for_server(action):
        return True
    answers: dict[str, Any] = {}
    for question in action.questions:
        for name, field in ((question.fields or {}).get("properties") or {}).items():
            ask(f"{name}: ")
            if text := await _read_line():
                is_text = isinstance(field, dict) and field.get("type") == "string"
                answers[name] = text if is_text else _parse_value(text)
    return answers


async def _read_line() -> str:
    loop = asyncio.get_running_loop()
    has_line = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), has_line.set)  # a thread blocked in a read cannot be interrupted
    try:
        await has_line.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip()


def _parse_edits(edits: tuple[str, ...]) -> dict[str, Any]:
    """Return the edited fields and their values. A value is parsed as JSON if it is JSON, and is text otherwise."""
    edited: dict[str, Any] = {}
    for edit in edits:
        name, separator, text = edit.partition("=")
        if not separator or not name:
            raise UsageError(f"--edit {edit!r} is not FIELD=VALUE.", remedy="Write it as in --edit command='ls -l'.")
        # A command may look like a number.
        edited[name] = text if name in ("command", "path", "code", "plan") else _parse_value(text)
    return edited


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
