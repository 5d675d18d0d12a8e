"""`deckhands run`: one task, from the command line to its end."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from broker.contract.events import Event
from broker.contract.specs import AGENTS_WITHOUT_MODEL
from broker.runtime.errors import UsageError
from broker.runtime.ids import check_conversation_id
from deckhands.cli.confirming import ask_at_terminal
from deckhands.cli.control import WAYS
from deckhands.cli.options import (
    agent_of,
    given_text,
    json_option,
    limits_of,
    place_of,
    read_task,
    task_options,
    workspace_of,
)
from deckhands.cli.output import EventPrinter, note, outliving_reader
from deckhands.cli.secret import secret_values
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.client.named_directory import own_directory
from deckhands.client.tasks import check_task
from deckhands.cluster.home import Home
from deckhands.reading.summary import ExitCode
from deckhands.runs.headless import Ending, Task, Watcher, run_on_cluster, run_privately
from deckhands.settings import FaceSettings

OF_A_RESUMED_RUN = {"resumed_id", "argument", "text", "file", "timeout", "stream", "as_json", "recover", "model"}


@click.command()
@task_options
@click.option(
    "-w",
    "--workspace",
    metavar="DIR|URL|FILE",
    default=".",
    help="The directory to work on (the current one if not given), git+https://…#REF, or an archive or bundle.",
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Stop after so many seconds.")
@click.option("--resume", "resumed_id", metavar="ID", help="Go on with a run that was killed, stopped or has settled.")
@click.option(
    "--recover",
    type=click.Choice(list(WAYS)),
    help="With --resume, after a loop: wait or go on without what was repeated, or stop.",
)
@click.option("--stream", is_flag=True, help="Show the model's words as they come, on standard error.")
@json_option
def run(**options: Any) -> int:
    """Run one task on a directory, with a private store and workers, and show what happens.

    The model is that of LLM_MODEL, LLM_API_KEY and LLM_BASE_URL. Exit codes: 0 finished, 1 error, 2 usage,
    3 rejected by the agent, 4 out of time, 5 needs a person, 6 a limit is used up, 130 interrupted.
    """
    settings = FaceSettings.from_env()
    printer = EventPrinter(as_json=options["as_json"])
    task = _task(settings, options)
    ending = asyncio.run(_run(settings, task, printer, is_streamed=options["stream"]))
    with outliving_reader():
        printer.summary(ending.summary)
    return int(ending.exit_code)


def _task(settings: FaceSettings, options: dict[str, Any]) -> Task:
    if options["resumed_id"] is not None:
        check_conversation_id(options["resumed_id"])
        _refuse_what_is_settled()
        text = given_text(options["argument"], options["text"], file=options["file"])
        if text is not None:
            check_task(text)
        if text is not None and options["recover"]:
            raise UsageError("A message and --recover are both given.", remedy="Give one: a message ends a loop too.")
        return Task(
            text,
            resumed_id=options["resumed_id"],
            recovery=WAYS.get(options["recover"]),
            model=options["model"],
            time_limit_seconds=options["timeout"],
        )
    if options["recover"]:
        raise UsageError("--recover is for a run that is resumed.", remedy="Name it by --resume ID.")
    text = read_task(options["argument"], options["text"], file=options["file"])
    place = place_of(options["workspace"], options)
    if place.path is not None:
        place = replace(place, path=own_directory(place.path, settings.environment))
    model = options["model"] or settings.model
    if model is None and not settings.has_profiles and options["agent"] not in AGENTS_WITHOUT_MODEL:
        raise UsageError(
            "No model is configured.",
            remedy="Set LLM_MODEL and LLM_API_KEY (and LLM_BASE_URL for a server of your own), or pass --model. "
            "`deckhands demo` needs no model.",
        )
    return Task(
        text,
        agent=agent_of(options, model),
        workspace=workspace_of(options, place, settings.sandbox),
        upload=place.content,
        limits=limits_of(options),
        tools=options["tools"],
        secrets=secret_values(settings, options["secrets"]),
        title=options["title"],
        time_limit_seconds=options["timeout"],
    )


def _refuse_what_is_settled() -> None:
    """Make sure that nothing is given which a run that is resumed has had since its beginning."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in OF_A_RESUMED_RUN:
            raise UsageError(
                f"{parameter.opts[-1]} cannot be given together with --resume.",
                remedy="A run keeps what it was begun with; submit the task anew to change it.",
            )


async def _run(settings: FaceSettings, task: Task, printer: EventPrinter, *, is_streamed: bool) -> Ending:
    home = Home(settings.home)
    watcher = Watcher(on_notice=note, on_piece=printer.piece if is_streamed else None)
    watcher.on_event = partial(_show, watcher, printer)
    if sys.stdin.isatty():
        watcher.ask = ask_at_terminal
    watcher.on_start = lambda conversation_id: note(f"Conversation {conversation_id}")
    on_stop_signals(partial(_interrupt, watcher))
    if settings.url is not None:
        return await run_on_cluster(settings.url, task, watcher)
    return await run_privately(home, task, settings.environment, watcher)


def _show(watcher: Watcher, printer: EventPrinter, event: Event) -> None:
    """Print an event; stop in order when nobody reads any more."""
    with outliving_reader(watcher.interrupted.set):
        printer.event(event)


def _interrupt(watcher: Watcher) -> None:
    """Stop in order the first time, at once the second time."""
    if watcher.interrupted.is_set():
        watcher.at_once()
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)
    watcher.interrupted.set()
