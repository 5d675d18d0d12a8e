"""`deckhands message`, `pause`, `resume`, `recover`, `cancel` and `close`: control an existing conversation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from deckhands.cli.abbreviations import conversation_argument
from deckhands.cli.connecting import on_conversation
from deckhands.cli.options import ConversationOptions, json_option, read_task
from deckhands.cli.output import note, print_json
from deckhands.cli.verbs import options_as

SECTION = "Control a conversation"
VERBS = {
    "message": "Send a message to the agent; the conversation continues.",
    "pause": "Pause a conversation: nothing new is started.",
    "resume": "Continue a conversation that was paused or stopped.",
    "recover": "Get an agent out of a loop.",
    "cancel": "Stop a conversation and what runs in it.",
    "close": "Close a conversation that is over; its workspace is removed after a week.",
}

CANCEL_WAIT_SECONDS = 30.0
model_option = click.option("--model", help="The model to continue with; by default the same as before.")
WAYS = {"wait": 1, "go-on": 2, "stop": 3}
"""The ways out of a loop, and OpenHands' numbers for them."""


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Options of `resume`; without a model, the conversation keeps its own."""

    conversation_id: str
    model: str | None


@dataclass(frozen=True, slots=True)
class MessageOptions(ResumeOptions):
    """Options of `message`; without `text` and `file`, standard input is the message."""

    text: str | None
    file: Path | None


@dataclass(frozen=True, slots=True)
class RecoverOptions(ResumeOptions):
    """Options of `recover`; `way` is a key of `WAYS`."""

    way: str


@dataclass(frozen=True, slots=True)
class CancelOptions:
    """Options of `cancel`."""

    conversation_id: str
    no_wait: bool
    as_json: bool


@click.command()
@conversation_argument
@click.argument("text", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file that holds the message.")
@model_option
@options_as(MessageOptions)
def message(options: MessageOptions) -> None:
    """Send a message to the agent; it continues, whatever its state. Without TEXT, standard input is the message."""
    name, content = options.conversation_id, read_task(options.text, file=options.file)
    on_conversation(name, lambda client: client.send_message(name, content, model=options.model))
    note("The message is in the log.")


@click.command()
@conversation_argument
@options_as(ConversationOptions)
def pause(options: ConversationOptions) -> None:
    """Ask for a pause: what runs is finished, nothing new is started."""
    on_conversation(options.conversation_id, lambda client: client.pause(options.conversation_id))
    note("The request is in the log.")


@click.command()
@conversation_argument
@model_option
@options_as(ResumeOptions)
def resume(options: ResumeOptions) -> None:
    """Continue a conversation that was paused, was stopped or has failed."""
    name = options.conversation_id
    on_conversation(name, lambda client: client.resume(name, model=options.model))
    note("The request is in the log.")


@click.command()
@conversation_argument
@click.argument("way", type=click.Choice(list(WAYS)))
@model_option
@options_as(RecoverOptions)
def recover(options: RecoverOptions) -> None:
    """Get an agent out of a loop: `wait` or `go-on` without what it repeated, or `stop`."""
    name, option = options.conversation_id, WAYS[options.way]
    on_conversation(name, lambda client: client.recover(name, option=option, model=options.model))
    note("The choice is in the log.")


@click.command()
@conversation_argument
@click.option("--no-wait", is_flag=True, help="Do not wait until it has stopped.")
@json_option
@options_as(CancelOptions)
def cancel(options: CancelOptions) -> None:
    """Stop a conversation and what runs in it. Waits until the agent has stopped."""
    name, seconds = options.conversation_id, None if options.no_wait else CANCEL_WAIT_SECONDS
    summary = on_conversation(name, lambda client: client.cancel(name, wait_seconds=seconds))
    if options.as_json:
        print_json(summary.as_json())
    else:
        note("The request is in the log." if options.no_wait else f"The conversation is {summary.state}.")


@click.command()
@conversation_argument
@options_as(ConversationOptions)
def close(options: ConversationOptions) -> None:
    """Close a conversation that is over: it takes no more messages, and its workspace is removed after a week."""
    on_conversation(options.conversation_id, lambda client: client.close(options.conversation_id))
    note("The conversation is closed.")
