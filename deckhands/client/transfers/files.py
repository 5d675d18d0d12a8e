"""Copy files out of a workspace and into it.

Holds: nothing is written outside the target, whatever the workspace contains; links that point outside are skipped and
reported; memory does not grow with the size of the copy.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from broker.coordination import (
    LONG_ANSWER_LIMIT_SECONDS,
    MAX_COPY_BYTES,
    FileEntry,
    TransferFailed,
    TransferRequest,
    Transfers,
)
from broker.runtime import UsageError
from broker.store import Store
from deckhands.client.transfers.packed_files import IncomingParts, OnProgress, OutgoingParts, pack, unpack

DIFF_LIMIT_SECONDS = 240.0
"""A tool worker compares for at most 90 s, one workspace at a time."""
MAX_READ_BYTES = 64 * 2**20
"""The limit of a file that is read into memory."""


@dataclass(frozen=True, slots=True)
class WorkspaceChanges:
    """The changes in a workspace since its start.

    Attributes:
        patch: for `git apply`.
        left_out: names of changed files that did not fit in the patch, at most 1,000, without control characters.
        left_out_count: the number of files that did not fit.
    """

    patch: bytes
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0


def _read_content(file: Path, path: str) -> bytes:
    if not file.is_file() or file.is_symlink():
        raise UsageError(f"{path} is not a file.", remedy="Name a file, or download the directory.")
    if file.stat().st_size > MAX_READ_BYTES:
        raise UsageError(f"{path} has more than {MAX_READ_BYTES:,} bytes.", remedy="Download it.")
    return file.read_bytes()


def _ignore(_names: list[str]) -> None:
    return


class WorkspaceFiles:
    """Copies files between this machine and the workspaces of a store."""

    def __init__(self, store: Store) -> None:
        self._transfers = Transfers(store)

    async def download(
        self,
        conversation_id: str,
        path: str,
        target: Path,
        *,
        on_progress: OnProgress | None = None,
        on_without_bits: Callable[[list[str]], None] = _ignore,
        is_wanted: Callable[[str], bool] | None = None,
        limit_bytes: int = MAX_COPY_BYTES,
        at: int | None = None,
    ) -> tuple[int, int, list[str]]:
        """Copy a file or a directory out of a workspace; the target gets all of it or, if that fails, nothing.

        Args:
            path: relative to the workspace.
            target: an existing directory, or the new name of the file or directory.
            on_progress: called from time to time during a long copy.
            on_without_bits: gets the names of some files whose set-user-id, set-group-id or sticky bit was not copied.
            is_wanted: returns whether to copy the entry with this name in the directory; None: copy all.
            limit_bytes: the maximum size of the copied files; the whole may have at most 4 GiB as well.
            at: an event: copy the files of the last checkpoint at or before it, see `checkpoints`; None: as they are.

        Returns:
            How many entries and bytes were written, and the entries skipped because they point outside the target.

        Raises:
            TooLarge: the copy exceeds `limit_bytes`.
            UsageError: the target cannot be written, or the conversation has no workspace yet.
            TransferFailed: the tool worker failed, or no checkpoint is that old.
        """
        options: dict[str, Any] = {} if is_wanted is None else {"is_wanted": is_wanted}
        written = partial(unpack, limit_bytes=limit_bytes, **options)
        request = TransferRequest(what="download", path=path, at=at)
        answer = await self._transfers.send_request(conversation_id, request, limit_seconds=LONG_ANSWER_LIMIT_SECONDS)
        try:
            if not answer.answer.packed_bytes:
                content = io.BytesIO(answer.content)
                done = await asyncio.to_thread(written, content, target, lambda: None)
            else:
                parts = IncomingParts(self._transfers, conversation_id, answer.answer, on_progress)
                try:
                    done = await asyncio.to_thread(written, cast("IO[bytes]", parts), target, parts.check)
                finally:
                    await parts.end()
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}.", remedy="Name another target.") from error
        if answer.answer.without_bits:
            on_without_bits(list(answer.answer.without_bits))
        return done.files, done.size_bytes, done.skipped

    async def upload(
        self,
        conversation_id: str,
        source: Path,
        path: str,
        *,
        on_progress: OnProgress | None = None,
        on_without_bits: Callable[[list[str]], None] = _ignore,
    ) -> tuple[int, int]:
        """Copy a file or a directory into a workspace, and return how many entries and bytes it has.

        The workspace changes only after everything has arrived; each file then appears atomically.

        Args:
            path: relative to the workspace. If this is an existing directory or ends with `/`, the source is copied
                into it under its own name.
            on_progress: called from time to time during a long copy.
            on_without_bits: gets the names of some files whose set-user-id, set-group-id or sticky bit was not copied.

        Raises:
            UsageError: the source cannot be read or has more than 4 GiB, or the conversation has no workspace yet.
            TransferFailed: the tool worker failed.
        """
        parts = OutgoingParts(self._transfers, conversation_id, on_progress)
        try:
            without_bits = await asyncio.to_thread(pack, source, cast("IO[bytes]", parts))
            answer = await parts.finish(path)
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}.", remedy="Name another.") from error
        finally:
            await parts.end()
        if without_bits:
            on_without_bits(without_bits)
        return answer.files, answer.size_bytes

    async def read(self, conversation_id: str, path: str, *, at: int | None = None) -> bytes:
        """Return the content of a file of up to 64 MiB; raises the errors of `download`.

        Args:
            path: relative to the workspace.
            at: see `download`.
        """
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "file"
            await self.download(conversation_id, path, target, at=at)
            return await asyncio.to_thread(_read_content, target, path)

    async def write(self, conversation_id: str, path: str, content: bytes | str) -> None:
        """Write a file, which appears atomically; raises the errors of `upload`.

        Args:
            path: relative to the workspace; missing directories are created.
            content: a text is written as UTF-8.
        """
        plain = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "file"
            await asyncio.to_thread(source.write_bytes, plain)
            await self.upload(conversation_id, source, path)

    async def list(self, conversation_id: str, path: str = ".", *, at: int | None = None) -> list[FileEntry]:
        """Return the first 5,000 entries of a directory, by name.

        Args:
            path: relative to the workspace.
            at: see `download`.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: there is no directory at the path, the tool worker failed, or no checkpoint is that old.
        """
        answer = await self._transfers.send_request(conversation_id, TransferRequest(what="list", path=path, at=at))
        return [*answer.answer.entries]

    async def diff(self, conversation_id: str) -> bytes:
        """Return the changes in a workspace since its start, as a patch for `git apply`.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: the initial state is not known, or the patch is too large; see `changes`.
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
        """Return the patch of `diff`; if it is too large, as much of it as fits, the smallest files first.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: the initial state is not known, or the workspace is too large to be compared.
        """
        request = TransferRequest(what="diff")
        done = await self._transfers.send_request(conversation_id, request, limit_seconds=DIFF_LIMIT_SECONDS)
        return WorkspaceChanges(done.content, done.answer.left_out, done.answer.left_out_count)

    async def checkpoint(self, conversation_id: str) -> tuple[int, int]:
        """Save a workspace now, and return how many entries and bytes it has. Idempotent.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: its node saves no workspaces, or the workspace is a user's directory or too large.
        """
        answer = (await self._transfers.send_request(conversation_id, TransferRequest(what="checkpoint"))).answer
        return answer.files, answer.size_bytes

    async def checkpoints(self, conversation_id: str) -> Sequence[int]:
        """Return the events of a conversation with a checkpoint of the files as they were then, in order.

        Raises:
            UsageError: the conversation has no workspace yet.
            TransferFailed: its node saves no workspaces.
        """
        answer = await self._transfers.send_request(conversation_id, TransferRequest(what="checkpoints"))
        return answer.answer.events
