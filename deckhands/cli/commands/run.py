"""`deckhands run`: one task, from the command line to its end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from broker.contract import RiskyAction, asks_model
from broker.runtime import UsageError, check_conversation_id
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.confirming import ask_at_terminal
from deckhands.cli.commands.control import WAYS
from deckhands.cli.commands.secret import secret_values
from deckhands.cli.conversation_ids import CONVERSATION_ID
from deckhands.cli.options import Amount, json_option, plain_option, read_task, read_text
from deckhands.cli.screen_printer import printer_for
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.cli.task_options import (
    TaskOptions,
    agent_of,
    place_of,
    spec_of,
    task_options,
    workspace_of,
    workspace_option,
)
from deckhands.client import (
    Ending,
    EventPrinter,
    ExitCode,
    RunCallbacks,
    Task,
    check_task,
    ignore_closed_output,
    note,
    require_local_agent,
    resolve_local_directory,
    resolve_script_path,
    run_on_cluster,
    run_privately,
)
from deckhands.cluster import Home
from deckhands.settings import CliSettings

T = TypeVar("T")

SECTION = "Start a conversation"
SUMMARIES = {"run": "Run one task on a directory, with a private store and workers."}

CONTINUABLE = {ExitCode.INTERRUPTED, ExitCode.OUT_OF_TIME}
"""Exit codes of runs that were stopped before the agent had finished."""

OF_A_RESUMED_RUN = {
    "resumed_id",
    "argument",
    "text",
    "file",
    "timeout",
    "stream",
    "as_json",
    "is_plain",
    "recover",
    "model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(TaskOptions):
    """Options of `run`; with `resumed_id`, only those of `OF_A_RESUMED_RUN` may be given."""

    workspace: str
    timeout: float | None
    resumed_id: str | None
    recover: str | None
    stream: bool
    is_plain: bool
    as_json: bool


@click.command()
@task_options
@workspace_option(default=".")
@click.option("--timeout", type=Amount(min=0, min_open=True), help="Stop after this many seconds.")
@click.option(
    "--resume",
    "resumed_id",
    metavar="ID",
    type=CONVERSATION_ID,
    help="Continue a run that was killed, stopped or has settled.",
)
@click.option(
    "--recover",
    type=click.Choice(list(WAYS)),
    help="With --resume, after a loop: drop the repetition and wait or continue (go-on), or stop.",
)
@click.option("--stream", is_flag=True, help="Print the model's output as it arrives, on standard error.")
@plain_option
@json_option
@with_options(RunOptions)
def run(options: RunOptions) -> int:
    """Run one task on a directory, with a private store and workers, and show its progress.

    LLM_MODEL, LLM_API_KEY and LLM_BASE_URL name the model. Exit codes: 0 finished, 1 error, 2 usage, 3 rejected by the
    agent, 4 out of time, 5 needs an answer, 6 a limit was reached, 130 interrupted.
    """
    settings = CliSettings.from_env()
    printer = printer_for(as_json=options.as_json, is_plain=options.is_plain)
    task = _task(settings, options)
    ending = asyncio.run(_run(settings, task, printer, is_streamed=options.stream))
    with ignore_closed_output():
        printer.summary(ending.summary)
        if ending.exit_code in CONTINUABLE:
            note(f"Continue with `deckhands run --resume {ending.summary.conversation_id}`.")
    return int(ending.exit_code)


def _task(settings: CliSettings, options: RunOptions) -> Task:
    if options.resumed_id is not None:
        check_conversation_id(options.resumed_id)
        _refuse_options_of_new_runs()
        text = read_text(options.argument, options.text, file=options.file)
        if text is not None:
            check_task(text)
        if text is not None and options.recover:
            raise UsageError(
                "A message and --recover cannot be combined.", remedy="Use one of them: a message ends a loop, too."
            )
        return Task(
            text=text,
            resumed_id=options.resumed_id,
            recovery=WAYS[options.recover] if options.recover else None,
            model=options.model,
            time_limit_seconds=options.timeout,
        )
    if options.recover:
        raise UsageError("--recover needs a run to resume.", remedy="Name it with --resume ID.")
    text = read_task(options.argument, options.text, file=options.file)
    task = new_task(settings, options, options.workspace, text)
    return replace(task, time_limit_seconds=options.timeout)


def new_task(settings: CliSettings, options: TaskOptions, workspace: str, text: str) -> Task:
    """Return the task that the options of a command describe.

    Args:
        workspace: the directory, address or file to work on.

    Raises:
        UsageError: an option is invalid, or no model is configured.
    """
    place = place_of(workspace, options)
    if place.path is not None:
        place = replace(place, path=resolve_local_directory(place.path, settings.environment))
    model = options.model or settings.model
    if model is None and not settings.has_profiles and asks_model(options.agent):
        raise UsageError(
            "No model is configured.",
            remedy="Set LLM_MODEL and LLM_API_KEY (and LLM_BASE_URL for a server of your own), or pass --model. "
            "`deckhands demo` needs no model.",
        )
    agent = agent_of(options, model)
    where = workspace_of(options, place, settings.sandbox)
    secrets = secret_values(settings, options.secrets)
    if settings.url is None:
        require_local_agent(agent)
        agent = resolve_script_path(agent)
    return Task(spec_of(options, text, agent=agent, workspace=where, secrets=secrets), upload=place.content)


def _refuse_options_of_new_runs() -> None:
    """Refuse options that apply only to a new run, when a run is resumed."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in OF_A_RESUMED_RUN:
            raise UsageError(
                f"{parameter.opts[-1]} cannot be combined with --resume.",
                remedy="A run keeps the options it was started with. Start a new run to change them.",
            )


async def _run(settings: CliSettings, task: Task, printer: EventPrinter, *, is_streamed: bool) -> Ending:
    home = Home(settings.home)
    watcher = RunCallbacks(on_notice=printer.note)
    watcher.on_event = partial(_show, watcher, printer.event)
    if is_streamed:
        watcher.on_piece = partial(_show, watcher, printer.piece)
    if sys.stdin.isatty():
        watcher.ask = partial(_ask, printer)
    watcher.on_start = lambda conversation_id: printer.note(f"Conversation {conversation_id}")
    on_stop_signals(partial(_interrupt, watcher, printer))
    async with printer.live():
        if settings.url is not None:
            return await run_on_cluster(settings.url, task, watcher)
        return await run_privately(home, task, settings.environment, watcher)


async def _ask(printer: EventPrinter, action: RiskyAction) -> bool | dict[str, Any]:
    async with printer.leave_to_user():
        return await ask_at_terminal(action)


def _show(watcher: RunCallbacks, show: Callable[[T], None], what: T) -> None:
    """Print an event or a piece; stop the run gracefully if the reader or the terminal has closed the output."""
    with ignore_closed_output(watcher.interrupted.set):
        show(what)


def _interrupt(watcher: RunCallbacks, printer: EventPrinter) -> None:
    """Stop gracefully the first time, immediately the second time."""
    if watcher.interrupted.is_set():
        watcher.at_once()
        printer.close()
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)
    watcher.interrupted.set()
