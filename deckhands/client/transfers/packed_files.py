"""Pack files of this machine into a compressed tar file, and unpack them.

A long transfer is a file object: data written to it is sent in parts, and reading it fetches parts.

Holds: memory does not grow with the size of the copy; nothing is written outside the target, whatever the tar file
contains; the target gets all of it or, if the copy fails, nothing. One part is in memory. The file objects are used in
a thread, while the event loop sends and fetches parts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import zstandard

from broker.coordination import (
    LONG_ANSWER_LIMIT_SECONDS,
    MAX_COPY_BYTES,
    PART_BYTES,
    TransferAnswer,
    TransferFailed,
    TransferRequest,
    Transfers,
)
from broker.runtime import UsageError, new_key

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Debian 12's tarfile has no data filter
    from backports import tarfile  # type: ignore[no-redef]

SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
MAX_NAMED = 20


@dataclass(slots=True)
class UnpackResult:
    """The result of unpacking: entries, bytes of files, and the entries left out as pointing outside the target."""

    files: int = 0
    size_bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def pack(source: Path, target: IO[bytes]) -> list[str]:
    """Write a file or directory as a compressed tar file.

    Returns:
        Some of the files that lost a set-user-id, set-group-id or sticky bit.

    Raises:
        UsageError: the files are too large.
        OSError: a file cannot be read.
    """
    without_bits: list[str] = []
    total = 0

    def checked(header: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        total += header.size
        if total > MAX_COPY_BYTES:
            raise UsageError(f"{source} has more than {MAX_COPY_BYTES:,} bytes.", remedy="Take a part of it.")
        if header.mode & SPECIAL_BITS and len(without_bits) < MAX_NAMED:
            without_bits.append(header.name)
        header.mode &= ~SPECIAL_BITS
        header.uid = header.gid = 0
        header.uname = header.gname = ""
        return header if header.isreg() or header.isdir() or header.issym() or header.islnk() else None

    with (
        zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        # If the named source is itself a link, its target is packed.
        archive.add(source.resolve(strict=True), arcname=source.resolve().name or "root", filter=checked)
    return without_bits


class TooLarge(UsageError):
    """A copy exceeds its caller's limit."""

    code = "too_large"


def _accept_all(_name: str) -> bool:
    return True


def unpack(
    content: IO[bytes],
    target: Path,
    check: Callable[[], None],
    *,
    is_packed: bool = True,
    is_wanted: Callable[[str], bool] = _accept_all,
    limit_bytes: int = MAX_COPY_BYTES,
) -> UnpackResult:
    """Unpack a tar file into an existing directory, or under a new name.

    Args:
        check: called after everything was read; raises if the data differs from the sent data.
        is_packed: whether the file is compressed, by zstandard.
        is_wanted: returns whether to write the entry with this name in the copied directory; others count in no limit.

    Raises:
        TooLarge: the files exceed `limit_bytes`.
        UsageError: the tar file is incomplete or invalid, or blocked by an existing file in the target.
        OSError: the target cannot be written.
    """
    is_inside = target.is_dir()
    folder = target if is_inside else target.parent
    draft = Path(tempfile.mkdtemp(prefix=".deckhands-", dir=folder))
    try:
        with zstandard.ZstdDecompressor().stream_reader(content) if is_packed else nullcontext(content) as stream:
            done = _extract(stream, draft, "" if is_inside else target.name, is_wanted, limit_bytes)
        check()
        for made in sorted(draft.iterdir()):
            _move(made, folder / made.name)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise UsageError("The received data is not a whole tar file.", remedy="Copy it again.") from error
    else:
        return done
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(
    stream: IO[bytes], draft: Path, name: str, is_wanted: Callable[[str], bool], limit_bytes: int
) -> UnpackResult:
    """Write one file or directory under a name, or under its own name if empty."""
    done, top = UnpackResult(), ""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            original = member.name
            archive.members = []  # type: ignore[attr-defined]  # a hundred thousand of them would stay in memory
            first, *inner = original.split("/")
            if inner and not is_wanted("/".join(inner)):
                continue
            done.size_bytes += member.size
            if done.size_bytes > limit_bytes:
                raise TooLarge(f"It has more than {limit_bytes:,} bytes.", remedy="Take a part of it.")
            top = top or first
            is_one = first == top not in ("", ".", "..") and ".." not in inner
            place = draft / (name or top)
            try:
                if not is_one or (member.islnk() and not _is_below(top, member.linkname)):
                    raise tarfile.OutsideDestinationError(member, original)
                if inner:
                    member.name = "/".join(inner)
                    member.linkname = member.linkname.removeprefix(f"{top}/") if member.islnk() else member.linkname
                    archive.extract(member, place, filter="data")
                else:
                    member.name = place.name
                    archive.extract(member, draft, filter="data")
            except (tarfile.FilterError, KeyError):  # outside; or a hard link to an entry that was left out
                done.skipped.append(original)
                continue
            done.files += 1
    while stream.read(2**20):
        pass
    return done


def _is_below(top: str, path: str) -> bool:
    return path.startswith(f"{top}/") and ".." not in path.split("/")


