"""`deckhands up`, `controller` and `tools`: being the cluster, or a part of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings, joined_paths, split_paths
from broker.secrets.private_directories import workspace_roots as roots_in
from broker.store.store import open_store
from broker.tools.tool_offers import ToolOffers
from deckhands.cli.options import sandbox_option, workspace_root_option
from deckhands.cli.output import note
from deckhands.cli.reach import on_cluster
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.cluster.embedded_cluster import CONTROLLER, MODULES, TOOLS, Cluster, ClusterSpec, worker_environment
from deckhands.cluster.examining import reason_unconfined
from deckhands.cluster.home import Home, supervising
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings


@click.command()
@click.option("--controllers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--tools", "tool_workers", type=click.IntRange(0, 64), default=1, show_default=True)
@click.option("--port", type=click.IntRange(1, 65_535), help="Offer the store on this port of 127.0.0.1 too.")
@workspace_root_option
@sandbox_option
def up(
    *, controllers: int, tool_workers: int, port: int | None, workspace_roots: tuple[str, ...], sandbox: str | None
) -> None:
    """Keep a cluster up on this machine: a store, controller workers and tool workers.

    Other terminals find it by themselves: `deckhands submit`, `ls`, `logs -f`. A worker or a store that dies is
    started again. Ctrl-C stops it; what it knows is kept for the next time.
    """
    settings = FaceSettings.from_env()
    environment = dict(settings.environment)
    if sandbox is not None:
        environment["DECKHANDS_SANDBOX"] = sandbox
    home = Home(settings.home)
    home.prepare(home.cluster)
    spec = ClusterSpec(
        home.cluster,
        controllers=controllers,
        tools=tool_workers,
        environment=environment,
        port=port,
        workspace_roots=_roots(workspace_roots, environment),
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
                    note(f"No sandbox works here ({reason}): commands of agents are refused. See `deckhands doctor`.")
            await stopped
            ready.cancel()
    finally:
        await cluster.stop()
    note("Stopped.")


def _greeting(cluster: Cluster, model: str | None) -> str:
    lines = [
        f"The cluster is up: {cluster.spec.controllers} controller and {cluster.spec.tools} tool workers.",
        f"  store:  {cluster.store.port_url or cluster.url}",
        f"  celery: {cluster.store.celery_url}",
        f"  logs:   {cluster.logs}",
        f"  model:  {model or 'none by default; name one by `submit --model`, or set LLM_MODEL here'}",
        "In another terminal: `deckhands submit -t TASK`, `deckhands ls`, `deckhands logs -f ID`. Ctrl-C stops it.",
    ]
    return "\n".join(lines)


@click.command()
@click.option("--concurrency", type=click.IntRange(min=1), help="Conversations held at once.")
def controller(*, concurrency: int | None) -> NoReturn:
    """Run one controller worker in the foreground against DECKHANDS_URL."""
    _become(CONTROLLER, {"DECKHANDS_MAX_CONVERSATIONS": concurrency})


@click.command()
@click.option("--pool", "pools", multiple=True, help="What this host can do; may be given several times.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Actions run at once.")
@click.option("--list", "is_list", is_flag=True, help="Show which tools the tool workers offer, and end.")
@workspace_root_option
@sandbox_option
def tools(
    *,
    pools: tuple[str, ...],
    concurrency: int | None,
    workspace_roots: tuple[str, ...],
    sandbox: str | None,
    is_list: bool,
) -> None:
    """Run one tool worker in the foreground against DECKHANDS_URL."""
    if is_list:
        for key, offer in on_cluster(lambda client: ToolOffers(client.store).all()).items():
            first_line = offer.description.partition("\n")[0]
            print_text(f"{key}\t{offer.pool or '-'}\t{offer.outcome}\t{first_line}")
        return
    chosen = {
        "DECKHANDS_POOLS": ",".join(pools),
        "DECKHANDS_CONCURRENCY": concurrency,
        "DECKHANDS_SANDBOX": sandbox,
        "DECKHANDS_WORKSPACE_ROOTS": joined_paths(_roots(workspace_roots, FaceSettings.from_env().environment)),
    }
    _become(TOOLS, chosen)


def _roots(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the workspace roots that are given by the option, or else by the environment.

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
            remedy="Set it to the store, such as redis://host:6379/0; `deckhands up` runs a cluster without one.",
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
