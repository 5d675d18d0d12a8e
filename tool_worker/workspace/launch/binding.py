"""The properties of a workspace that are fixed for its whole life.

Does not: store bindings, see `host_folder`, or decide which directories may be workspaces, see `bindings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from broker.contract import WorkspaceSpec
from tool_worker.errors import WorkspaceConflict
from tool_worker.sandbox import AUTO

MOUNT_AT = "/workspace"


@dataclass(frozen=True, slots=True)
class Binding:
    """The properties of a workspace that are fixed for its whole life.

    Attributes:
        path: Its directory on this node.
        mount_at: The directory's path as its programs see it.
        host_id: Random; marks the processes of its hosts.
        image: Image of its container, if it has one; empty for the node's first one.
        allow: Network hosts that its programs may reach, by a proxy.
        tenant: Tenant of the conversation, for a named directory; None for our own directories and for bindings of
            earlier versions.
    """

    path: str
    mount_at: str
    sandbox: str
    has_network: bool
    host_id: str
    allow: tuple[str, ...] = ()
    image: str = ""
    tenant: str | None = None

    def is_named(self, own: Path) -> bool:
        """Return whether the conversation named the directory; otherwise we created it."""
        return self.path != str(own)

    def check_spec(self, spec: WorkspaceSpec) -> None:
        """Check that a specification fits this binding; no path, no image and the sandbox `auto` fit every one.

        Raises:
            WorkspaceConflict: The workspace was first opened with another specification.
        """
        is_other = (
            (spec.path is not None and str(to_absolute(spec.path)) != self.path)
            or spec.sandbox not in (AUTO, self.sandbox)
            or spec.network != self.has_network
            or spec.allow != tuple(self.allow)
        )
        if is_other:
            raise WorkspaceConflict(
                f"The workspace is {self.path} in the sandbox {self.sandbox}, "
                f"{'with' if self.has_network else 'without'} network"
                f"{' but ' + ', '.join(self.allow) if self.allow else ''}.",
                remedy="Ask for the same, or start another conversation.",
            )


def to_absolute(path: str) -> Path:
    """Return an absolute path without `.` and `..`; links in it are kept."""
    return Path(os.path.normpath(Path(path).absolute()))
