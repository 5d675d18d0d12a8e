"""`deckhands up`, `controller`, `tools`, `ingress`, `jobs` and `beat`: run a cluster, or one of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from broker.contract import ToolOffer
from broker.limits import Ledger
from broker.runtime import (
    BEAT,
    CONTROLLER,
    INGRESS,
    JOBS,
    TOOLS,
    BrokerSettings,
    UsageError,
    format_count,
    hide_password,
    join_paths,
    make_celery_url,
    make_worker_environment,
    split_paths,
)
from broker.secrets import parse_workspace_roots as roots_in
from broker.store import FunctionsVersion, deploy, open_store, own_version
from broker.tools import SANDBOX, ReportedFailure, ToolFailure, ToolFailures, ToolOffers
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.gateway import page_of_cluster, require_server
from deckhands.cli.options import Duration, sandbox_option, workspace_root_option
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.client import Client, note, on_cluster, print_text, store_url, warn_of_ignored_settings
from deckhands.cluster import ANY_MODEL, MODULES, Cluster, ClusterSpec, Home, supervise
from deckhands.operations import examine_retention
from deckhands.settings import CliSettings

SECTION = "Operate a cluster"
SUMMARIES = {
    "up": "Run a cluster on this machine for other terminals to use.",
    "controller": "Run one controller worker of a cluster.",
    "tools": "Run one tool worker of a cluster.",
    "ingress": "Run one ingress worker of a cluster: Celery tasks and the inbox.",
    "jobs": "Run one worker of a cluster for periodic and longer jobs.",
    "beat": "Run one beat of a cluster: it sends the periodic jobs.",
    "setup": "Load this version's functions into the store: first use, upgrade.",
}

FAILURES_SECONDS = 1.0
"""The interval between two reads of the tool workers' reports."""
MAX_PRINTED = 100
STOP_SECONDS = 60.0
"""How long `setup` waits for workers to stop."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `up`."""

    controllers: int
    tool_workers: int
    ingresses: int
    jobs: int
    beats: int
    port: int | None
    workspace_roots: tuple[str, ...]
    sandbox: str | None
    scripts: str | None
    web: bool
    web_port: int
    chaos: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of `controller`; None leaves the limit to the worker's settings."""

    concurrency: int | None


@dataclass(frozen=True, slots=True)
class ToolWorkerOptions:
    """Options of `tools`; None or an empty value leaves an option to the worker's settings."""

    pools: tuple[str, ...]
    concurrency: int | None
    is_list: bool
    workspace_roots: tuple[str, ...]
    sandbox: str | None


@dataclass(frozen=True, slots=True)
class IngressOptions:
    """Options of `ingress`; None leaves an option to the worker's settings."""

    result_url: str | None


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """Options of `setup`."""

    stop_older: bool


