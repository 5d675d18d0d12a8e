"""`deckhands prompt`: the prompt that a model gets at any event of a conversation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import click

from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import POINT, conversation_or_task
from deckhands.cli.options import json_option
from deckhands.client import ForkPoint, clean_line, make_prompt, note, print_json, print_text, read_events
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {"prompt": "Show the prompt that the model gets after an event."}
LINE_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class PromptShowOptions:
    """Options of `prompt`; `point` is ID or ID@EVENT."""

    point: str
    task: str | None
    as_json: bool


@click.command()
@conversation_or_task("point", "[ID[@EVENT]]", POINT)
@json_option
@with_options(PromptShowOptions)
def prompt(options: PromptShowOptions) -> None:
    """Show the prompt of a model call after an event, made again from the log; without @EVENT, after the last one.

    It has the messages that a controller worker sends, in order. To see what a reply answers, name the event before it.
    """
    asked = ForkPoint.parse(options.point)
    events = asyncio.run(read_events(CliSettings.from_env(), asked.conversation_id))
    found = asyncio.run(make_prompt(asked.events_until(events)))
    if options.as_json:
        print_json(found)
        return
    for message in found["messages"]:
        print_text("\n".join(_render(message)))
    model = found["model"] or "the workers' model"
    note(f"{len(found['messages'])} messages for {model}; tools: {', '.join(found['tools']) or 'none'}.")


def _render(message: dict[str, Any]) -> list[str]:
    name = f" {message['name']}" if message["name"] else ""
    lines = [f"--- {message['role']}{name}"]
    lines += [clean_line(line, limit=LINE_CHARS) for text in message["content"] for line in text.split("\n")]
    return lines + [clean_line(f"-> {call['name']} {call['arguments']}") for call in message["tool_calls"]]
