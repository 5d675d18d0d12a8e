"""`deckhands submit`: queue a task, or a file of tasks, on a running cluster."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource

from broker.runtime import UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.secret import secret_values
from deckhands.cli.options import json_option, read_task
from deckhands.cli.progress import ProgressCounter
from deckhands.cli.selection import parse_labels
from deckhands.cli.task_defaults import TaskDefaults, place_for_all
from deckhands.cli.task_options import (
    TaskOptions,
    agent_of,
    fields_of,
    place_of,
    spec_of,
    task_options,
    workspace_of,
    workspace_option,
)
from deckhands.cli.timing_options import TimingOptions, timing_options
from deckhands.client import (
    AdmissionWaiter,
    BatchOutcome,
    Client,
    Form,
    TaskFile,
    TaskLine,
    cluster_client,
    note,
    open_task_file,
    parse_timing,
    print_json,
    print_text,
    resolve_local_directory,
    resolve_script_path,
    submit_and_wait,
    warn_of_ignored_settings,
    warn_of_missing_workers,
)
from deckhands.client import submit as submit_all
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"submit": "Queue a task, or a file of tasks, on a running cluster."}
OF_ONE_TASK = {"argument", "text", "file", "idempotency_key"}
SHOWN_LOST = 10
OF_A_FILE = {"form", "batch", "must_wait", "results"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions(TaskOptions, TimingOptions):
    """Options of `submit`."""

    workspace: str | None
    idempotency_key: str | None
    source: str | None
    form: Form | None
    batch: str | None
    must_wait: bool
    results: Path | None
    as_json: bool


@click.command()
@task_options
@workspace_option(default=None)
@timing_options
@click.option("--idempotency-key", help="The same key always gives the same conversation.")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="A file with one task per line, as JSON or CSV; - is standard input. The other options hold for all tasks "
    "that do not say otherwise.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    help="The format of the --from file; by default its name decides.",
)
@click.option(
    "--batch",
    metavar="NAME",
    help="With --from: the batch, whose tasks are submitted once; by default the path of the file.",
)
@click.option("--wait", "must_wait", is_flag=True, help="With --from: wait until all have settled.")
@click.option(
    "--results",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --from: wait, and append a line to this file for each that settles.",
)
@json_option
@with_options(SubmitOptions)
def submit(options: SubmitOptions) -> int:
    """Queue a task on a running cluster and print the conversation's id.

    With --from, queue a file of tasks. Each line has an id and the fields of a task: docs/producing-work.md. All lines
    are checked before the first is submitted; the same command again submits only the missing ones. With --wait or
    --results, it exits with 0 if all have finished; if the others share a code of `run`, with that; else with 1.
    """
    _refuse_unfit_options(options.source)
    parse_timing({name: value for name, value in options.fields().items() if name != "double_texting"})
    settings = CliSettings.from_env()
    if options.source is not None:
        return asyncio.run(_submit_file(settings, options.source, options))
    task = read_task(options.argument, options.text, file=options.file)
    conversation_id = asyncio.run(_submit(settings, task, options))
    if options.as_json:
        print_json({"conversation_id": conversation_id})
    else:
        print_text(conversation_id)
    return 0


def _refuse_unfit_options(source: str | None) -> None:
    """Refuse options of a single task beside --from, and those of a file without it."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name in (OF_A_FILE if source is None else OF_ONE_TASK):
            option = "A task" if name == "argument" else parameter.opts[-1]
            what = f"{option} needs --from" if source is None else f"{option} cannot be combined with --from"
            raise UsageError(f"{what}.", remedy="See `deckhands submit --help`.")


async def _submit(settings: CliSettings, task: str, options: SubmitOptions) -> str:
    place = place_of(options.workspace, options)
    agent = agent_of(options, options.model)
    if settings.url is None:  # a cluster named by DECKHANDS_URL may be on other hosts
        agent = resolve_script_path(agent)
        if place.path is not None:
            place = replace(place, path=resolve_local_directory(place.path, settings.environment))
    values = secret_values(settings, options.secrets)
    async with cluster_client(settings) as client:
        spec = spec_of(
            options,
            task,
            agent=agent,
            workspace=workspace_of(options, place, "auto"),
            secrets=values,
            **options.fields(),
        )
        conversation_id = await client.submit(spec, upload=place.content, idempotency_key=options.idempotency_key)
        await warn_of_missing_workers(client, note)
        await warn_of_ignored_settings(client, note)
        return conversation_id


async def _submit_file(settings: CliSettings, source: str, options: SubmitOptions) -> int:
    place = place_for_all(options, options.workspace)
    if settings.url is None and place.path is not None:
        place = replace(place, path=resolve_local_directory(place.path, settings.environment))
    defaults = TaskDefaults(
        options=options,
        place=place,
        labels=parse_labels(options.labels),
        secrets=secret_values(settings, options.secrets),
        own={**fields_of(options), **options.fields()},
        is_here=settings.url is None,
    )
    with open_task_file(
        source, lambda: sys.stdin.buffer, form=options.form, batch=options.batch, complete=defaults.complete
    ) as tasks:
        count = tasks.check()
        async with cluster_client(settings) as client:
            await warn_of_missing_workers(client, note)
            outcome = await _submit_tasks(client, tasks, count, options)
    note(f"{format_count(outcome.submitted, 'task')} submitted, {outcome.existing:,} had been submitted before.")
    if not options.must_wait and options.results is None:
        return 0
    for line_id, why in outcome.lost[:SHOWN_LOST]:
        note(f"The task {line_id} has no result: {why}.")
    note(f"Settled: {', '.join(f'{number:,} {state}' for state, number in outcome.states.most_common()) or 'none'}.")
    return int(outcome.exit_code)


async def _submit_tasks(client: Client, tasks: TaskFile, count: int, options: SubmitOptions) -> BatchOutcome:
    must_wait = options.must_wait or options.results is not None
    with ProgressCounter("tasks settled" if must_wait else "tasks submitted", count) as progress:

        def on_line(line: TaskLine, was_there: bool) -> None:
            if options.as_json:
                print_json({"id": line.line_id, "conversation_id": line.conversation_id, "is_new": not was_there})
            if not must_wait:
                progress.add()

        admission = AdmissionWaiter(note)
        if must_wait:
            return await submit_and_wait(
                client, tasks, on_line, progress.add, results=options.results, wait=admission.wait
            )
        return await submit_all(client, tasks, on_line, wait=admission.wait)
