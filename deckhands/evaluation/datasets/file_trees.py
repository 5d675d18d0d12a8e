"""The files of a workspace as a value: read from a directory or another place, packed to be uploaded, compared.

Check programs run in the workspaces of checks, and decide whether tests have passed.

Holds: the same files give the same bytes; links and devices are never followed or kept. A patch is valid for `git
apply`, except that binary files, and files beyond its limit, are listed by name only. Check programs are added last, in
a directory whose agent-written files are ignored, and Python starts them with `-I`, so that the workspace, the
environment and the user's packages cannot influence their imports.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from broker.contract import UploadedSource, WorkspaceSpec
from broker.coordination import check_size, make_content_name
from broker.runtime import UsageError

MAX_FILES = 20_000
MAX_BYTES = 64 * 2**20
MAX_PATCH_CHARS = 200_000
MAX_COMPARED_BYTES = 8 * 2**20
"""A larger file is only named in a patch: a file of nothing but line ends would need gigabytes to compare."""
LEFT_OUT_OF_PATCH = "Binary files "
"""The start of a line in a patch that only names a file."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file."""

    content: bytes
    is_executable: bool = False


Tree = Mapping[str, TreeFile]
"""Files by their paths, relative, with slashes."""


class FileSource(Protocol):
    """A source of files other than a directory of this machine."""

    def read(self) -> dict[str, TreeFile]:
        """Return the files.

        Raises:
            UsageError: they cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Files in memory."""

    tree: Tree

    def read(self) -> dict[str, TreeFile]:
        """Return the files."""
        return dict(self.tree)


def to_tree(files: Mapping[str, str]) -> MemoryFiles:
    """Return text files by their paths."""
    return MemoryFiles({name: TreeFile(text.encode()) for name, text in files.items()})


def read_tree(place: Path | FileSource | None) -> dict[str, TreeFile]:
    """Return the regular files of a directory or another place; None gives no files.

    Raises:
        UsageError: it cannot be read, or has more than 64 MiB or 20,000 files.
    """
    if place is None:
        return {}
    if isinstance(place, Path):
        return _walk(place)
    found = place.read()
    if len(found) > MAX_FILES or sum(len(file.content) for file in found.values()) > MAX_BYTES:
        raise _make_size_error(place)
    return found


def _make_size_error(place: object) -> UsageError:
    place = place if isinstance(place, Path) else "It"
    return UsageError(f"{place} has more than {MAX_BYTES:,} bytes or {MAX_FILES:,} files.")


def require_fit(place: Path | MemoryFiles) -> None:
    """Raise UsageError if files exceed the limits of a workspace, without reading those of a directory."""
    if isinstance(place, MemoryFiles):
        read_tree(place)
        return
    for _ in _iter_regular(place):
        pass


def _walk(directory: Path) -> dict[str, TreeFile]:
    found: dict[str, TreeFile] = {}
    for path, about in _iter_regular(directory):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _make_read_error(path, error) from error
        found[path.relative_to(str(directory)).as_posix()] = TreeFile(content, bool(about.st_mode & stat.S_IXUSR))
    return found


