"""`deckhands chat`: a conversation with an agent at a terminal."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import click

from broker.runtime import UsageError
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.run import new_task
from deckhands.cli.conversation_ids import CONVERSATION_ID
from deckhands.cli.options import read_text
from deckhands.cli.screen_printer import ScreenPrinter
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.cli.task_options import TaskOptions, task_options, workspace_option
from deckhands.cli.tui.places import ChatPlace, private_place
from deckhands.client import (
    UNNAMED_TASK,
    Client,
    Task,
    conversation_client,
    is_redrawn,
    note,
    open_cluster,
    print_text,
    render_summary,
)
from deckhands.cluster import Home
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"chat": "Talk with an agent: messages, questions, pictures, slash commands."}

WHOLE_ID = re.compile(r"[0-9a-z]{26}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(TaskOptions):
    """Options of `chat`."""

    workspace: str
    resumed_id: str | None
    on_cluster: bool


@click.command(context_settings={"default_map": {"confirm": "risky", "headless": False}})
@task_options
@workspace_option(default=".")
@click.option("--resume", "resumed_id", metavar="ID", type=CONVERSATION_ID, help="Continue this conversation.")
@click.option(
    "--cluster",
    "on_cluster",
    is_flag=True,
    help="Use the cluster, where the agent keeps working when you leave; the default with DECKHANDS_URL.",
)
@with_options(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Talk with an agent at this terminal. The argument is the first message, or the id of a conversation to continue.

    Messages can be sent while the agent works. Ctrl-C stops its work; Ctrl-D leaves, and the conversation stays:
    `deckhands chat ID` continues it. /help lists the slash commands. By default, it runs with a private store and
    workers, like `deckhands run`.
    """
    if not (sys.stdin.isatty() and is_redrawn(sys.stdout)):
        raise UsageError("`deckhands chat` needs a terminal.", remedy="Use `deckhands run`, or `deckhands message`.")
    settings = CliSettings.from_env()
    first = read_text(options.argument, options.text, file=options.file)
    resumed = options.resumed_id or ""
    if not resumed and options.argument is not None and WHOLE_ID.fullmatch(options.argument):
        resumed = options.argument
        first = None
    asyncio.run(_chat(settings, options, resumed, first))


@asynccontextmanager
async def _place(settings: CliSettings, options: ChatOptions, resumed: str) -> AsyncIterator[ChatPlace]:
    is_on_cluster = options.on_cluster or settings.url is not None
    is_run = bool(resumed) and Home(settings.home).has_run(resumed)
    if resumed and not is_run:
        async with conversation_client(settings, resumed) as client:
            yield ChatPlace(client, Task(), resumed)
    elif is_on_cluster and not resumed:
        task = new_task(replace(settings, url=settings.url or ""), options, options.workspace, UNNAMED_TASK)
        async with Client(await open_cluster(settings=settings), settings.archive) as client:
            yield ChatPlace(client, task)
    else:
        task = Task() if resumed else new_task(settings, options, options.workspace, UNNAMED_TASK)
        async with private_place(settings, task, resumed, note) as place:
            yield place


async def _chat(settings: CliSettings, options: ChatOptions, resumed: str, first: str | None) -> None:
    from prompt_toolkit.patch_stdout import patch_stdout

    from deckhands.cli.tui.chat_session import Chat
    from deckhands.cli.tui.prompt import InputPrompt

    async with _place(settings, options, resumed) as place:
        prompt = InputPrompt(settings.home)
        with patch_stdout(raw=True):
            session = Chat(place, prompt, ScreenPrinter(area=prompt))
            prompt.question = session.question
            prompt.status = session.status
            on_stop_signals(prompt.leave)
            if first is not None:
                await (place.send(first) if place.conversation_id else place.start(first))
            summary = await session.run()
        if summary is not None:
            place.finish(summary)
    if summary is not None:
        kept = ("State", "Iterations", "Tokens", "Cost", "Duration")
        print_text("\n".join(line for line in render_summary(summary) if line.partition(":")[0] in kept))
        print_text(f"`deckhands chat {summary.conversation_id}` continues it.")