def _move(made: Path, place: Path) -> None:
    """Move an entry to its place: rename it if the place is free, merge it into a directory, or replace a file."""
    if not made.is_dir() or made.is_symlink() or not os.path.lexists(place):
        if place.is_dir() and not place.is_symlink():
            raise UsageError(f"{place} is a directory.", remedy="Name another target.")
        made.replace(place)
        return
    if place.is_symlink() or not place.is_dir():
        raise UsageError(f"{place} is not a directory.", remedy="Name another target.")
    for inner in sorted(made.iterdir()):
        _move(inner, place / inner.name)


T = TypeVar("T")
END_LIMIT_SECONDS = 10.0
OnProgress = Callable[[int, int | None], None]
"""Called with the number of transferred bytes, packed, and the total if it is known."""


class _Parts:
    """The connection from a thread to the event loop."""

    def __init__(self, transfers: Transfers, conversation_id: str, on_progress: OnProgress | None) -> None:
        self._is_stopped = False
        self._turn = asyncio.Lock()
        self._transfers = transfers
        self._conversation_id = conversation_id
        self._on_progress = on_progress or (lambda _done, _all: None)
        self._loop = asyncio.get_running_loop()
        self._digest = hashlib.sha256()
        self._count = 0

    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_stopped:
            work.close()
            raise TransferFailed("The copy was stopped.")
        return asyncio.run_coroutine_threadsafe(self._run_in_turn(work), self._loop).result()

    async def _run_in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        async with self._turn:
            if self._is_stopped:
                work.close()
                raise TransferFailed("The copy was stopped.")
            return await work

    async def _forget(self, transfer: str) -> None:
        """Stop the thread, and have the node forget the transfer; ignores the node's errors."""
        self._is_stopped = True
        async with self._turn:  # a part in transit would arrive after it
            with suppress(TransferFailed):
                request = TransferRequest(what="end", transfer=transfer)
                await self._transfers.send_request(self._conversation_id, request, limit_seconds=END_LIMIT_SECONDS)


class OutgoingParts(_Parts):
    """An upload, as a file that is written."""

    def __init__(self, transfers: Transfers, conversation_id: str, on_progress: OnProgress | None = None) -> None:
        super().__init__(transfers, conversation_id, on_progress)
        self._transfer = new_key()
        self._has_begun = False
        self._buffer = bytearray()
        self._size = 0

    def write(self, content: bytes) -> int:
        """Take the next bytes; send each part once it is full."""
        self._buffer += content
        while len(self._buffer) > PART_BYTES:
            self._run_in_loop(self._send())
        return len(content)

    def flush(self) -> None:
        """Do nothing: an incomplete part is kept until `finish`."""

    async def finish(self, path: str) -> TransferAnswer:
        """Send the last part, and have everything put into the workspace.

        Raises:
            TransferFailed: the tool worker failed.
        """
        is_inside = path.endswith("/")
        if not self._count:
            request = TransferRequest(what="upload", path=path, is_inside=is_inside)
            content = bytes(self._buffer)
        else:
            await self._send()
            request = TransferRequest(
                what="upload",
                path=path,
                is_inside=is_inside,
                transfer=self._transfer,
                size_bytes=self._size,
                digest=self._digest.hexdigest(),
            )
            content = b""
        ask, limit = self._transfers.send_request, LONG_ANSWER_LIMIT_SECONDS
        return (await ask(self._conversation_id, request, content, limit_seconds=limit)).answer

    async def end(self) -> None:
        """Have the node forget the transfer, if it has parts of it. Idempotent."""
        if self._has_begun:
            await self._forget(self._transfer)
        self._is_stopped = True

    async def _send(self) -> None:
        part = bytes(self._buffer[:PART_BYTES])
        if self._size + len(part) > MAX_COPY_BYTES:
            raise UsageError(f"It has more than {MAX_COPY_BYTES:,} bytes when packed.", remedy="Take a part of it.")
        self._has_begun = True
        request = TransferRequest(what="upload_part", transfer=self._transfer, part=self._count)
        await self._transfers.send_request(self._conversation_id, request, part)
        del self._buffer[:PART_BYTES]
        self._digest.update(part)
        self._size += len(part)
        self._count += 1
        self._on_progress(self._size, None)


class IncomingParts(_Parts):
    """A download, as a file that is read."""

    def __init__(
        self,
        transfers: Transfers,
        conversation_id: str,
        answer: TransferAnswer,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(transfers, conversation_id, on_progress)
        self._answer = answer
        self._rest = b""
        self._size = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most this many; fetches a part if none are left."""
        if not self._rest and self._size < self._answer.packed_bytes:
            self._rest = self._run_in_loop(self._fetch())
        end = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:end], self._rest[end:]
        return found

    def check(self) -> None:
        """Check that everything has arrived.

        Raises:
            TransferFailed: data is missing or differs from the sent data.
        """
        while self.read(PART_BYTES):
            pass
        if self._digest.hexdigest() != self._answer.digest:
            raise TransferFailed("The received data differs from the sent data.", remedy="Copy it again.")

    async def end(self) -> None:
        """Have the node forget the transfer. Idempotent."""
        await self._forget(self._answer.transfer)

    async def _fetch(self) -> bytes:
        request = TransferRequest(what="download_part", transfer=self._answer.transfer, part=self._count)
        content = (await self._transfers.send_request(self._conversation_id, request)).content
        if not content:
            raise TransferFailed("A part of the download is missing.", remedy="Copy it again.")
        self._digest.update(content)
        self._size += len(content)
        self._count += 1
        self._on_progress(self._size, self._answer.packed_bytes)
        return content
