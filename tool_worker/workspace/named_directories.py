"""The directories of a node that conversations may name as their workspaces: those below the roots of its operator.

A conversation's fields come from a producer and are untrusted. The named directory is opened, checked and bound by one
descriptor, so that it cannot be replaced in between.

Holds:
    - A directory is a root or below one; no component of its path is a link.
    - It contains no directory of Deckhands or of the system, and is not inside one.
Does not: separate tenants below a root; see `bindings`.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from broker.secrets import find_fault, find_name_fault
from tool_worker.errors import WorkspaceLost, WorkspaceRefused
from tool_worker.workspace.files.openat2_paths import Directory

ASK_THE_OPERATOR = (
    "Ask the operator of the tool worker to name it, or one around it, by --workspace-root or "
    "DECKHANDS_WORKSPACE_ROOTS; or name none, and get an empty one."
)
NAME_ANOTHER = "Name a directory of your own, such as that of a project."


class NamedDirectories:
    """The directories that conversations may name on one node.

    Args:
        roots: Absolute paths without links; if empty, no directory may be named.
        private: Our own directories, see `broker.secrets.private_directories.find_private_paths`.
    """

    def __init__(self, roots: Iterable[Path] = (), private: Iterable[Path] = ()) -> None:
        self.roots = tuple(roots)
        self._private = tuple(private)

    @property
    def closed(self) -> tuple[Path, ...]:
        """The roots, which agents may write to, and our private directories."""
        return (*self.roots, *self._private)

    def open(self, name: str, *also_private: Path) -> Directory:
        """Open a directory that a conversation names.

        Args:
            also_private: Further private directories.

        Raises:
            WorkspaceRefused: The directory may not be a workspace.
            WorkspaceLost: The directory does not exist.
        """
        if found := find_name_fault(name):
            raise _make_refusal(name, found)
        path = PurePosixPath(name)
        if not path.is_absolute() or ".." in path.parts:
            raise _make_refusal(name, "it is not an absolute path without `..`")
        if not any(path.is_relative_to(root) for root in self.roots):
            roots = f" ({', '.join(map(str, self.roots))})" if self.roots else "; it has none"
            reason = f"it is below none of this node's workspace roots{roots}"
            raise _make_refusal(name, reason, remedy=ASK_THE_OPERATOR)
        directory = _open_directory(str(path))
        try:
            # By the descriptor: if the directory is moved meanwhile, the check follows it.
            place = Path(f"/proc/self/fd/{directory.descriptor}").readlink()
            found = find_fault(place, (*self._private, *also_private))
        except OSError as error:
            found = f"it cannot be examined ({error.strerror})"
        if found:
            directory.close()
            raise _make_refusal(name, found)
        return directory


def make_unwritable_notice(directory: Directory, path: str, *, is_confined: bool) -> str:
    """Return the notice for a directory that the workspace's programs cannot write to, or "" if they can.

    Args:
        is_confined: Whether the programs run as our user, but without root's rights.
    """
    found = os.fstat(directory.descriptor)
    user = os.geteuid()
    may_write = os.access(f"/proc/self/fd/{directory.descriptor}", os.W_OK | os.X_OK)
    if may_write and is_confined and user == 0:
        if found.st_uid == user:
            wanted = 0o300
        elif found.st_gid in os.getgroups():
            wanted = 0o030
        else:
            wanted = 0o003
        may_write = found.st_mode & wanted == wanted
    if may_write:
        return ""
    name = shlex.quote(path)
    remedy = f"chmod -R u+rwX {name}" if found.st_uid == user else f"chown -R {user} {name}"
    return (
        f"[The programs of this workspace cannot write to {_shorten(path)}: it belongs to user {found.st_uid}, and "
        "they "
        f"run as user {user}. Reading works. Tell the person: outside of the workspace, `{remedy}` changes that.]"
    )


def _open_directory(name: str) -> Directory:
    try:
        return Directory.open_without_links(Path(name))
    except FileNotFoundError as error:
        raise WorkspaceLost(
            f"The directory {name} of the workspace does not exist.", remedy="Create it, or start another conversation."
        ) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _make_refusal(name, "a part of its path is a symbolic link", remedy="Name the real path.") from error
        if error.errno == errno.ENOTDIR:
            raise _make_refusal(name, "it is not a directory") from error
        raise _make_refusal(name, f"it cannot be opened ({os.strerror(error.errno or 0)})") from error


def _make_refusal(name: str, reason: str, *, remedy: str = NAME_ANOTHER) -> WorkspaceRefused:
    return WorkspaceRefused(f"The directory {_shorten(name)} may not be a workspace: {reason}.", remedy=remedy)


def _shorten(name: str) -> str:
    """Return a name as one line of limited length."""
    shown = name if not find_name_fault(name) else ascii(name)
    return shown if len(shown) <= 300 else f"{shown[:200]}…"
