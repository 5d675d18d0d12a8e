"""`deckhands up`, `controller`, `tools` and `door`: run a cluster, or one of its workers."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings, joined_paths, split_paths
from broker.secrets.private_directories import workspace_roots as roots_in
from broker.store.store import open_store
from broker.tools.tool_offers import ToolOffers
from deckhands.cli.connecting import on_cluster
from deckhands.cli.options import sandbox_option, workspace_root_option
from deckhands.cli.output import note
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.cli.verbs import options_as
from deckhands.cluster.diagnostics import reason_unconfined
from deckhands.cluster.embedded_cluster import (
    CONTROLLER,
    DOOR,
    MODULES,
    TOOLS,
    Cluster,
    ClusterSpec,
    worker_environment,
)
from deckhands.home import Home, supervising
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings

SECTION = "Operate a cluster"
VERBS = {
    "up": "Run a cluster on this machine for other terminals to use.",
    "controller": "Run one controller worker against DECKHANDS_URL.",
    "tools": "Run one tool worker against DECKHANDS_URL.",
    "door": "Run one door worker against DECKHANDS_URL: Celery tasks and the inbox.",
}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `up`."""

    controllers: int
    tool_workers: int
    doors: int
    port: int | None
    workspace_roots: tuple[str, ...]
    sandbox: str | None


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of `controller`; None leaves the limit to the worker's settings."""

    concurrency: int | None


@dataclass(frozen=True, slots=True)
class ToolWorkerOptions:
    """Options of `tools`; what is None or empty is left to the worker's settings."""

    pools: tuple[str, ...]
    concurrency: int | None
    is_list: bool
    workspace_roots: tuple[str, ...]
    sandbox: str | None


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """Options of `door`; None leaves it to the worker's settings."""

    result_url: str | None


