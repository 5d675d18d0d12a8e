"""The folders of a workspace that a run may change, and the files that it changed outside of them.

Files are compared by their status before and after the run: kind and rights, size, inode, time of the last change of
the content (mtime) and of any property (ctime). Folders are compared by kind, rights and inode.

Holds: no link is followed; a file that is created, changed, renamed, replaced or removed outside of the permitted
folders is found, even if its content or its mtime was restored, because no call can set the ctime. Files that cannot be
compared count as changed.
Does not: prevent a change; identify its author; look outside of the workspace, which a sandbox protects.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.runtime import DeckhandsError, UsageError
from deckhands.interop.headless.contract import OTHER_README, README, Contract
from deckhands.interop.headless.inside import Inside, PathDenied, path_inside

ALWAYS = frozenset({README, OTHER_README, "experiments", "logs"})
"""What the contract itself needs."""
MAX_FILES = 100_000
SHOWN_PATHS = 10
DENIED_PATHS = "denied_paths"
"""The field of `summary.json` with the paths that were changed."""

Fingerprints = Mapping[str, tuple[int, ...]]
"""The status of each file and folder, by its path in the workspace."""


class TooManyFiles(UsageError):
    """There are more files outside of the permitted folders than are compared."""


@dataclass(frozen=True, slots=True)
class DeniedChanges:
    """The changes outside of the permitted folders.

    Attributes:
        paths: up to ten of them, sorted, relative to the workspace.
        count: the number of all changed paths.
        fault: why they could not be determined; empty if they could.
    """

    paths: tuple[str, ...] = ()
    count: int = 0
    fault: str = ""

    def __bool__(self) -> bool:
        return bool(self.count or self.fault)

    def __str__(self) -> str:
        """A sentence about them, for a terminal."""
        if self.fault:
            return f"The changes outside of the permitted folders cannot be determined: {self.fault}."
        more = f" and {self.count - len(self.paths):,} more" if self.count > len(self.paths) else ""
        return f"Changed outside of the permitted folders: {', '.join(map(ascii, self.paths))}{more}."


@dataclass(frozen=True, slots=True)
class PermittedFolders:
    """The folders that a run may change.

    Attributes:
        folders: relative to the workspace; empty if the run may change everything.
        max_files: how many files and folders outside of them are compared.
    """

    root: Path
    folders: frozenset[str] = frozenset()
    max_files: int = MAX_FILES

    @classmethod
    def parse(cls, root: Path, texts: Sequence[str]) -> PermittedFolders:
        """Return the folders of these relative paths.

        Raises:
            PathDenied: a path is absolute, has a part `..`, or is the workspace itself.
        """
        for text in texts:
            if text.startswith("/") or ".." in text.split("/"):
                raise PathDenied(
                    f"The permitted folder {ascii(text)[:300]} is not a path below the workspace.",
                    remedy="Name it relative to the workspace, without `..`.",
                )
        return cls(root, frozenset(path_inside(root, text, what="The permitted folder") for text in texts))

    def prepare(self) -> Fingerprints:
        """Create the folders, and return the fingerprints of everything outside of them.

        Raises:
            PathDenied: a part of a folder's path is a link or a file.
            UsageError: there are too many files, or a folder cannot be read.
        """
        for folder in sorted(self.folders):
            Inside(self.root).make(folder)
        try:
            return self._take_fingerprints()
        except (OSError, RecursionError) as error:
            raise UsageError(
                f"The files outside of the permitted folders cannot be listed: {error}.",
                remedy="Make them readable, or permit their folder.",
            ) from error

    def find_changes(self, before: Fingerprints) -> DeniedChanges:
        """Return the changes since `prepare`."""
        try:
            after = self._take_fingerprints()
        except TooManyFiles as error:
            return DeniedChanges(fault=error.message.removesuffix("."))
        except (OSError, RecursionError) as error:
            return DeniedChanges(fault=str(error))
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        shown = (os.fsencode(path).decode("utf-8", "backslashreplace") for path in changed[:SHOWN_PATHS])
        return DeniedChanges(tuple(shown), len(changed))

    def _take_fingerprints(self) -> Fingerprints:
        found: dict[str, tuple[int, ...]] = {}
        if not self.folders:
            return found
        permitted = self.folders | ALWAYS
        # Each folder is opened relative to the one above it, so that none that is swapped for a link leads out.
        for folder, folders, names, descriptor in os.fwalk(self.root, onerror=_raise):
            above = os.path.relpath(folder, self.root)
            for name in (*folders, *names):
                path = name if above == "." else f"{above}/{name}"
                try:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_folder = stat.S_ISDIR(status.st_mode)
                if path in permitted and not stat.S_ISLNK(status.st_mode):
                    if is_folder:
                        folders.remove(name)
                    continue
                if len(found) >= self.max_files:
                    raise TooManyFiles(
                        f"There are more than {self.max_files:,} files outside of the permitted folders.",
                        remedy="Permit the folders that have most of them, or use a workspace with fewer files.",
                    )
                # The times of a folder change with the folders in it that are permitted.
                found[path] = (status.st_mode, status.st_ino) + (
                    () if is_folder else (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                )
        return found


def read_denied_paths(contract: Contract) -> tuple[str, ...]:
    """Return the paths in the summary of a run; none if it cannot be read."""
    try:
        found = json.loads(contract.inside.read(f"{contract.logs}/summary.json") or b"null")
        return tuple(map(str, found[DENIED_PATHS]))[:SHOWN_PATHS]
    except (DeckhandsError, ValueError, RecursionError, TypeError, LookupError):
        return ()


def _raise(error: OSError) -> None:
    raise error
