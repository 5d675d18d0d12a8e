"""Spool files of long transfers: files beside the workspace, invisible to its programs, that collect the parts.

    <root>/<conversation>/.transfer-<hash>

Holds: writing a part twice has no further effect. A file is complete only if its length and its SHA-256 match. A file
unused for an hour is removed when the next transfer starts. The node keeps `RESERVE_BYTES` free.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from broker.coordination import MAX_COPY_BYTES, PART_BYTES
from broker.runtime import Clock
from tool_worker.errors import FileUnfit, WorkspaceTooLarge

PREFIX = ".transfer-"
STALE_SECONDS = 3600.0
MAX_SPOOLS = 4
"""Limit of spools per conversation."""
RESERVE_BYTES = 256 * 2**20
"""Bytes that stay free on the node's disk."""


class TransferSpools:
    """The spool files of one node."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock

    def write(self, conversation_id: str, transfer: str, part: int, content: bytes) -> None:
        """Write a part of an upload. Idempotent.

        Raises:
            FileUnfit: The part is longer than `PART_BYTES`.
            WorkspaceTooLarge: The node has no room for it, or there are too many transfers.
        """
        if len(content) > PART_BYTES:
            raise FileUnfit(f"A part of the transfer has more than {PART_BYTES:,} bytes.")
        path = self._path(conversation_id, transfer)
        if not path.exists():
            self._make_room(path.parent)
        self.check_room(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            offset = part * PART_BYTES
            while content:
                written = os.pwrite(descriptor, content, offset)
                offset, content = offset + written, content[written:]
        finally:
            os.close(descriptor)

    @contextmanager
    def whole(self, conversation_id: str, transfer: str, size_bytes: int, digest: str) -> Iterator[BufferedReader]:
        """Open a complete upload.

        Raises:
            FileUnfit: Parts are missing, or the content does not match the digest.
        """
        with self.opened(conversation_id, transfer) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if os.fstat(file.fileno()).st_size != size_bytes or found != digest:
                raise FileUnfit("The upload is not what was sent.", remedy="Start it again.")
            file.seek(0)
            yield file

    @contextmanager
    def packing(self, conversation_id: str, transfer: str) -> Iterator[IO[bytes]]:
        """Yield a file for the content of a download. It gets its final name on success and is removed on failure."""
        path = self._path(conversation_id, transfer)
        self._make_room(path.parent)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with draft.open("w+b") as file:
                yield cast("IO[bytes]", _Bounded(file, lambda: self.check_room(path.parent)))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def read(self, conversation_id: str, transfer: str, part: int) -> bytes:
        """Return a part of a download.

        Raises:
            FileUnfit: The transfer does not exist.
        """
        with self.opened(conversation_id, transfer) as file:
            os.utime(file.fileno())
            file.seek(part * PART_BYTES)
            return file.read(PART_BYTES)

    @contextmanager
    def opened(self, conversation_id: str, transfer: str) -> Iterator[BufferedReader]:
        """Open the spool file of a transfer.

        Raises:
            FileUnfit: The transfer does not exist.
        """
        try:
            file = self._path(conversation_id, transfer).open("rb")
        except FileNotFoundError as error:
            raise FileUnfit("The transfer is not on this node any more.", remedy="Start it again.") from error
        with file:
            yield file

    def drop(self, conversation_id: str, transfer: str) -> None:
        """Remove the spool file of a transfer. Idempotent."""
        self._path(conversation_id, transfer).unlink(missing_ok=True)

    def check_room(self, folder: Path) -> None:
        """Check that the disk has room for more.

        Raises:
            WorkspaceTooLarge: Fewer than `RESERVE_BYTES` are free.
        """
        if shutil.disk_usage(folder).free < RESERVE_BYTES:
            raise WorkspaceTooLarge("The node has no room for the transfer.", remedy="Transfer less, or free some.")

    def _path(self, conversation_id: str, transfer: str) -> Path:
        name = hashlib.sha256(transfer.encode()).hexdigest()[:32]
        return self._root / conversation_id / f"{PREFIX}{name}"

    def _make_room(self, folder: Path) -> None:
        """Remove stale transfers.

        Raises:
            WorkspaceTooLarge: Too many other transfers are in use.
        """
        used = 0
        for path in folder.glob(f"{PREFIX}*"):
            with suppress(FileNotFoundError):
                if self._clock.now().timestamp() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
                else:
                    used += 1
        if used >= MAX_SPOOLS:
            text = f"{used} transfers of this workspace are not finished."
            raise WorkspaceTooLarge(text, remedy="Try again when they are, or in an hour.")


class _Bounded:
    """A file that may grow only while the disk has room."""

    def __init__(self, file: IO[bytes], check: Callable[[], None]) -> None:
        self._file = file
        self._check = check
        self._since = 0

    def write(self, content: bytes) -> int:
        self._since += len(content)
        if self._since >= PART_BYTES:
            self._since = 0
            self._check()
        if self._file.tell() + len(content) > MAX_COPY_BYTES:
            raise WorkspaceTooLarge(f"It has more than {MAX_COPY_BYTES:,} bytes when packed.", remedy="Take a part.")
        return self._file.write(content)