@click.command()
@click.option("--controllers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--tools", "tool_workers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--ingresses", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--jobs", type=click.IntRange(0, 64), default=1, show_default=True, help="Jobs workers.")
@click.option(
    "--beats", type=click.IntRange(0, 64), default=1, show_default=True, help="Processes that send periodic jobs."
)
@click.option("--port", type=click.IntRange(1, 65_535), help="Also offer the store on this port of 127.0.0.1.")
@workspace_root_option
@sandbox_option
@click.option(
    "--scripts",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Offer the scripts and recordings below this directory as models `scripted/FILE` and `replay/FILE`.",
)
@click.option(
    "--web", is_flag=True, help="Serve the web page and the API on 127.0.0.1, and open the page by a link with a key."
)
@click.option("--web-port", type=click.IntRange(0, 65_535), default=8900, show_default=True, help="0: any free port.")
@click.option(
    "--chaos",
    metavar="TIME",
    type=Duration(least_seconds=1, most_seconds=86_400),
    help="For development: kill or stop a random worker about every TIME, such as 10s.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of --chaos: determines which, and when.")
@with_options(UpOptions)
def up(options: UpOptions) -> None:
    """Run a cluster on this machine: a store, controller and tool workers, ingress workers, jobs and a beat.

    The commands in other terminals find it: `deckhands submit`, `ls`, `logs -f`. If a worker or the store dies, it is
    restarted. Ctrl-C stops the cluster; its conversations are kept for the next time.
    """
    settings = CliSettings.from_env()
    environment = dict(settings.environment)
    if options.sandbox is not None:
        environment["DECKHANDS_SANDBOX"] = options.sandbox
    if options.scripts is not None:
        environment["LLM_SCRIPTS_DIR"] = str(Path(options.scripts).absolute())
    home = Home(settings.home)
    home.prepare(home.cluster)
    spec = ClusterSpec(
        home.cluster,
        controllers=options.controllers,
        tools=options.tool_workers,
        ingresses=options.ingresses,
        jobs=options.jobs,
        beats=options.beats,
        environment=environment,
        port=options.port,
        workspace_roots=_roots(options.workspace_roots, environment),
        checked_models=("",),
        gives_up=False,
    )
    if settings.url is not None:
        note("DECKHANDS_URL names another store: commands that have this variable use that one, and not this cluster.")
    if options.web:
        require_server()
    with supervise(home.cluster, "A cluster"):
        if options.web:
            _require_free_port(options.web_port, "--web-port")
        if options.port is not None:
            _require_free_port(options.port, "--port")
        asyncio.run(_run_cluster(home, spec, settings, options))


def _require_free_port(port: int, option: str) -> None:
    """Check a port before anything starts.

    Raises:
        UsageError: another program listens there.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise UsageError(
            f"Port {port} of 127.0.0.1 cannot be used: {error.strerror}.", remedy=f"Choose another by {option}."
        ) from error


async def _run_cluster(home: Home, spec: ClusterSpec, settings: CliSettings, options: UpOptions) -> None:
    stop = asyncio.Event()
    on_stop_signals(stop.set)
    cluster = Cluster(spec, on_notice=note)
    background: list[asyncio.Task[None]] = []
    page = contextlib.AsyncExitStack()
    try:
        await cluster.start()
        with home.announce(cluster.url, cluster.store.celery_url):
            ready = asyncio.ensure_future(cluster.until_ready())
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                await ready
                print_text(_greeting(home, cluster, settings.model, has_page=options.web))
                for finding in await asyncio.to_thread(examine_retention, spec.environment):
                    if not finding.is_good:
                        note(f"{finding.name.capitalize()}: {finding.detail}")
                background.append(asyncio.create_task(_print_failures(cluster.url)))
                if options.web:
                    await page.enter_async_context(
                        page_of_cluster(cluster.url, settings.archive, port=options.web_port, key_file=home.server_key)
                    )
                if options.chaos is not None:
                    from deckhands.chaos import interrupt_workers

                    interrupting = interrupt_workers(
                        cluster, every_seconds=options.chaos, seed=options.seed, on_notice=note
                    )
                    background.append(asyncio.create_task(interrupting))
            await stopped
            ready.cancel()
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await page.aclose()
        await cluster.stop()
    note("Stopped.")


async def _print_failures(url: str) -> None:
    """Print the problems that the tool workers report, each once; never returns."""
    store = await open_store(url, patience_seconds=None, deploys=False)
    await warn_of_ignored_settings(Client(store), note)
    told: set[ToolFailure] = set()
    try:
        while True:
            for reported in await ToolFailures(store).load_all():
                failure = reported.failure
                if failure not in told and len(told) < MAX_PRINTED:
                    told.add(failure)
                    refused = " Until then, agents' commands are refused." if failure.source == SANDBOX else ""
                    note(f"{reported} {failure.remedy}{refused}")
            await asyncio.sleep(FAILURES_SECONDS)
    finally:
        await store.aclose()


def _greeting(home: Home, cluster: Cluster, model: str | None, *, has_page: bool) -> str:
    """Return the notes to print for a cluster. The password stays in a file: screens are shared and logged."""
    spec, store = cluster.spec, cluster.store
    counts = [(spec.controllers, "controller worker"), (spec.tools, "tool worker"), (spec.ingresses, "ingress worker")]
    counts += [(spec.jobs, "jobs worker"), (spec.beats, "beat")]
    *most, last = (format_count(*each) for each in counts)
    lines = [
        f"The cluster is up: {', '.join(most)} and {last}.",
        f"  store:  {hide_password(store.port_url or store.url, 'PASSWORD')}",
        f"  celery: {hide_password(store.celery_url, 'PASSWORD')}",
        f"  login:  PASSWORD stands for the content of {store.password_file}",
        f"  ask:    {_question(home)}",
        f"  logs:   {cluster.logs}",
        f"  model:  {model or 'none by default: set LLM_MODEL or LLM_CONFIG here'}",
        *([] if has_page else ["  page:   not served: start with --web, or run `deckhands serve` in another terminal"]),
        "In another terminal: `deckhands submit -t TASK`, `deckhands ls`, `deckhands logs -f ID`. Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def _question(home: Home) -> str:
    """Return the command that lists the workers' conversations, for a shell in any directory.

    It reads the address from a file into its environment: arguments are visible to every user of the machine.
    """
    celery = shlex.quote(str(Path(sys.executable).parent / "celery"))
    variables = f'DECKHANDS_URL="$(cat {shlex.quote(str(home.cluster_url_file))})" DECKHANDS_CELERY_URL='
    return f"{variables} {celery} -A controller_worker.app inspect conversations"


@click.command()
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Maximum number of conversations that the worker owns at the same time.",
)
@with_options(ControllerOptions)
def controller(options: ControllerOptions) -> NoReturn:
    """Run one controller worker in the foreground, for the cluster at DECKHANDS_URL or the one that runs here."""
    _exec_worker(CONTROLLER, {"DECKHANDS_MAX_CONVERSATIONS": options.concurrency})


@click.command()
@click.option("--pool", "pools", multiple=True, help="A pool that this host serves. May be repeated.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Maximum number of actions that the worker runs at the same time."
)
@click.option("--list", "is_list", is_flag=True, help="List the tools that tool workers offer, and exit.")
@workspace_root_option
@sandbox_option
@with_options(ToolWorkerOptions)
def tools(options: ToolWorkerOptions) -> None:
    """Run one tool worker in the foreground, for the cluster at DECKHANDS_URL or the one that runs here."""
    if options.is_list:
        offers, failures = on_cluster(_read_offers)
        for key, offer in offers.items():
            first_line = offer.description.partition("\n")[0]
            print_text(f"{key}\t{offer.pool or '-'}\t{offer.outcome}\t{first_line}")
        for reported in failures:
            note(f"{reported} {reported.failure.remedy}".strip())
        return
    chosen = {
        "DECKHANDS_POOLS": ",".join(options.pools),
        "DECKHANDS_CONCURRENCY": options.concurrency,
        "DECKHANDS_SANDBOX": options.sandbox,
        "DECKHANDS_WORKSPACE_ROOTS": join_paths(_roots(options.workspace_roots, CliSettings.from_env().environment)),
    }
    _exec_worker(TOOLS, chosen)


async def _read_offers(client: Client) -> tuple[dict[str, ToolOffer], list[ReportedFailure]]:
    return await ToolOffers(client.store).load_all(), await ToolFailures(client.store).load_all()


@click.command()
@click.option("--result-url", help="Where results of Celery tasks are kept, if not in Celery's broker.")
@with_options(IngressOptions)
def ingress(options: IngressOptions) -> NoReturn:
    """Run one ingress worker in the foreground: it serves the tasks `deckhands.*` and the stream `deck:inbox`."""
    _exec_worker(INGRESS, {"DECKHANDS_CELERY_RESULT_URL": options.result_url})


@click.command()
@click.option("--result-url", help="Where results of Celery tasks are kept, if not in Celery's broker.")
@with_options(IngressOptions)
def jobs(options: IngressOptions) -> NoReturn:
    """Run one worker of jobs in the foreground: it serves the Celery tasks `deckhands.jobs.*`."""
    _exec_worker(JOBS, {"DECKHANDS_CELERY_RESULT_URL": options.result_url})


@click.command()
def beat() -> NoReturn:
    """Run one beat in the foreground: it sends the periodic jobs. Of several, one sends, and the others wait.

    It needs only Celery's broker, at DECKHANDS_CELERY_URL or beside the store.
    """
    _exec_worker(BEAT, {})


@click.command()
@click.option(
    "--stop-older",
    is_flag=True,
    help="Ask incompatible workers to release their work and stop; wait a minute.",
)
@with_options(SetupOptions)
def setup(options: SetupOptions) -> None:
    """Load this version's functions into the store at DECKHANDS_URL, or that of the cluster that runs here.

    The store user must have the right to load functions. Newer functions are never replaced by older ones, and none are
    replaced while incompatible workers run.
    """
    settings = CliSettings.from_env()
    there = asyncio.run(_set_up(store_url(settings), settings, STOP_SECONDS if options.stop_older else 0.0))
    print_text(f"The functions in the store have version {there}; this build has version {own_version()}.")


async def _set_up(url: str, settings: CliSettings, stop_seconds: float) -> FunctionsVersion:
    store = await open_store(url, shards=settings.shards, deploys=False)
    try:
        version = await deploy(store.connection, stop_seconds=stop_seconds, is_setup=True)
        await Ledger(store).move_limits()
        return version
    finally:
        await store.aclose()


def _roots(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the workspace roots of the option, or otherwise of the environment.

    Raises:
        UsageError: one is invalid.
    """
    if names:
        return roots_in(str(Path(name).expanduser().absolute()) for name in names)
    return roots_in(split_paths(BrokerSettings.from_env(environment).workspace_roots))


def _exec_worker(role: str, chosen: dict[str, Any]) -> NoReturn:
    """Replace this process by a worker, so that signals and exit codes are the worker's own."""
    settings = CliSettings.from_env()
    environment = dict(settings.environment) | {name: str(value) for name, value in chosen.items() if value}
    environment.pop(ANY_MODEL, None)  # its clients may run other versions
    if role == BEAT and any(environment.get(f"DECKHANDS_CELERY_URL{kind}") for kind in ("", "_FILE")):
        _execute(role, environment)
    url = store_url(settings)
    asyncio.run(_check_store(url, settings))
    if settings.url is None:
        environment |= {"DECKHANDS_URL": url, "DECKHANDS_CELERY_URL": "", "DECKHANDS_CELERY_URL_FILE": ""}
    if role == BEAT:  # the others take it from the store's URL, or from its file each time they connect
        environment |= {"DECKHANDS_CELERY_URL": make_celery_url(url)}
    _execute(role, environment)


def _execute(role: str, environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", MODULES[role]]
    os.execve(sys.executable, command, make_worker_environment(role, environment))  # noqa: S606


async def _check_store(url: str, settings: CliSettings) -> None:
    """Fail here, with a message, rather than in the worker's log."""
    store = await open_store(url, shards=settings.shards, deploys=False)
    await store.aclose()
