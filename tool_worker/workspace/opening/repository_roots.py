"""The repositories of a tool worker's own machine that may be cloned: those below the directories set by its operator.

Holds: a path leads below such a directory without any link, as the kernel resolves it. Nothing below the node's own
directory is given out. For a path that may not be cloned, the answer does not reveal whether it exists.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from tool_worker.errors import SourceUnusable
from tool_worker.workspace.files.openat2_paths import Directory

_REMEDY = (
    "Let the operator name a directory above it in DECKHANDS_REPOSITORY_ROOTS, or upload it as a `git bundle` "
    "(`-w FILE.bundle`)."
)


@dataclass(frozen=True, slots=True)
class RepositoryRoots:
    """The directories below which repositories may be cloned; if empty, no local repository may be cloned."""

    directories: tuple[Path, ...] = ()

    def find_repository(self, url: str, *, node_dir: Path) -> Path:
        """Return the path of the repository, or of the bundle, of a `file://` address. Blocks for some system calls.

        Args:
            node_dir: Directory of this node's workspaces.

        Raises:
            SourceUnusable: It may not be cloned, or does not exist.
        """
        parts = urlsplit(url)
        path = Path(parts.path)
        if parts.netloc or parts.query or parts.fragment or ".." in path.parts:
            raise SourceUnusable(
                f"{url} is not the address of a repository on this machine.",
                remedy="Write git+file:///PATH#BRANCH, without a host and without `..`.",
            )
        for root in self.directories:
            for spelling in dict.fromkeys((root, root.resolve())):
                if path.is_relative_to(spelling):
                    return _below(spelling.resolve(), path.relative_to(spelling), url, node_dir.resolve())
        raise SourceUnusable(f"{url} cannot be cloned: this node clones no repository from there.", remedy=_REMEDY)


def to_git_address(path: Path) -> str:
    """Return a git address that means exactly this path: git decodes `%`-escapes itself."""
    return f"file://{quote(str(path))}"


def _below(root: Path, path: Path, url: str, node_dir: Path) -> Path:
    try:
        with Directory(root) as directory:
            descriptor = directory.open(str(path), os.O_PATH, follows_links=False)
    except OSError as error:
        raise SourceUnusable(
            f"{url} cannot be cloned: {error.strerror}.",
            remedy="Check the path; links in it are not followed.",
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)
    found = root / path
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise SourceUnusable(
            f"{url} cannot be cloned: it is neither a directory nor a bundle.", remedy="Name a repository."
        )
    if found.is_relative_to(node_dir) or node_dir.is_relative_to(found):
        raise SourceUnusable(f"{url} cannot be cloned: the workspaces of this node are there.", remedy=_REMEDY)
    return found
