"""What a workspace is for its whole life, and what cannot be one.

Does not: say where a binding is kept; see `host_folder`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tool_worker.workspace_errors import WorkspaceConflict, WorkspaceLost, WorkspaceRefused

MOUNT_AT = "/workspace"

_SYSTEM_DIRECTORIES = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")


@dataclass(frozen=True, slots=True)
class Binding:
    """What a workspace is for its whole life.

    Attributes:
        path: its directory on this node.
        mount_at: the path at which its programs find it.
        host_id: random; marks the processes of its hosts.
        image: of its container, if it has one; empty: the node's first.
        allow: the hosts of the network that its programs may reach, by a proxy.
    """

    path: str
    mount_at: str
    sandbox: str
    has_network: bool
    host_id: str
    allow: tuple[str, ...] = ()
    image: str = ""

    def require_same(
        self, path: str | None, sandbox: str | None, network: bool | None, allow: tuple[str, ...] | None = None
    ) -> None:
        """Refuse to be opened as something else; None asks for nothing.

        Raises:
            WorkspaceConflict: it was first opened with other arguments.
        """
        is_other = (
            (path is not None and str(absolute(path)) != self.path)
            or sandbox not in (None, self.sandbox)
            or (network is not None and network != self.has_network)
            or (allow is not None and allow != tuple(self.allow))
        )
        if is_other:
            raise WorkspaceConflict(
                f"The workspace is {self.path} in the sandbox {self.sandbox}, "
                f"{'with' if self.has_network else 'without'} network"
                f"{' but ' + ', '.join(self.allow) if self.allow else ''}.",
                remedy="Ask for the same, or start another conversation.",
            )


def absolute(path: str) -> Path:
    """Return a path without `.`, `..` and dependence on where we are; links in it are left as they are."""
    return Path(os.path.normpath(Path(path).absolute()))


def mount_of(directory: Path, root: Path) -> str:
    """Say where programs in a sandbox find a workspace.

    Our own directories, below `root`, are at /workspace: no path of this node gets into the conversation, so it can go
    on elsewhere. A directory of the user's stays where it is: virtual environments and build trees contain its path.
    """
    return MOUNT_AT if directory.resolve().is_relative_to(root.resolve()) else str(directory)


def check_directory(directory: Path) -> None:
    """Refuse what is no directory, or belongs to the system.

    Raises:
        WorkspaceRefused, WorkspaceLost: see there.
    """
    if str(directory) in _SYSTEM_DIRECTORIES:
        raise WorkspaceRefused(f"{directory} may not be a workspace.", remedy="Use a directory of your own.")
    if not directory.is_dir():
        raise WorkspaceLost(
            f"The directory {directory} of the workspace is not there.",
            remedy="Restore it from a checkpoint, or start another conversation.",
        )
