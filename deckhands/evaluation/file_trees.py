"""The files of a workspace as a value: read from a directory, packed to be uploaded, compared.

Holds: the same files give the same bytes; links and devices are never followed or kept.
"""

from __future__ import annotations

import difflib
import gzip
import io
import os
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.contract.events import WorkspaceSpec
from broker.coordination.stored_files import content_name
from broker.runtime.errors import UsageError
from broker.specs.workspace_sources import UploadedSource

MAX_FILES = 20_000
MAX_BYTES = 64 * 2**20
MAX_PATCH_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class File:
    """A regular file."""

    content: bytes
    is_executable: bool = False


Tree = Mapping[str, File]
"""Files by their paths, relative, with slashes."""


def tree_of(directory: Path | None) -> dict[str, File]:
    """Return the regular files of a directory; none of None.

    Raises:
        UsageError: it cannot be read, or has more than 64 MiB or 20,000 files.
    """
    found: dict[str, File] = {}
    size = 0
    for folder, _, names in os.walk(directory) if directory is not None else ():
        for name in names:
            path = Path(folder, name)
            try:
                about = path.lstat()
                if not stat.S_ISREG(about.st_mode):
                    continue
                size += about.st_size
                if size > MAX_BYTES or len(found) >= MAX_FILES:
                    raise UsageError(f"{directory} has more than {MAX_BYTES:,} bytes or {MAX_FILES:,} files.")
                content = path.read_bytes()
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
            found[path.relative_to(str(directory)).as_posix()] = File(content, bool(about.st_mode & stat.S_IXUSR))
    return found


def packed(tree: Tree, *, network: bool = True) -> tuple[WorkspaceSpec, bytes | None]:
    """Return a workspace that begins with these files, and what is uploaded for it."""
    if not tree:
        return WorkspaceSpec(network=network), None
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, file in sorted(tree.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(file.content), 0o755 if file.is_executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))
    content = raw.getvalue()
    source = UploadedSource(name="workspace.tar.gz", format="tar", parcel=content_name(content))
    return WorkspaceSpec(source=source, network=network), content


def patch_between(before: Tree, after: Tree) -> str:
    """Return how to make one tree of the other, for people; files that are no text are only named."""
    lines: list[str] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        try:
            texts = [[] if file is None else file.content.decode().splitlines(keepends=True) for file in (old, new)]
        except UnicodeDecodeError:
            lines.append(f"Binary files a/{name} and b/{name} differ\n")
            continue
        names = ["/dev/null" if file is None else f"{side}/{name}" for side, file in (("a", old), ("b", new))]
        for line in difflib.unified_diff(texts[0], texts[1], names[0], names[1]):
            lines += [line] if line.endswith("\n") else [line, "\n\\ No newline at end of file\n"]
    return "".join(lines)[:MAX_PATCH_CHARS]
