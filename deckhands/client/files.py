"""Copying files out of a workspace and into it.

Holds: nothing is written outside the target, whatever the workspace contains; links that point outside are skipped and
reported.
"""

from __future__ import annotations

import asyncio
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import zstandard

from broker.coordination.stored_files import check_size
from broker.coordination.transfers import TransferFailed, TransferRequest, Transfers
from broker.runtime.errors import UsageError
from broker.store.store import Store

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Debian 12's tarfile has no data filter
    from backports import tarfile  # type: ignore[no-redef]

MAX_UNPACKED_BYTES = 512 * 2**20
DIFF_LIMIT_SECONDS = 240.0
"""A tool worker compares for at most 90 s, one workspace at a time."""


@dataclass(frozen=True, slots=True)
class WorkspaceChanges:
    """What was changed in a workspace since its beginning.

    Attributes:
        patch: for `git apply`.
        left_out: names of changed files that did not fit in the patch, at most 1,000, without control characters.
        left_out_count: how many did not.
    """

    patch: bytes
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0


class WorkspaceFiles:
    """Copies files between this machine and the workspaces of a store."""

    def __init__(self, store: Store) -> None:
        self._transfers = Transfers(store)

    async def download(self, conversation_id: str, path: str, target: Path) -> tuple[int, int, list[str]]:
        """Copy a file or a directory out of a workspace.

        Args:
            path: relative to the workspace.
            target: an existing directory, or the new name of the file or directory.

        Returns:
            How many entries and bytes were written, and what was skipped because it points outside the target.

        Raises:
            UsageError: the target cannot be written, or the conversation has no workspace yet.
            TransferFailed: the tool worker failed.
        """
        answer = await self._transfers.ask(conversation_id, TransferRequest(what="download", path=path))
        try:
            return await asyncio.to_thread(_unpack, answer.content, target)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}.", remedy="Name another target.") from error

    async def upload(self, conversation_id: str, source: Path, path: str) -> tuple[int, int]:
        """Copy a file or a directory into a workspace, and return how many entries and bytes it has.

        Args:
            path: relative to the workspace. An existing directory, or a name with a final `/`, gets it under its name.

        Raises:
            UsageError: the source cannot be read or is too large, or the conversation has no workspace yet.
            TransferFailed: the tool worker failed.
        """
        try:
            content = await asyncio.to_thread(_pack, source)
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}.", remedy="Name another.") from error
        request = TransferRequest(what="upload", path=path, is_inside=path.endswith("/"))
        answer = (await self._transfers.ask(conversation_id, request, content)).answer
        return answer.files, answer.size_bytes

    async def diff(self, conversation_id: str) -> bytes:
        """Return what was changed in a workspace since its beginning, as a patch for `git apply`.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: the beginning is not known, or the patch is too large; see `changes`.
        """
        changes = await self.changes(conversation_id)
        if changes.left_out_count:
            failure = TransferFailed(
                f"The patch is too large: {changes.left_out_count:,} changed files do not fit in it.",
                remedy="Use `changes`, which names them, and download those that you need.",
            )
            failure.code = "patch_too_large"
            raise failure
        return changes.patch

    async def changes(self, conversation_id: str) -> WorkspaceChanges:
        """Return what `diff` does; where not all of it fits, as much as does, the smallest files first.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: the beginning is not known, or the workspace is too large to be compared.
        """
        request = TransferRequest(what="diff")
        done = await self._transfers.ask(conversation_id, request, limit_seconds=DIFF_LIMIT_SECONDS)
        return WorkspaceChanges(done.content, done.answer.left_out, done.answer.left_out_count)

    async def checkpoint(self, conversation_id: str) -> tuple[int, int]:
        """Save a workspace now, and return how many entries and bytes it has. Idempotent.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: its node saves no workspaces, the directory is the user's own, or it is too large.
        """
        answer = (await self._transfers.ask(conversation_id, TransferRequest(what="checkpoint"))).answer
        return answer.files, answer.size_bytes


def _pack(source: Path) -> bytes:
    target = io.BytesIO()

    def checked(header: tarfile.TarInfo) -> tarfile.TarInfo | None:
        check_size(target.tell(), f"{source}, packed,")
        header.uid = header.gid = 0
        header.uname = header.gname = ""
        return header if header.isreg() or header.isdir() or header.issym() or header.islnk() else None

    with (
        zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        # A link that is named itself stands for its target.
        archive.add(source.resolve(strict=True), arcname=source.resolve().name or "root", filter=checked)
    check_size(target.tell(), f"{source}, packed,")
    return target.getvalue()


def _unpack(content: bytes, target: Path) -> tuple[int, int, list[str]]:
    files = size = 0
    skipped: list[str] = []
    is_inside = target.is_dir()
    folder = target if is_inside else target.parent
    with (
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            name = member.name
            if not is_inside:
                member.name = "/".join([target.name, *name.split("/")[1:]])
            size += member.size
            if size > MAX_UNPACKED_BYTES:
                raise UsageError(f"It has more than {MAX_UNPACKED_BYTES:,} bytes.", remedy="Take a part of it.")
            try:
                archive.extract(member, folder, filter="data")
            except tarfile.FilterError:
                skipped.append(name)
                continue
            files += 1
    return files, size, skipped
