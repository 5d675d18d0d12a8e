"""Check a task's workspace before it is queued: a named directory, and the offers of nodes.

Does not: protect anything. A tool worker repeats every check.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from broker.contract import WorkspaceSpec
from broker.coordination import accepts_directory, find_placement, has_needs, list_members, serves_pool
from broker.runtime import BrokerSettings, UsageError
from broker.secrets import find_fault, find_name_fault, find_private_paths
from broker.store import Store
from deckhands.client.tasks.spec import TaskSpec

STARTING_SECONDS, POLL_SECONDS = 3.0, 0.25
READY_SECONDS = 60.0
NAME_ANOTHER = "Name another with -w."


class DirectoryNotTaken(UsageError):
    """Tool workers are running, but the workspace's directory is below none of their roots."""

    code = "directory_not_taken"


def resolve_local_directory(path: Path, environment: Mapping[str, str]) -> Path:
    """Return the path, without links, of a directory of this machine that an agent can work on.

    Args:
        environment: the environment of the tool worker that will use it.

    Raises:
        UsageError: there is no such directory, it cannot be written, or it may not be a workspace.
    """
    absolute = path.absolute()
    if reason := find_name_fault(str(absolute)):
        raise UsageError(f"The directory {ascii(str(path))[:300]} cannot be used: {reason}.", remedy=NAME_ANOTHER)
    try:
        is_directory, is_there = absolute.is_dir(), absolute.exists()
        resolved = absolute.resolve()
    except OSError as error:
        raise UsageError(f"The directory {absolute} cannot be used: {error.strerror}.", remedy=NAME_ANOTHER) from error
    except RuntimeError as error:  # links that form a cycle
        raise UsageError(f"The directory {absolute} cannot be used: {error}.", remedy=NAME_ANOTHER) from error
    if not is_directory:
        what = "is not a directory" if is_there else "does not exist"
        raise UsageError(f"The directory {absolute} {what}.", remedy="Name an existing directory with -w.")
    check_directory(resolved, environment)
    if not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(
            f"The directory {absolute} cannot be written.", remedy="Make it writable, or name another with -w."
        )
    return resolved


def check_directory(directory: Path, environment: Mapping[str, str]) -> None:
    """Refuse a directory that must not be a workspace. It need not exist.

    Raises:
        UsageError: see `broker.secrets.private_directories.find_fault`.
    """
    try:
        reason = find_fault(directory.resolve(), find_private_paths(BrokerSettings.from_env(environment)))
    except (OSError, RuntimeError) as error:
        reason = str(error)
    if reason:
        raise UsageError(
            f"The directory {directory} may not be a workspace: {reason}.",
            remedy="Name the directory of a project with -w, or run the command from there.",
        )


async def wait_for_tool_worker(store: Store, task: TaskSpec) -> None:
    """Wait for a starting tool worker, for a minute at most, if the task requires offers of it."""
    workspace = task.workspace_spec()
    if workspace.needs is None and not task.tools:
        return
    loop = asyncio.get_running_loop()
    ends = loop.time() + READY_SECONDS
    found = await find_placement(store, workspace)
    while not found.has_workers and loop.time() < ends:
        await asyncio.sleep(POLL_SECONDS)
        found = await find_placement(store, workspace)


async def require_served(store: Store, workspace: WorkspaceSpec) -> None:
    """Refuse a workspace that none of the running tool workers would serve.

    Raises:
        NotServed: tool workers are running, but none meets the workspace's requirements. A starting
            worker gets a few seconds.
        DirectoryNotTaken: tool workers are running, but the directory is below none of their workspace roots.
    """
    if not has_needs(workspace):
        return
    if workspace.path is not None:
        serving = [member for member in await list_members(store) if serves_pool(member, workspace.pool)]
        if serving and not any(accepts_directory(member, workspace.path) for member in serving):
            raise DirectoryNotTaken(
                f"No tool worker takes the directory {ascii(workspace.path)[1:-1][:300]}: it is below none of their "
                "workspace roots.",
                remedy="Start `deckhands up` or `deckhands tools` with --workspace-root DIR, where DIR is this "
                "directory or one above it. Or leave -w out to work in an empty directory.",
            )
    loop = asyncio.get_running_loop()
    ends = loop.time() + STARTING_SECONDS
    while (found := await find_placement(store, workspace)).has_workers and not found.nodes:
        if loop.time() >= ends:
            raise found.make_refusal()
        await asyncio.sleep(POLL_SECONDS)
