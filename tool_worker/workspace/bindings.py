"""Binds workspaces to their directories, and opens these directories: our own, and those that conversations name.

    <root>/.node/naming.lock     held while a workspace is bound to a named directory

A node's name is tied to one directory. A conversation's actions go to its node by name. Two directories under one name
would split a conversation's work between two workspaces.

Holds: every opening checks again that the directory may be named. A directory that a conversation of one tenant uses,
its subdirectories and its parents are not bound to a conversation of another tenant while this node keeps the first
one's folder. A directory keeps the identity that its first worker gave it. A worker does not start while its node's
name is served from another directory.
Does not: separate conversations of one tenant, because delegates and forks share directories; detect workers of one
name that start at the same moment (the next worker that starts does).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from broker.coordination import HEARTBEAT_SECONDS, ClusterMember, list_members
from broker.runtime import HEARTBEAT_TTL_SECONDS, UsageError, is_conversation_id, new_key
from broker.secrets import Mounts
from broker.store import Store
from tool_worker.errors import WorkspaceLost, WorkspaceRefused
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.host_folder import Binding, HostFolder
from tool_worker.workspace.layers import NODE_FOLDER, open_workspace
from tool_worker.workspace.named_directories import NamedDirectories

_NamedDirectory = tuple[str, str]
"""A directory, and the tenant of the conversation that named it."""


class Bindings:
    """The bindings of one node. All calls block.

    Args:
        root: Directory of the node's workspaces.
        named: Directories that conversations may name.
    """

    def __init__(self, root: Path, named: NamedDirectories) -> None:
        self._root = root.absolute()
        self._named = named
        self._known: dict[str, _NamedDirectory | None] = {}

    def bind(self, folder: HostFolder, binding: Binding) -> Directory:
        """Bind a workspace if this is allowed, and return its opened directory.

        Raises:
            WorkspaceRefused, WorkspaceLost: See `open`; nothing was bound.
        """
        if not binding.is_named(folder.workspace):
            directory = self.open(folder, binding)
            folder.write_binding(binding)
            return directory
        directory = self._open_named(binding)
        try:
            with self._hold_naming_lock():
                self._check_tenant(folder, binding)
                folder.write_binding(binding)
        except BaseException:
            directory.close()
            raise
        return directory

    def open(self, folder: HostFolder, binding: Binding | None = None) -> Directory:
        """Open the directory of a workspace; without a binding, the directory that we created.

        Raises:
            WorkspaceRefused: The directory may not, or may no longer, be a workspace.
            WorkspaceLost: The directory does not exist.
            WorkspaceUnavailable: It is an overlay, and cannot be mounted.
        """
        if binding is not None and binding.is_named(folder.workspace):
            return self._open_named(binding)
        try:
            return open_workspace(folder.workspace.parent)
        except OSError as error:
            raise WorkspaceLost(
                f"The directory {folder.workspace} of the workspace does not exist.",
                remedy="Restore it from a checkpoint, or start another conversation.",
            ) from error

    def _open_named(self, binding: Binding) -> Directory:
        return self._named.open(binding.path, self._root)

    def _check_tenant(self, folder: HostFolder, binding: Binding) -> None:
        mounts = Mounts.current()
        wanted = mounts.locate(Path(binding.path))
        others = {
            used for conversation_id, used in self._find_named().items() if conversation_id != folder.conversation_id
        }
        for path, tenant in others:
            if tenant == binding.tenant:
                continue
            used = mounts.locate(Path(path))
            if wanted.is_in(used) or used.is_in(wanted):
                raise WorkspaceRefused(
                    f"The directory {binding.path} may not be a workspace: a conversation of another tenant works in "
                    "it, in one inside it, or in one around it.",
                    remedy="Name another directory.",
                )

    def _find_named(self) -> dict[str, _NamedDirectory]:
        """Return the conversations of this node that work in a named directory."""
        names = set(os.listdir(self._root))  # noqa: PTH208  (only names are needed)
        for gone in self._known.keys() - names:
            del self._known[gone]
        for name in names - self._known.keys():
            folder = HostFolder(self._root, name)
            binding = folder.read_binding() if is_conversation_id(name) else None
            is_named = binding is not None and binding.is_named(folder.workspace)
            if binding is None or (is_named and binding.tenant is None):
                continue  # it may still be bound, or get its tenant at its next use
            self._known[name] = (binding.path, binding.tenant or "") if is_named else None
        return {name: known for name, known in self._known.items() if known is not None}

    @contextmanager
    def _hold_naming_lock(self) -> Iterator[None]:
        """Hold the node's lock for binding workspaces to named directories."""
        (self._root / NODE_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._root / NODE_FOLDER / "naming.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


PATIENCE_SECONDS = 3 * HEARTBEAT_TTL_SECONDS
"""A killed worker stays visible for a moment, and its successor may have a new disk."""


def read_or_create_identity(node_dir: Path) -> str:
    """Return the identity of a node's directory, creating it if missing; "" if it cannot be written."""
    kept = node_dir / NODE_FOLDER / "identity"
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = kept.with_name(new_key())
        mine.write_text(mine.name)
        with contextlib.suppress(FileExistsError):
            os.link(mine, kept)  # atomic: a whole file, or another worker's
        mine.unlink()
        return kept.read_text()
    except OSError:
        return ""  # later uses of the directory report the error


async def check_served_only_here(store: Store, node: str, identity: str) -> None:
    """Check that no other worker serves this node from another directory; wait for one that may be dead.

    Raises:
        UsageError: Another worker does.
    """
    waited = 0.0
    while other := find_worker_elsewhere(await list_members(store), node, identity):
        if waited >= PATIENCE_SECONDS:
            raise UsageError(
                f"The node {node!r} is served from another directory, by {other.worker_id}.",
                remedy="Give this worker another DECKHANDS_NODE, or the same DECKHANDS_NODE_DIR.",
            )
        await asyncio.sleep(HEARTBEAT_SECONDS)
        waited += HEARTBEAT_SECONDS


def find_worker_elsewhere(found: Sequence[ClusterMember], node: str, identity: str) -> ClusterMember | None:
    """Return a live worker that serves the node from a directory with another identity; None if there is none."""
    for member in found:
        theirs = member.about.get("directory", "")
        is_double = member.about.get("node") == node and theirs and identity and theirs != identity
        if member.role == "tool" and is_double and member.left_seconds > 0:
            return member
    return None