def _iter_regular(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files of a directory, up to the limits of a workspace."""
    size = count = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            try:
                about = path.lstat()
            except OSError as error:
                raise _make_read_error(path, error) from error
            if not stat.S_ISREG(about.st_mode):
                continue
            size, count = size + about.st_size, count + 1
            if size > MAX_BYTES or count > MAX_FILES:
                raise _make_size_error(directory)
            yield path, about


def _make_read_error(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read: {error.strerror}.")


def pack_tree(tree: Tree, *, network: bool = True, image: str = "") -> tuple[WorkspaceSpec, bytes | None]:
    """Return a workspace that starts with these files, in a container of an image if one is named, and the upload.

    Raises:
        UsageError: they are more than can be uploaded.
    """
    empty = WorkspaceSpec(network=network, sandbox="docker" if image else "auto", image=image)
    if not tree:
        return empty, None
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, file in sorted(tree.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(file.content)
            entry.mode = 0o755 if file.is_executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))
    content = raw.getvalue()
    check_size(len(content), "The archive of the files")
    source = UploadedSource(name="workspace.tar.gz", format="tar", parcel=make_content_name(content))
    return empty.model_copy(update={"source": source}), content


def make_patch(before: Tree, after: Tree) -> str:
    """Return the changes between two trees as a Git patch of up to 200,000 characters, with whole files only."""
    sections: list[str] = []
    size = unnamed = 0
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        section = _render_section(name, old, new)
        if size + len(section) > MAX_PATCH_CHARS:
            section = _quote_name(name)
        if size + len(section) > MAX_PATCH_CHARS:
            unnamed += 1
            continue
        size += len(section)
        sections.append(section)
    return "".join(sections) + (f"{LEFT_OUT_OF_PATCH}and {unnamed} more differ\n" if unnamed else "")


def split_left_out(patch: str) -> tuple[str, list[str]]:
    """Return a patch without the files that it only names, and the lines that name them."""
    sections = re.split(r"(?m)^(?=diff --git |Binary files )", patch)
    kept = [section for section in sections if not section.startswith(LEFT_OUT_OF_PATCH)]
    return "".join(kept), [section.strip() for section in sections if section.startswith(LEFT_OUT_OF_PATCH)]


def format_name(name: str) -> str:
    """Return the name of a file as text, with escapes for bytes that are not UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _quote_name(name: str) -> str:
    name = format_name(name)
    return f"{LEFT_OUT_OF_PATCH}a/{name} and b/{name} differ\n"


def _render_section(name: str, old: TreeFile | None, new: TreeFile | None) -> str:
    sizes = [0 if file is None else len(file.content) for file in (old, new)]
    # the 4 bytes are one character
    if max(sizes) > MAX_COMPARED_BYTES or abs(sizes[0] - sizes[1]) > 4 * MAX_PATCH_CHARS:
        return _quote_name(name)
    try:
        contents = ["" if file is None else file.content.decode() for file in (old, new)]
    except UnicodeDecodeError:
        return _quote_name(name)
    if any("\0" in content for content in contents) or re.search(r'[\x00-\x1f"\\\x7f\ud800-\udfff]', name):
        return _quote_name(name)
    lines = [f"diff --git a/{name} b/{name}\n"]
    match old, new:
        case None, TreeFile():
            lines.append(f"new file mode {_render_mode(new)}\n")
        case TreeFile(), None:
            lines.append(f"deleted file mode {_render_mode(old)}\n")
        case TreeFile(), TreeFile() if old.is_executable != new.is_executable:
            lines += [f"old mode {_render_mode(old)}\n", f"new mode {_render_mode(new)}\n"]
    names = ["/dev/null" if file is None else f"{side}/{name}" for side, file in (("a", old), ("b", new))]
    split = [re.findall(r"[^\n]*\n|[^\n]+", content) for content in contents]
    for line in difflib.unified_diff(split[0], split[1], names[0], names[1]):
        lines += [line] if line.endswith("\n") else [line, "\n\\ No newline at end of file\n"]
    return "".join(lines)


def _render_mode(file: TreeFile) -> str:
    return "100755" if file.is_executable else "100644"


FOLDER = ".deckhands_check"
DIRECTORY = Path(__file__).parents[2] / "examples" / "checks"
COMMAND = f"python3 -I {FOLDER}/run.py"
_PARTS = ("guarded.py", "separate.py", "node_tests.js")


@dataclass(frozen=True, slots=True)
class OverlaidFiles:
    """Files with other files added on top, which replace those with the same path."""

    below: Path | FileSource | None
    above: Tree

    def read(self) -> dict[str, TreeFile]:
        """Return the files. Raises the errors of `read_tree`."""
        return {**read_tree(self.below), **self.above}


def program_files(name: str, asked: Mapping[str, Any]) -> dict[str, TreeFile]:
    """Return the files of a program that `COMMAND` runs, with its input."""
    found = {f"{FOLDER}/{part}": TreeFile((DIRECTORY / part).read_bytes()) for part in _PARTS}
    return found | {
        f"{FOLDER}/run.py": TreeFile((DIRECTORY / f"{name}.py").read_bytes()),
        f"{FOLDER}/asked.json": TreeFile(json.dumps(asked).encode()),
    }


def build_test_check(hidden: Path | FileSource | None, files: tuple[str, ...], **asked: Any) -> OverlaidFiles:
    """Return hidden files with the program that runs the tests in some of them."""
    return OverlaidFiles(
        hidden, program_files("named_tests", {"files": files, "isolated": False, "in_process": [], **asked})
    )
