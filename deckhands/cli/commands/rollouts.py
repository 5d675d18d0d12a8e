"""`deckhands rollouts`: groups of trajectories with exact tokens, for training."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from broker.runtime import UsageError
from deckhands.cli.authorship import author_options, recording, refuse_author
from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.client import Client, note, on_cluster, print_json, print_text, render_table
from deckhands.rollouts import (
    Format,
    RemoteRolloutRun,
    RolloutRun,
    RolloutSpec,
    StubEngine,
    describe_runs,
    drive_all,
    export_rollouts,
    find_directory,
    read_rows,
    serve_stub,
)
from deckhands.settings import CliSettings

SECTION = "Evaluate agents"
SUMMARIES = {"rollouts": "Collect rollouts for training: run, attach, ls, show, pause, resume, abort, weights, export."}
SHOWN_EVENTS = 20
SHOWN_RUNS = 1_000

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RolloutsOptions:
    """Options of all commands."""

    server: str | None


@click.group()
@click.option(
    "--server",
    metavar="URL",
    help="Act at this server with the key DECKHANDS_API_KEY instead of at the store: run, ls, show, pause, resume, "
    "abort and weights.",
)
@with_options(RolloutsOptions)
def rollouts(options: RolloutsOptions) -> None:
    """Collect groups of trajectories with exact tokens and rewards, for training.

    docs/rollouts.md describes them.
    """
    click.get_current_context().obj = options.server


def find_server() -> tuple[str, str] | None:
    """Return the address of the server to act at, and the key; None to act at the store."""
    url = click.get_current_context().obj
    return None if url is None else (url, CliSettings.from_env().api_key)


def require_store(command: str) -> None:
    """Refuse a command that a server does not offer.

    Raises:
        UsageError: `--server` is given.
    """
    if find_server() is not None:
        raise UsageError(
            f"`{command}` does not work at a server.", remedy="Leave --server out, or see docs/rollouts.md."
        )


def on_run(name: str, act: Callable[[RolloutRun | RemoteRolloutRun], Awaitable[Result]], action: str = "") -> Result:
    """Call a function with a run, at the server or at the store.

    Args:
        action: the operation to record; empty if it only reads.
    """
    if (server := find_server()) is None:

        async def find(client: Client) -> Result:
            return await act(await RolloutRun.open(client, name))

        return on_cluster(recording(find, action, name) if action else find)
    refuse_author("the server records the key that acts")
    url, key = server

    async def reach() -> Result:
        async with RemoteRolloutRun(url, key, name) as found:
            return await act(found)

    return asyncio.run(reach())


@dataclass(frozen=True, slots=True)
class RolloutsEngineOptions:
    """Options of `engine`."""

    port: int
    turns: int
    tool: str
    seconds_per_token: float
    keeps_truth: bool


@rollouts.command()
@click.option("--port", type=click.IntRange(0, 65_535), default=8000, show_default=True)
@click.option("--turns", type=click.IntRange(min=0), default=3, show_default=True, help="Steps of a trajectory.")
@click.option(
    "--tool",
    type=click.Choice(["execute_bash", "think"]),
    default="execute_bash",
    show_default=True,
    help="The tool that a step calls; `think` needs no tool worker.",
)
@click.option("--seconds-per-token", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--truth", "keeps_truth", is_flag=True, help="Keep the tokens of all replies for GET /truth.")
@with_options(RolloutsEngineOptions)
def engine(options: RolloutsEngineOptions) -> None:
    """Serve a stub engine on this machine, to try rollouts without a model."""
    found = StubEngine(options.turns, options.seconds_per_token, tool=options.tool, keeps_truth=options.keeps_truth)

    async def serve() -> None:
        async with serve_stub(found, port=options.port) as address:
            print_text(f"The stub engine listens on {address}.")
            await asyncio.Event().wait()

    asyncio.run(serve())


name_argument = click.argument("name")
directory_option = click.option(
    "--directory", type=click.Path(file_okay=False, path_type=Path), help="Where this machine keeps the results."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsRunOptions:
    """Options of `run`."""

    prompts: str
    spec: Path | None
    name: str | None
    directory: Path | None
    is_detached: bool
    model: str | None
    group_size: int | None
    extra: int | None
    epochs: int | None
    agent: str | None
    max_iterations: int | None
    max_staleness: int | None
    trajectory_seconds: float | None
    group_seconds: float | None
    partial: str | None
    window: int | None
    waiting: int | None
    at_once: int | None
    scorers: tuple[str, ...]
    critic: str | None
    engines: tuple[str, ...]
    on_pause: str | None


SPEC_OPTIONS = (
    *("model", "group_size", "extra", "epochs", "agent", "max_iterations", "max_staleness", "trajectory_seconds"),
    *("group_seconds", "partial", "window", "waiting", "at_once", "scorers", "critic", "engines", "on_pause"),
)


@rollouts.command()
@click.argument("prompts")
@click.option(
    "--spec",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="Further fields of the specification; options override them.",
)
@click.option("--name", help="The name of the run; by default a new one. The same name continues the run.")
@directory_option
@click.option("--detach", "is_detached", is_flag=True, help="Drive the run in the background.")
@click.option("--model", help="The policy, as the cluster's models are named.")
@click.option("--group-size", type=click.INT, help="Trajectories of a group; by default 8.")
@click.option("--extra", type=click.INT, help="Further trajectories of a group; the slowest are cancelled.")
@click.option("--epochs", type=click.INT, help="How often each prompt is used.")
@click.option("--agent", help="The agent; by default CodeActAgent.")
@click.option("-i", "--max-iterations", type=click.INT, help="The most steps of a trajectory; by default 100.")
@click.option("--max-staleness", type=click.INT, help="How many versions a group may be behind the policy.")
@click.option("--trajectory-seconds", type=click.FLOAT, help="A trajectory ends after this time.")
@click.option("--group-seconds", type=click.FLOAT, help="A group is delivered after this time, as it is.")
@click.option("--partial", type=click.Choice(["keep", "drop"]), help="Whether a trajectory at a limit counts.")
@click.option("--window", type=click.INT, help="How far groups may be ahead of the oldest; by default 16.")
@click.option("--waiting", type=click.INT, help="How many groups may be started and not acknowledged; by default 32.")
@click.option("-n", "--at-once", type=click.INT, help="The most trajectories in flight; by default 64.")
@click.option("--scorer", "scorers", multiple=True, metavar="FILE.py@FUNCTION", help="A function that gives a reward.")
@click.option("--critic", help="A model that gives a reward.")
@click.option("--engine", "engines", multiple=True, metavar="URL", help="An engine that a pause reaches.")
@click.option("--on-pause", type=click.Choice(["drain", "keep", "abort"]), help="What a pause does with replies.")
@with_options(RolloutsRunOptions)
def run(options: RolloutsRunOptions) -> None:
    """Start a rollout run of PROMPTS, a dataset as for `eval run`, and drive it until it is over.

    Its groups wait in the store until a trainer reads them.
    """
    spec = build_spec(options)
    if (server := find_server()) is not None:
        if options.name is not None or options.directory is not None or options.is_detached:
            raise UsageError(
                "--name, --directory and --detach are for runs at the store.",
                remedy="Leave them out: the server chooses the name, and drivers of its operator drive the run.",
            )
        print_text(asyncio.run(_start_at(*server, spec)))
        return

    async def act(client: Client) -> str:
        found = await RolloutRun.start(client, spec, name=options.name, directory=options.directory)
        print_text(found.name)
        if options.is_detached:
            pid = await asyncio.to_thread(found.detach)
            note(f"The process {pid} drives it. `deckhands rollouts show {found.name}` shows its state.")
        else:
            await found.drive()
        return found.name

    on_cluster(act)


async def _start_at(url: str, key: str, spec: RolloutSpec) -> str:
    async with await RemoteRolloutRun.start(url, key, read_rows(spec)) as found:
        return found.name


def build_spec(options: RolloutsRunOptions) -> RolloutSpec:
    """Return the specification of the options and the file.

    Raises:
        UsageError: the options or the file are invalid.
    """
    fields: dict[str, Any] = {}
    if options.spec is not None:
        try:
            fields = tomllib.loads(options.spec.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{options.spec} cannot be read: {error}.", remedy="Write a TOML file.") from error
    given = {name: getattr(options, name) for name in SPEC_OPTIONS}
    fields |= {name: value for name, value in given.items() if value is not None and value != ()}
    return RolloutSpec.parse({**fields, "prompts": options.prompts})


@dataclass(frozen=True, slots=True)
class RolloutsAttachOptions:
    """Options of `attach`."""

    name: str | None
    directory: Path | None


@rollouts.command()
@click.argument("name", required=False)
@directory_option
@with_options(RolloutsAttachOptions)
def attach(options: RolloutsAttachOptions) -> None:
    """Drive a run, or stand by while another process does, until it is over.

    Without NAME, drive each run of the cluster, also those that start later, such as runs over HTTP.
    """
    require_store("attach")

    async def act(client: Client) -> None:
        if options.name is None:
            await drive_all(client, find_place, note_undriven)
            return
        found = await RolloutRun.open(client, options.name, directory=options.directory)
        await found.drive()

    def find_place(name: str) -> Path:
        return find_directory(name) if options.directory is None else options.directory / name

    def note_undriven(name: str, error: Exception) -> None:
        note(f"The run {name} cannot be driven here: {error or type(error).__name__}")

    on_cluster(act)


@dataclass(frozen=True, slots=True)
class RolloutsListOptions:
    """Options of `ls`."""

    as_json: bool


@rollouts.command()
@json_option
@with_options(RolloutsListOptions)
def ls(options: RolloutsListOptions) -> None:
    """List the runs, the latest change first."""
    server = find_server()
    rows = on_cluster(_list_all) if server is None else asyncio.run(RemoteRolloutRun.list_all(*server))
    if options.as_json:
        print_json(rows)
        return
    head = ("name", "state", "version", "groups", "waiting", "driver")
    cells = [[str(one[name]) for name in head[:-1]] + ["yes" if one["is_driven"] else "no"] for one in rows]
    for line in render_table(head, cells):
        print_text(line)


async def _list_all(client: Client) -> list[dict[str, Any]]:
    rows, cursor = await describe_runs(client.store, limit=SHOWN_RUNS)
    if cursor:
        note(f"There are more runs: these are the {len(rows):,} that changed last.")
    return rows


@dataclass(frozen=True, slots=True)
class RolloutsShowOptions:
    """Options of `show`."""

    name: str
    as_json: bool


@rollouts.command()
@name_argument
@json_option
@with_options(RolloutsShowOptions)
def show(options: RolloutsShowOptions) -> None:
    """Show a run: its specification, its state, its events and its groups."""

    async def act(found: RolloutRun | RemoteRolloutRun) -> dict[str, Any]:
        about = await found.describe()
        if isinstance(found, RemoteRolloutRun):
            return {**about, "delivered": []}
        spec = (await found.load_spec()).model_dump(mode="json", exclude_defaults=True)
        return {**about, "spec": spec, "events": await found.list_events(), "delivered": await found.list_groups()}

    about = on_run(options.name, act)
    if options.as_json:
        print_json(about)
        return
    driven = "has a driver" if about["is_driven"] else "has no driver"
    print_text(f"{about['name']}: {about['state']}, version {about['version']}, {driven}")
    print_text(f"{about['groups']} groups delivered, {about['waiting']} of them not acknowledged")
    for group in about["delivered"][-SHOWN_EVENTS:]:
        rewards = " ".join(f"{one['reward']:g}" for one in group["trajectories"])
        print_text(f"  {group['id']}: version {group['version']}, rewards {rewards}")
    for event in about["events"][-SHOWN_EVENTS:]:
        more = {name: value for name, value in event.items() if name not in ("kind", "at")}
        print_text(f"  {event['kind']}" + (f" {json.dumps(more)}" if more else ""))


@dataclass(frozen=True, slots=True)
class RolloutsNameOptions:
    """Options of commands with the name of a run alone."""

    name: str


@rollouts.command()
@name_argument
@author_options
@with_options(RolloutsNameOptions)
def pause(options: RolloutsNameOptions) -> None:
    """Pause a run: no trajectory takes a further step, and engines are paused as configured."""
    on_run(options.name, lambda found: found.pause(), "rollouts.pause")
    note(f"The run is paused. `deckhands rollouts resume {options.name}` continues it.")


@rollouts.command()
@name_argument
@author_options
@with_options(RolloutsNameOptions)
def resume(options: RolloutsNameOptions) -> None:
    """Continue a paused run."""
    on_run(options.name, lambda found: found.resume(), "rollouts.resume")


@rollouts.command()
@name_argument
@author_options
@with_options(RolloutsNameOptions)
def abort(options: RolloutsNameOptions) -> None:
    """End a run: no further group is delivered, and its conversations are cancelled."""
    on_run(options.name, lambda found: found.abort(), "rollouts.abort")


@dataclass(frozen=True, slots=True)
class RolloutsWeightsOptions:
    """Options of `weights`."""

    name: str
    version: int


@rollouts.command()
@name_argument
@click.argument("version", type=click.IntRange(min=0))
@author_options
@with_options(RolloutsWeightsOptions)
def weights(options: RolloutsWeightsOptions) -> None:
    """Record that the engines have the weights of VERSION from now on."""
    on_run(options.name, lambda found: found.weights_changed(options.version), "rollouts.weights")


@dataclass(frozen=True, slots=True)
class RolloutsExportOptions:
    """Options of `export`."""

    name: str
    form: Format
    path: Path


@rollouts.command()
@name_argument
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--out", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE")
@with_options(RolloutsExportOptions)
def export(options: RolloutsExportOptions) -> None:
    """Write the delivered groups into a file: a row for each segment of each trajectory."""
    require_store("export")

    async def act(client: Client) -> int:
        found = await RolloutRun.open(client, options.name)
        return await export_rollouts(client, found, options.path, options.form, on_unreadable=note_unreadable)

    def note_unreadable(conversation_id: str) -> None:
        note(f"The conversation {conversation_id} can no longer be read. The file has no rows of it.")

    note(f"{on_cluster(act):,} rows are in {options.path}.")
