"""`deckhands message`, `pause`, `resume`, `recover` and `cancel`: speaking to a conversation that exists."""

from __future__ import annotations

from pathlib import Path

import click

from deckhands.cli.options import json_option, read_task
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import on_conversation

CANCEL_WAIT_SECONDS = 30.0
model_option = click.option("--model", help="The model that it goes on with, if not the same as before.")
WAYS = {"wait": 1, "go-on": 2, "stop": 3}
"""Ways out of a loop, and OpenHands' numbers for them."""


@click.command()
@click.argument("conversation_id")
@click.argument("text", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file that holds the message.")
@model_option
def message(*, conversation_id: str, text: str | None, file: Path | None, model: str | None) -> None:
    """Say something to the agent; it goes on, whatever state it is in. Without TEXT it is read from standard input."""
    content = read_task(text, file=file)
    on_conversation(conversation_id, lambda client: client.send_message(conversation_id, content, model=model))
    note("The message is in the log.")


@click.command()
@click.argument("conversation_id")
def pause(*, conversation_id: str) -> None:
    """Ask for a pause: what runs is finished, nothing new is begun."""
    on_conversation(conversation_id, lambda client: client.pause(conversation_id))
    note("The request is in the log.")


@click.command()
@click.argument("conversation_id")
@model_option
def resume(*, conversation_id: str, model: str | None) -> None:
    """Ask a conversation that was paused, was stopped or has failed to go on."""
    on_conversation(conversation_id, lambda client: client.resume(conversation_id, model=model))
    note("The request is in the log.")


@click.command()
@click.argument("conversation_id")
@click.argument("way", type=click.Choice(list(WAYS)))
@model_option
def recover(*, conversation_id: str, way: str, model: str | None) -> None:
    """Get an agent out of a loop: `wait` or `go-on` without what it repeated, or `stop`."""
    on_conversation(conversation_id, lambda client: client.recover(conversation_id, option=WAYS[way], model=model))
    note("The choice is in the log.")


@click.command()
@click.argument("conversation_id")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has stopped.")
@json_option
def cancel(*, conversation_id: str, no_wait: bool, as_json: bool) -> None:
    """Stop a conversation: what runs is ended. Waits until the agent has stopped."""
    seconds = None if no_wait else CANCEL_WAIT_SECONDS
    summary = on_conversation(conversation_id, lambda client: client.cancel(conversation_id, wait_seconds=seconds))
    if as_json:
        print_json(summary.as_json())
    else:
        note("The request is in the log." if no_wait else f"The conversation is {summary.state}.")


@click.command()
@click.argument("conversation_id")
def close(*, conversation_id: str) -> None:
    """Close a conversation that is over: nothing more is said in it, and its workspace goes after a week."""
    on_conversation(conversation_id, lambda client: client.close(conversation_id))
    note("The conversation is closed.")
