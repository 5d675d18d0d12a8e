"""Binding workspaces to their directories, and opening these: our own, and those that conversations name.

    <root>/.node/naming.lock     held while a workspace is bound to a directory that was named

Holds: every opening looks again at what may be named; a directory that a conversation of one tenant works in, and what
is in it and around it, is bound to none of another tenant, as long as this node keeps the first one's folder.
Does not: keep conversations of one tenant out of each other's directories: delegates and forks share them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.runtime import is_conversation_id
from broker.secrets import Mounts
from tool_worker.errors import WorkspaceLost, WorkspaceRefused
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.binding import Binding
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.node_identity import FOLDER

_Named = tuple[str, str]
"""A directory, and the tenant of who named it."""


class Bindings:
    """The bindings of one node. All calls block.

    Args:
        root: Directory of the node's workspaces.
        named: What may be named.
    """

    def __init__(self, root: Path, named: NamedDirectories) -> None:
        self._root = root.absolute()
        self._named = named
        self._known: dict[str, _Named | None] = {}

    def bind(self, folder: HostFolder, binding: Binding) -> Directory:
        """Bind a workspace, unless it may not be bound so, and return its directory.

        Raises:
            WorkspaceRefused, WorkspaceLost: see `open`; nothing was bound.
        """
        if not binding.is_named(folder.workspace):
            directory = self.open(folder, binding)
            folder.write_binding(binding)
            return directory
        directory = self._open_named(binding)
        try:
            with self._alone():
                self._refuse_another_tenants(folder, binding)
                folder.write_binding(binding)
        except BaseException:
            directory.close()
            raise
        return directory

    def open(self, folder: HostFolder, binding: Binding | None = None) -> Directory:
        """Open the directory of a workspace; without a binding, the one that we created.

        Raises:
            WorkspaceRefused: it may not be a workspace, or not any more.
            WorkspaceLost: it is not there.
        """
        if binding is not None and binding.is_named(folder.workspace):
            return self._open_named(binding)
        try:
            return Directory(folder.workspace)
        except OSError as error:
            raise WorkspaceLost(
                f"The directory {folder.workspace} of the workspace is not there.",
                remedy="Restore it from a checkpoint, or start another conversation.",
            ) from error

    def _open_named(self, binding: Binding) -> Directory:
        return self._named.open(binding.path, self._root)

    def _refuse_another_tenants(self, folder: HostFolder, binding: Binding) -> None:
        mounts = Mounts.now()
        wanted = mounts.location(Path(binding.path))
        others = {used for conversation_id, used in self._found().items() if conversation_id != folder.conversation_id}
        for path, tenant in others:
            if tenant == binding.tenant:
                continue
            used = mounts.location(Path(path))
            if wanted.is_in(used) or used.is_in(wanted):
                raise WorkspaceRefused(
                    f"The directory {binding.path} may not be a workspace: a conversation of another tenant works in "
                    "it, in one inside it, or in one around it.",
                    remedy="Name another directory.",
                )

    def _found(self) -> dict[str, _Named]:
        """Return the conversations of this node that work in a directory that was named."""
        names = set(os.listdir(self._root))  # noqa: PTH208  (names alone)
        for gone in self._known.keys() - names:
            del self._known[gone]
        for name in names - self._known.keys():
            folder = HostFolder(self._root, name)
            binding = folder.read_binding() if is_conversation_id(name) else None
            is_named = binding is not None and binding.is_named(folder.workspace)
            if binding is None or (is_named and binding.tenant is None):
                continue  # it may yet be bound, or get its tenant when it is used
            self._known[name] = (binding.path, binding.tenant or "") if is_named else None
        return {name: known for name, known in self._known.items() if known is not None}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one on this node who binds a workspace to a directory that was named."""
        (self._root / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._root / FOLDER / "naming.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
