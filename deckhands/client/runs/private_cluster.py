"""The private cluster of one conversation: its workers and their environment.

It also reports problems of the cluster to the user: missing workers, ignored settings, failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from broker.contract import AgentSpec, GitSource, WorkspaceSpec, asks_model
from broker.coordination import ClusterMember, find_silent_roles, list_members
from broker.runtime import OutcomeUnknown, StoreUnavailable
from deckhands.client.client import Client
from deckhands.client.named_directory import check_directory
from deckhands.cluster import ClusterSpec, Notice
from deckhands.settings import MODEL_VARIABLES, PROFILES_VARIABLE


def private_cluster(
    folder: Path, agent: AgentSpec, workspace: WorkspaceSpec, environment: Mapping[str, str]
) -> ClusterSpec:
    """Return the cluster for a new conversation: a store and one worker of each kind that it needs.

    The tool worker requires the conversation's sandbox, because it serves no other conversation.

    Args:
        folder: the folder for its store, logs and workspaces.
        environment: the environment variables of the user who starts it.

    Raises:
        UsageError: the directory may not be a workspace.
    """
    pools = ",".join(_own_pools(workspace, agent, environment))
    sandbox = workspace.sandbox if workspace.sandbox != "auto" else environment.get("DECKHANDS_SANDBOX", "auto")
    demanded = {"DECKHANDS_SANDBOX": sandbox, "DECKHANDS_POOLS": pools, **_own_repository(workspace, environment)}
    directories = () if workspace.path is None else (Path(workspace.path),)
    for directory in directories:
        check_directory(directory, environment)
    known = {**_own_model(agent.llm.model, environment), **environment, **demanded}
    checked = (agent.llm.model or "",) if asks_model(agent.name) else ()
    return ClusterSpec(folder, environment=known, workspace_roots=directories, is_private=True, checked_models=checked)


def _own_repository(workspace: WorkspaceSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Allow the private tool worker to clone the task's local repository, and no other."""
    name = "DECKHANDS_REPOSITORY_ROOTS"
    parts = urlsplit(workspace.source.url) if isinstance(workspace.source, GitSource) else None
    return {name: parts.path} if parts and parts.scheme == "file" and not environment.get(name) else {}


def _own_pools(workspace: WorkspaceSpec, agent: AgentSpec, environment: Mapping[str, str]) -> list[str]:
    """Return the pools of the private tool worker: the configured pools, and those that this conversation needs."""
    needed = [workspace.pool, *(["ipython"] if agent.enable_jupyter else [])]
    return list(dict.fromkeys([*environment.get("DECKHANDS_POOLS", "bash").split(","), *needed]))


def _own_model(model: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Make the agent's model the default of the private controller worker, which prepares for it at start."""
    is_configured = any(environment.get(name) for name in (*MODEL_VARIABLES, PROFILES_VARIABLE))
    return {MODEL_VARIABLES[0]: model} if model and not is_configured else {}


T = TypeVar("T")
POLL_SECONDS = 0.2
IGNORED_SHOWN = 20


async def warn_of_missing_workers(client: Client, on_notice: Notice) -> None:
    """Report the kinds of workers that a cluster lacks, because the run cannot continue without them."""
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):  # the task is in the log anyway
        if lacking := await find_silent_roles(client.store):
            on_notice(f"No {' and no '.join(lacking)} worker is running; the conversation waits.")


async def warn_of_ignored_settings(client: Client, on_notice: Notice, *, limit_seconds: float = 0.0) -> None:
    """Report unknown settings of models that the controller workers found.

    Args:
        limit_seconds: how long to wait for the first worker.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
        while not (found := await live_controllers(client)):
            if loop.time() >= deadline:
                return
            await asyncio.sleep(POLL_SECONDS)
        texts = dict.fromkeys(text for one in found for text in one.about.get("ignored_settings", "").splitlines())
        for text in list(texts)[:IGNORED_SHOWN]:
            on_notice(text)


async def live_controllers(client: Client) -> list[ClusterMember]:
    """Return the controller workers with a valid heartbeat."""
    return [one for one in await list_members(client.store) if one.role == "controller" and one.left_seconds > 0]


async def run_unless_broken(work: Awaitable[T], broken: Awaitable[None]) -> T:
    """Return the result of a coroutine, unless the cluster fails first.

    Raises:
        DeckhandsError: the failure of the cluster.
    """
    working, breakage = asyncio.ensure_future(work), asyncio.ensure_future(broken)
    try:
        await asyncio.wait((working, breakage), return_when=asyncio.FIRST_COMPLETED)
        if breakage.done():
            await breakage
        return await working
    finally:
        for future in (working, breakage):
            future.cancel()
        await asyncio.gather(working, breakage, return_exceptions=True)
