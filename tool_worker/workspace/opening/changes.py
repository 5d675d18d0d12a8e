"""The changes in a workspace since its original state, as a patch for `git apply`.

Holds: a patch and its memory use are limited. Files that do not fit are left out, the largest first, and listed; their
content is not stored. No program of the workspace can change the original state.
Does not: compare more than git does: ignored files are left out, and nested repositories are not entered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tool_worker.errors import FileUnfit, SourceUnusable, WorkspaceTooLarge, WorkspaceUnavailable
from tool_worker.sandbox import Enclosure
from tool_worker.workspace.files.file_tree import DIRECTORY, FILE, LINK, is_entry_error, iter_entries, measure
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import create_staging_async
from tool_worker.workspace.opening.confined_program import ProgramResult
from tool_worker.workspace.opening.repositories import SCRATCH_LIMIT, SandboxedGit, find_reason

LIMIT_SECONDS = 90.0
LIST_LIMIT_BYTES = 256 * 2**20
SHARES = (0.7, 0.4)
"""Shares of the patch's limit for the files' contents, tried in order. The second one is safe for binary files."""
ENTRY_BYTES = 512
"""Bytes in a patch for each file, besides its content and its name."""
NO_OBJECT = "0" * 40
DOWNLOAD = (
    "Copy what you need with `deckhands cp ID:PATH .`, or name in a .gitignore what is not to be compared, "
    "and try again."
)

_FIND_ORIGINAL = """
exec git --git-dir="$BASE" rev-parse --verify 'refs/deckhands/base^{tree}'
"""
# Stores nothing: changed files are found by their hashes, new files by name.
_LIST = """
set -e
(unset GIT_DIR GIT_WORK_TREE; git init --quiet --bare --template= repository)
cd "$TREE"
[ -n "$BEGINNING" ] || BEGINNING=$(git hash-object -t tree -w /dev/null)
git read-tree "$BEGINNING^{tree}"
git update-index -q --refresh >/dev/null 2>&1 || true
git diff-files --raw -z --no-renames --ignore-submodules=dirty
printf '\\0'
git ls-files --others --exclude-standard -z
"""
_SIZES = """
set -e
git cat-file --batch-check='%(objectname) %(objectsize)' < "$SCRATCH/objects"
"""
_COMPARE = """
set -e
cd "$TREE"
[ -n "$BEGINNING" ] || BEGINNING=$(git hash-object -t tree -w /dev/null)
storing() { git -c core.looseCompression=0 "$@" 2>/dev/null; }
# It stops at a file that cannot be read, and the other passes over it.
storing update-index --add --remove --replace -z --stdin < "$SCRATCH/chosen" ||
    storing add --all --ignore-errors . || true
git update-index -z --index-info < "$SCRATCH/left-out"
exec git -c core.compression=1 diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color "$BEGINNING"
"""


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes of a workspace.

    Attributes:
        left_out: Changed files that were left out because the patch would be too large.
    """

    content: bytes
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Change:
    path: bytes
    old_mode: str
    old_object: str


