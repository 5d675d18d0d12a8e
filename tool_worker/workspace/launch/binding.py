"""What a workspace is for its whole life.

Does not: say where a binding is kept, see `host_folder`, or what cannot be a workspace, see `bindings`.
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
    """What a workspace is for its whole life.

    Attributes:
        path: its directory on this node.
        mount_at: the path at which its programs find it.
        host_id: random; marks the processes of its hosts.
        image: of its container, if it has one; empty: the node's first.
        allow: the hosts of the network that its programs may reach, by a proxy.
        tenant: of the conversation, if it names its directory; None: it does not, or was bound by an earlier version.
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
        """Say whether the conversation named the directory; otherwise we created it."""
        return self.path != str(own)

    def require_same(self, spec: WorkspaceSpec) -> None:
        """Refuse to be opened as something else; no path, no image and the sandbox `auto` fit every binding.

        Raises:
            WorkspaceConflict: it was first opened by another specification.
        """
        is_other = (
            (spec.path is not None and str(absolute(spec.path)) != self.path)
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


def absolute(path: str) -> Path:
    """Return a path without `.`, `..` and dependence on where we are; links in it are left as they are."""
    return Path(os.path.normpath(Path(path).absolute()))
