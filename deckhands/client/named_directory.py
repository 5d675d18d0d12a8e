"""A directory named as a workspace, checked before anything is queued.

Does not: protect anything. A tool worker checks again whatever it is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from broker.coordination.membership import Member, members
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings, split_paths
from broker.secrets.private_directories import fault, name_fault, private_paths
from broker.specs.specs import WorkspaceSpec
from broker.store.store import Store

NAME_ANOTHER = "Name another with -w."


def own_directory(path: Path, environment: Mapping[str, str]) -> Path:
    """Return the path, without links, of a directory of this machine that an agent can work on.

    Args:
        environment: of the tool worker that is to work there.

    Raises:
        UsageError: there is no such directory, it cannot be written, or it may not be a workspace.
    """
    absolute = path.absolute()
    if reason := name_fault(str(absolute)):
        raise UsageError(f"The directory {ascii(str(path))[:300]} cannot be used: {reason}.", remedy=NAME_ANOTHER)
    try:
        is_directory, is_there = absolute.is_dir(), absolute.exists()
        resolved = absolute.resolve()
    except OSError as error:
        raise UsageError(f"The directory {absolute} cannot be used: {error.strerror}.", remedy=NAME_ANOTHER) from error
    except RuntimeError as error:  # links that lead to each other
        raise UsageError(f"The directory {absolute} cannot be used: {error}.", remedy=NAME_ANOTHER) from error
    if not is_directory:
        what = "is not a directory" if is_there else "does not exist"
        raise UsageError(f"The directory {absolute} {what}.", remedy="Name an existing directory with -w.")
    refuse_unfit(resolved, environment)
    if not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(
            f"The directory {absolute} cannot be written.", remedy="Make it writable, or name another with -w."
        )
    return resolved


def refuse_unfit(directory: Path, environment: Mapping[str, str]) -> None:
    """Refuse a directory that must not be a workspace. It need not exist.

    Raises:
        UsageError: see `broker.secrets.private_directories.fault`.
    """
    try:
        reason = fault(directory.resolve(), private_paths(BrokerSettings.from_env(environment)))
    except (OSError, RuntimeError) as error:
        reason = str(error)
    if reason:
        raise UsageError(
            f"The directory {directory} may not be a workspace: {reason}.",
            remedy="Name the directory of a project with -w, or run the command from there.",
        )


async def require_served(store: Store, workspace: WorkspaceSpec) -> None:
    """Refuse a directory that none of the running tool workers would take.

    Raises:
        UsageError: tool workers are running, but the directory is below none of their workspace roots.
    """
    if workspace.path is None:
        return
    serving = [member for member in await members(store) if _serves(member, workspace)]
    if serving and not any(_takes(member, PurePosixPath(workspace.path)) for member in serving):
        raise UsageError(
            f"No tool worker takes the directory {ascii(workspace.path)[1:-1][:300]}: it is below none of their "
            "workspace roots.",
            remedy="Start `deckhands up` or `deckhands tools` with --workspace-root DIR, where DIR is this directory "
            "or one above it. Or leave -w out to work in an empty directory.",
        )


def _serves(member: Member, workspace: WorkspaceSpec) -> bool:
    pools = member.about.get("pools", "").split(",")
    return member.role == "tool" and member.left_seconds > 0 and workspace.pool in pools


def _takes(member: Member, path: PurePosixPath) -> bool:
    roots = member.about.get("workspace_roots")
    return roots is None or any(path.is_relative_to(root) for root in split_paths(roots))