class Changes:
    """Compares workspaces with their original state, by git in one sandbox."""

    def __init__(self, repositories: SandboxedGit, *, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._repositories = repositories
        self._limit_seconds = limit_seconds

    async def compare(self, directory: Path, base: Path | None, *, limit_bytes: int) -> Patch:
        """Return the changes since the original state.

        Args:
            base: The original state, as kept by `Repositories.record`; None for an empty one.
            limit_bytes: Maximum size of the patch.

        Raises:
            SourceUnusable: Git fails.
            WorkspaceTooLarge: The workspace is too large to compare.
            WorkspaceUnavailable: Git cannot be started.
        """
        ends = asyncio.get_running_loop().time() + self._limit_seconds
        async with create_staging_async(directory.parent) as scratch:
            try:
                tree = await asyncio.to_thread(_make_readable, directory, scratch)
                return await self._patch(tree, base, scratch, limit_bytes=limit_bytes, ends=ends)
            except (WorkspaceTooLarge, WorkspaceUnavailable) as error:
                is_late = asyncio.get_running_loop().time() >= ends
                if isinstance(error, WorkspaceUnavailable) and not is_late:
                    raise
                files, size = await asyncio.to_thread(measure, directory)
                reason = f"not done within {self._limit_seconds:g} seconds" if is_late else error.message
                raise WorkspaceTooLarge(
                    f"The workspace has {files:,} entries with {size:,} bytes, too many to compare with its "
                    f"original state: {reason.rstrip('.')}.",
                    remedy=DOWNLOAD,
                ) from error

    async def _patch(self, tree: Path, base: Path | None, scratch: Path, *, limit_bytes: int, ends: float) -> Patch:
        enclosure = Enclosure(
            scratch,
            str(scratch),
            read_only=tuple(path for path in (tree, base) if path is not None and path.parent != scratch),
            ends_with_starter=True,
        )
        variables = {
            "SCRATCH": str(scratch),
            "TREE": str(tree),
            "BEGINNING": "" if base is None else "refs/deckhands/base",
            "GIT_DIR": str(scratch / "repository"),
            "GIT_INDEX_FILE": str(scratch / "index"),
            "GIT_WORK_TREE": str(tree),
        }
        if base is not None:
            beginning = await self._run(_FIND_ORIGINAL, enclosure, {"BASE": str(base)}, scratch, ends=ends)
            variables["BEGINNING"] = beginning.output.decode().strip()
            variables["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(base / "objects")
        listed = await self._run(_LIST, enclosure, variables, scratch, ends=ends, limit_bytes=LIST_LIMIT_BYTES)
        changes = list(_parse_changes(listed.output))
        if not changes:
            return Patch(b"")
        objects = {change.old_object for change in changes} - {NO_OBJECT}
        _write(scratch / "objects", "".join(f"{name}\n" for name in sorted(objects)).encode())
        found = await self._run(_SIZES, enclosure, variables, scratch, ends=ends, limit_bytes=LIST_LIMIT_BYTES)
        sizes = await asyncio.to_thread(_estimate_sizes, changes, _parse_object_sizes(found.output), tree)
        for share in SHARES:
            chosen, left_out = _choose_fitting(changes, sizes, int(share * limit_bytes))
            _write(scratch / "chosen", b"".join(change.path + b"\0" for change in chosen))
            _write(scratch / "left-out", b"".join(map(_to_index_line, left_out)))
            try:
                ran = await self._run(_COMPARE, enclosure, variables, scratch, ends=ends, limit_bytes=limit_bytes)
            except WorkspaceTooLarge:
                if share == SHARES[-1] or not chosen:
                    raise
                continue
            return Patch(ran.output, tuple(os.fsdecode(change.path) for change in left_out))
        raise AssertionError("the last try returns or raises")

    async def _run(
        self,
        script: str,
        enclosure: Enclosure,
        environment: Mapping[str, str],
        scratch: Path,
        *,
        ends: float,
        limit_bytes: int = 2**20,
    ) -> ProgramResult:
        ran = await self._repositories.run_script(
            script,
            enclosure,
            environment,
            scratch=scratch,
            output_limit_bytes=limit_bytes,
            limit_seconds=max(0.0, ends - asyncio.get_running_loop().time()),
        )
        if ran.code != 0:
            raise SourceUnusable(f"The changes of the workspace cannot be determined: {find_reason(ran)}")
        return ran


def _parse_changes(listed: bytes) -> Iterator[_Change]:
    """Parse the output of `_LIST`, a list of parts that end in a zero byte.

    For each change: `:old-mode new-mode old-object new-object status`, then its path. Then an empty part, then the
    paths of new files; the path of a nested repository ends in a slash.
    """
    parts = iter(listed.split(b"\0"))
    while about := next(parts, b""):
        old_mode, _, old_object, _, _ = about.decode("ascii").removeprefix(":").split(" ")
        yield _Change(next(parts), old_mode, old_object)
    for path in parts:
        if path:
            yield _Change(path.rstrip(b"/"), "0", NO_OBJECT)


def _parse_object_sizes(found: bytes) -> dict[str, int]:
    """Parse the output of `git cat-file --batch-check`; a missing object belongs to a nested repository."""
    lines = (line.split(" ") for line in found.decode("ascii", "replace").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _estimate_sizes(changes: Iterable[_Change], of_objects: Mapping[str, int], tree: Path) -> dict[bytes, int]:
    """Return the minimum size of each change in a patch: old content, new content, and overhead."""
    sizes: dict[bytes, int] = {}
    with Directory(tree) as directory:
        for change in changes:
            size = of_objects.get(change.old_object, 0) + ENTRY_BYTES + 4 * len(change.path)
            sizes[change.path] = size + _read_file_size(directory, os.fsdecode(change.path))
    return sizes


def _read_file_size(directory: Directory, path: str) -> int:
    """Return the size of a file; 0 if it was removed or is not a regular file."""
    try:
        descriptor = directory.open(path, os.O_PATH | os.O_NOFOLLOW, follows_links=False)
    except OSError as error:
        if not is_entry_error(error):
            raise
        return 0
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _choose_fitting(
    changes: Iterable[_Change], sizes: Mapping[bytes, int], limit_bytes: int
) -> tuple[list[_Change], list[_Change]]:
    """Return the changes that fit into the limit, smallest first, and the others, sorted by path."""
    total = 0
    chosen: list[_Change] = []
    left_out: list[_Change] = []
    for change in sorted(changes, key=lambda change: sizes[change.path]):
        total += sizes[change.path]
        (chosen if total <= limit_bytes else left_out).append(change)
    return chosen, sorted(left_out, key=lambda change: change.path)


def _to_index_line(change: _Change) -> bytes:
    """Return the line of `git update-index --index-info` that restores an entry's original state."""
    mode = "0" if change.old_object == NO_OBJECT else change.old_mode
    return f"{mode} {change.old_object}\t".encode() + change.path + b"\0"


def _write(path: Path, content: bytes) -> None:
    """Write a file where a confined program may have created a link."""
    with suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as file:
        file.write(content)


def _make_readable(directory: Path, scratch: Path) -> Path:
    """Return a directory with the workspace's files that our confined programs can read.

    If we are root, containers run as another user, whose files a confined root cannot read; the directory is then a
    copy.
    """
    if os.geteuid() != 0 or directory.stat().st_uid == 0:
        return directory
    copy = scratch / "tree"
    copy.mkdir(mode=0o700)
    with Directory(directory) as source:
        for entry in iter_entries(source, SCRATCH_LIMIT):
            target = copy / entry.path
            if entry.path == ".git" or entry.path.startswith(".git/"):
                continue  # git would ignore it too
            try:
                if entry.kind == DIRECTORY:
                    target.mkdir(mode=0o700)
                elif entry.kind == LINK:
                    target.symlink_to(entry.target)
                elif entry.kind == FILE:
                    _copy(source, entry.path, target, entry.mode)
            except FileUnfit:
                continue  # no longer a regular file
            except OSError as error:
                if not is_entry_error(error):
                    raise
    return copy


def _copy(source: Directory, path: str, target: Path, mode: int) -> None:
    with source.open_file(path, follows_links=False) as descriptor:
        permissions = 0o700 if mode & 0o100 else 0o600
        created = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, permissions)
        with os.fdopen(created, "wb") as copied, os.fdopen(os.dup(descriptor), "rb") as content:
            shutil.copyfileobj(content, copied, 2**20)