@click.command()
@click.option("--controllers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--tools", "tool_workers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--doors", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--port", type=click.IntRange(1, 65_535), help="Also offer the store on this port of 127.0.0.1.")
@workspace_root_option
@sandbox_option
@options_as(UpOptions)
def up(options: UpOptions) -> None:
    """Run a cluster on this machine: a store, controller workers, tool workers and doors.

    The commands in other terminals find it: `deckhands submit`, `ls`, `logs -f`. A worker or a store that dies is
    started again. Ctrl-C stops the cluster; its conversations are kept for the next time.
    """
    settings = FaceSettings.from_env()
    environment = dict(settings.environment)
    if options.sandbox is not None:
        environment["DECKHANDS_SANDBOX"] = options.sandbox
    home = Home(settings.home)
    home.prepare(home.cluster)
    spec = ClusterSpec(
        home.cluster,
        controllers=options.controllers,
        tools=options.tool_workers,
        doors=options.doors,
        environment=environment,
        port=options.port,
        workspace_roots=_roots(options.workspace_roots, environment),
        gives_up=False,
    )
    with supervising(home.cluster, "A cluster"):
        asyncio.run(_keep_up(home, spec, settings.model))


async def _keep_up(home: Home, spec: ClusterSpec, model: str | None) -> None:
    stop = asyncio.Event()
    on_stop_signals(stop.set)
    cluster = Cluster(spec, on_notice=note)
    try:
        await cluster.start()
        with home.announced(cluster.url):
            ready = asyncio.ensure_future(cluster.until_ready())
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                await ready
                print_text(_greeting(cluster, model))
                if spec.tools and (reason := await asyncio.to_thread(reason_unconfined, spec.environment)):
                    note(f"No sandbox works here ({reason}): agents' commands are refused. See `deckhands doctor`.")
            await stopped
            ready.cancel()
    finally:
        await cluster.stop()
    note("Stopped.")


def _greeting(cluster: Cluster, model: str | None) -> str:
    spec = cluster.spec
    lines = [
        f"The cluster is up: {spec.controllers} controller and {spec.tools} tool workers, {spec.doors} doors.",
        f"  store:  {cluster.store.port_url or cluster.url}",
        f"  celery: {cluster.store.celery_url}",
        f"  ask:    {_question(cluster.store.celery_url)}",
        f"  logs:   {cluster.logs}",
        f"  model:  {model or 'none by default; use `submit --model`, or set LLM_MODEL here'}",
        "In another terminal: `deckhands submit -t TASK`, `deckhands ls`, `deckhands logs -f ID`. Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def _question(celery_url: str) -> str:
    """Return the command that asks the workers for the conversations they have, for a shell in any directory."""
    celery = Path(sys.executable).parent / "celery"
    return shlex.join([str(celery), "-A", "controller_worker.app", "-b", celery_url, "inspect", "conversations"])


@click.command()
@click.option("--concurrency", type=click.IntRange(min=1), help="How many conversations it owns at once.")
@options_as(ControllerOptions)
def controller(options: ControllerOptions) -> NoReturn:
    """Run one controller worker in the foreground against DECKHANDS_URL."""
    _become(CONTROLLER, {"DECKHANDS_MAX_CONVERSATIONS": options.concurrency})


@click.command()
@click.option("--pool", "pools", multiple=True, help="A pool that this host serves. May be repeated.")
@click.option("--concurrency", type=click.IntRange(min=1), help="How many actions it runs at once.")
@click.option("--list", "is_list", is_flag=True, help="List the tools that tool workers offer, and exit.")
@workspace_root_option
@sandbox_option
@options_as(ToolWorkerOptions)
def tools(options: ToolWorkerOptions) -> None:
    """Run one tool worker in the foreground against DECKHANDS_URL."""
    if options.is_list:
        for key, offer in on_cluster(lambda client: ToolOffers(client.store).all()).items():
            first_line = offer.description.partition("\n")[0]
            print_text(f"{key}\t{offer.pool or '-'}\t{offer.outcome}\t{first_line}")
        return
    chosen = {
        "DECKHANDS_POOLS": ",".join(options.pools),
        "DECKHANDS_CONCURRENCY": options.concurrency,
        "DECKHANDS_SANDBOX": options.sandbox,
        "DECKHANDS_WORKSPACE_ROOTS": joined_paths(_roots(options.workspace_roots, FaceSettings.from_env().environment)),
    }
    _become(TOOLS, chosen)


@click.command()
@click.option("--result-url", help="Where results of Celery tasks are kept, if not in Celery's broker.")
@options_as(DoorOptions)
def door(options: DoorOptions) -> NoReturn:
    """Run one door worker in the foreground: it serves the Celery tasks `deckhands.*` and the stream `deck:inbox`."""
    _become(DOOR, {"DECKHANDS_CELERY_RESULT_URL": options.result_url})


def _roots(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the workspace roots given by the option, or otherwise by the environment.

    Raises:
        UsageError: one cannot be used.
    """
    if names:
        return roots_in(str(Path(name).expanduser().absolute()) for name in names)
    return roots_in(split_paths(BrokerSettings.from_env(environment).workspace_roots))


def _become(role: str, chosen: dict[str, Any]) -> NoReturn:
    """Turn this process into a worker, so that signals and exit codes are the worker's own."""
    settings = FaceSettings.from_env()
    if settings.url is None:
        raise UsageError(
            "DECKHANDS_URL is not set.",
            remedy="Set it to the store, such as redis://host:6379/0. `deckhands up` runs a cluster without it.",
        )
    asyncio.run(_check_store(settings))
    environment = worker_environment(role, settings.environment) | {
        name: str(value) for name, value in chosen.items() if value
    }
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", MODULES[role]], environment)  # noqa: S606


async def _check_store(settings: FaceSettings) -> None:
    """Fail here, with a message, rather than in the worker's log."""
    assert settings.url is not None
    store = await open_store(settings.url, shards=settings.shards)
    await store.aclose()
