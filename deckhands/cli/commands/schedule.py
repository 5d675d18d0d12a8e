"""`deckhands schedule`: tasks that are submitted at the times of a cron expression."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar, get_args

import click
from pydantic import ValidationError

from broker.runtime import UsageError
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.secret import secret_values
from deckhands.cli.options import ListOptions, json_option, read_task
from deckhands.cli.selection import parse_labels
from deckhands.cli.task_defaults import TaskDefaults, place_for_all
from deckhands.cli.task_options import TaskOptions, fields_of, task_options, workspace_option
from deckhands.cli.timing_options import TimingOptions, parse_duration, timing_options
from deckhands.client import (
    Client,
    TaskSpec,
    count_columns,
    format_time,
    note,
    on_cluster,
    print_json,
    print_text,
    render_table,
    resolve_local_directory,
)
from deckhands.operations import Overlap, Schedule, ScheduleRepository, StoredSchedule
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"schedule": "Submit a task repeatedly: add, list, pause, resume and remove schedules."}

HEAD = ("SCHEDULE", "CRON", "ZONE", "OVERLAP", "NEXT", "LAST", "BEGUN", "SKIPPED", "MISSED", "ERROR")
SPARE = ("ERROR", "MISSED", "SKIPPED", "OVERLAP", "LAST", "BEGUN")
T = TypeVar("T")

name_argument = click.argument("name", metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddScheduleOptions(TaskOptions, TimingOptions):
    """Options of `schedule add`."""

    name: str
    cron: str
    zone: str
    overlap: Overlap
    catch_up: str
    workspace: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The argument of a command that only takes a schedule."""

    name: str


@click.group()
def schedule() -> None:
    """Submit a task repeatedly. The cluster needs a jobs worker, which `deckhands up` starts."""


@schedule.command()
@name_argument
@task_options
@click.option("--cron", required=True, metavar="EXPR", help="Minute, hour, day, month, day of the week: '0 6 * * 1-5'.")
@click.option("--zone", default="UTC", show_default=True, help="The time zone of --cron, such as Europe/Berlin.")
@click.option(
    "--overlap",
    type=click.Choice(get_args(Overlap)),
    default="skip",
    show_default=True,
    help="If the conversation of an earlier tick still works: skip the tick, queue it, or cancel the conversation.",
)
@click.option(
    "--catch-up",
    default="1h",
    show_default=True,
    metavar="DURATION",
    help="How late the latest missed tick may still start. Ticks are missed while no jobs worker runs.",
)
@workspace_option(default=None)
@timing_options
@json_option
@author_options
@with_options(AddScheduleOptions)
def add(options: AddScheduleOptions) -> None:
    """Add a schedule: each tick submits the task, with the options of `submit`.

    Its conversations have the label schedule=NAME. --delay and --expires count from the tick.
    """
    settings = CliSettings.from_env()
    try:
        planned = Schedule(
            name=options.name,
            cron=options.cron,
            zone=options.zone,
            overlap=options.overlap,
            catch_up_seconds=parse_duration(options.catch_up, "--catch-up"),
        )
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        why = str(found["msg"]).removeprefix("Value error, ")
        raise UsageError(
            f"The {found['loc'][0]} of the schedule cannot be used: {ascii(why)[1:-1]}.",
            remedy="See `deckhands schedule add --help`.",
        ) from None
    request = _request_of(settings, options)

    async def keep(client: Client) -> list[datetime]:
        repository = ScheduleRepository(client.store, client.secrets)
        await repository.add(planned, request)
        return planned.next_ticks(await repository.now())

    ticks = on_cluster(recording(keep, "schedule.add", options.name))
    if options.as_json:
        print_json({"schedule": planned.name, "next": [tick.isoformat() for tick in ticks]})
        return
    note(f"The schedule {planned.name} starts conversations at:")
    print_text("\n".join(map(format_time, ticks)))


@schedule.command()
@json_option
@with_options(ListOptions)
def ls(options: ListOptions) -> None:
    """List the schedules, with their next ticks and the latest conversations."""
    entries = on_cluster(lambda client: ScheduleRepository(client.store, client.secrets).all())
    if options.as_json:
        for entry in entries:
            print_json(_as_json(entry))
    elif entries:
        print_text(
            "\n".join(
                render_table(HEAD, [_cells(entry) for entry in entries], columns=count_columns(sys.stdout), spare=SPARE)
            )
        )
    else:
        note("There are no schedules. `deckhands schedule add` creates one.")


@schedule.command()
@name_argument
@author_options
@with_options(ScheduleOptions)
def rm(options: ScheduleOptions) -> None:
    """Remove a schedule. Conversations that it has started continue."""
    _with_repository(lambda book: book.remove(options.name), "schedule.remove", options.name)
    note(f"The schedule {options.name} is removed.")


@schedule.command()
@name_argument
@author_options
@with_options(ScheduleOptions)
def pause(options: ScheduleOptions) -> None:
    """Pause a schedule. Ticks that fall due meanwhile are skipped."""
    _with_repository(lambda book: book.set_paused(options.name, is_paused=True), "schedule.pause", options.name)
    note(f"The schedule {options.name} is paused.")


@schedule.command()
@name_argument
@author_options
@with_options(ScheduleOptions)
def resume(options: ScheduleOptions) -> None:
    """Continue a paused schedule."""
    due = _with_repository(lambda book: book.set_paused(options.name, is_paused=False), "schedule.resume", options.name)
    note(f"The schedule {options.name} continues{f' at {format_time(due)}' if due else ''}.")


def _with_repository(act: Callable[[ScheduleRepository], Awaitable[T]], action: str, name: str) -> T:
    return on_cluster(recording(lambda client: act(ScheduleRepository(client.store, client.secrets)), action, name))


def _request_of(settings: CliSettings, options: AddScheduleOptions) -> TaskSpec:
    """Return the request that each tick submits.

    Raises:
        UsageError: an option is invalid.
    """
    task = read_task(options.argument, options.text, file=options.file)
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
    return defaults.complete(TaskSpec.parse({"task": task}))


def _cells(entry: StoredSchedule) -> tuple[str, ...]:
    planned, status = entry.schedule, entry.status
    due = format_time(entry.due) if entry.due else "never"
    if planned.is_paused:
        due = "paused"
    last = f"{format_time(status.last_tick)} {status.conversation_id}" if status.last_tick else ""
    numbers = (str(status.begun), str(status.skipped), str(status.missed))
    return (planned.name, planned.cron, planned.zone, planned.overlap, due, last, *numbers, status.error)


def _as_json(entry: StoredSchedule) -> dict[str, Any]:
    planned = entry.schedule.model_dump(mode="json", exclude={"request", "is_sealed"})
    next_tick = entry.due.isoformat() if entry.due else None
    return planned | {"next": next_tick} | entry.status.model_dump(mode="json")
