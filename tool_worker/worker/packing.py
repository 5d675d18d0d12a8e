"""Packs files of a workspace into a compressed tar file, and unpacks them.

Holds: no path and no link leads out of the workspace, even if programs change files during the transfer. Memory does
not grow with the amount of data. Set-user-id, set-group-id and sticky bits are dropped; the answer lists their files.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, cast

import zstandard

from broker.coordination import MAX_COPY_BYTES, MAX_COPY_FILES, FileEntry, TransferAnswer, TransferRequest
from tool_worker.errors import FileUnfit, WorkspaceTooLarge
from tool_worker.workspace import (
    FILE,
    LINK,
    SPECIAL_BITS,
    Directory,
    TreeEntry,
    TreeLimits,
    Unpacking,
    iter_entries,
    list_entries,
)

TRANSFER_LIMITS = TreeLimits(files=MAX_COPY_FILES, bytes=MAX_COPY_BYTES)
"""Limits of one transfer, uncompressed."""
IN_PARTS = "Transfer a part of it."
MAX_NAMED = 20
MAX_LISTED = 5_000
MAX_NAMED_CHARS = 200


def pack(root: Directory, path: str, target: IO[bytes]) -> TransferAnswer:
    """Write a file or a directory of a workspace as a compressed tar file. All names start with the file's own name.

    Raises:
        FileUnfit: The path is neither a file nor a directory.
        WorkspaceTooLarge: The content exceeds the limits of a transfer.
        OSError: The path does not exist, or leads out of the workspace.
    """
    name = PurePosixPath(path).name or "workspace"
    files = size = 0
    without_bits: list[str] = []
    with (
        zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry_name, entry, descriptor in _iter_entries(root, path, name):
            archive.members = []  # type: ignore[attr-defined]  # a hundred thousand of them would stay in memory
            files += 1
            size += _add_entry(archive, entry_name, entry, descriptor, room=TRANSFER_LIMITS.bytes - size)
            special_bits = entry.special_bits if isinstance(entry, TreeEntry) else entry.st_mode & SPECIAL_BITS
            if special_bits and len(without_bits) < MAX_NAMED:
                without_bits.append(entry_name.encode(errors="replace").decode()[:MAX_NAMED_CHARS])
    return TransferAnswer(files=files, size_bytes=size, without_bits=tuple(without_bits))


def list_directory(root: Directory, path: str) -> TransferAnswer:
    """Return the entries of a workspace directory.

    Raises:
        OSError: The path does not exist, is not a directory, or leads out of the workspace.
    """
    with Directory.open_inside(root, path) as directory:
        return describe_entries([(entry.path, entry.kind, entry.size) for entry in list_entries(directory)])


def describe_entries(found: Sequence[tuple[str, str, int]]) -> TransferAnswer:
    """Return an answer with the first entries of a directory.

    Args:
        found: The name, the kind and the size in bytes of each.
    """
    entries = tuple(
        FileEntry(name=os.fsencode(name).decode(errors="backslashreplace"), kind=kind, size_bytes=size)
        for name, kind, size in found[:MAX_LISTED]
    )
    return TransferAnswer(files=len(found), entries=entries)


def unpack(root: Directory, request: TransferRequest, content: IO[bytes], noted: Path) -> TransferAnswer:
    """Unpack a compressed tar file with one file or directory into the workspace.

    Args:
        noted: File in which the first attempt records whether the content goes into the target directory or becomes the
            target. A retry needs it, because an interrupted attempt may have created the target.

    Raises:
        FileUnfit, WorkspaceTooLarge, OSError: See `Unpacking.unpack_stream`.
    """
    parts = [part for part in request.path.split("/") if part not in ("", ".")]
    is_inside = request.is_inside or not parts or _is_directory(root, "/".join(parts))
    is_inside = _read_or_note_choice(noted, is_inside=is_inside)
    rename = None if is_inside else parts.pop()
    if rename == "..":
        raise FileUnfit(f"{request.path} leads out of the workspace.")
    try:
        with (
            zstandard.ZstdDecompressor().stream_reader(content) as plain,
            Directory.open_inside(root, _make_directories(root, parts)) as directory,
        ):
            done = Unpacking(directory, TRANSFER_LIMITS, rename_first=rename).unpack_stream(plain)
    except zstandard.ZstdError as error:
        raise FileUnfit(f"The upload is damaged: {error}") from error
    return TransferAnswer(files=done.files, size_bytes=done.size_bytes)


def _read_or_note_choice(noted: Path, *, is_inside: bool) -> bool:
    earlier = noted.read_text() if noted.exists() else ""
    if earlier not in ("inside", "instead"):
        noted.write_text("inside" if is_inside else "instead")
        return is_inside
    return earlier == "inside"


def _iter_entries(root: Directory, path: str, name: str) -> Iterator[tuple[str, TreeEntry | os.stat_result, int]]:
    """Yield each entry to pack: its name in the archive, its metadata, and a file's descriptor, else -1."""
    if not _is_directory(root, path):
        with root.open_file(path) as descriptor:
            yield name, os.fstat(descriptor), descriptor
        return
    with Directory.open_inside(root, path) as directory:
        yield name, os.fstat(directory.descriptor), -1
        for entry in iter_entries(directory, TRANSFER_LIMITS):
            if entry.kind != FILE:
                yield f"{name}/{entry.path}", entry, -1
                continue
            with suppress(OSError, FileUnfit), directory.open_file(entry.path, follows_links=False) as descriptor:
                yield f"{name}/{entry.path}", os.fstat(descriptor), descriptor


def _add_entry(
    archive: tarfile.TarFile, name: str, entry: TreeEntry | os.stat_result, descriptor: int, *, room: int
) -> int:
    """Add an entry to a tar file and return the size of its content, at most `room` bytes."""
    header = tarfile.TarInfo(name)
    if isinstance(entry, TreeEntry):
        header.mode, header.mtime = entry.mode, entry.mtime_ns // 10**9
        header.type = tarfile.SYMTYPE if entry.kind == LINK else tarfile.DIRTYPE
        header.linkname = entry.target
    else:
        header.mode, header.mtime = stat.S_IMODE(entry.st_mode) & 0o777, int(entry.st_mtime)
        header.type = tarfile.DIRTYPE if stat.S_ISDIR(entry.st_mode) else tarfile.REGTYPE
    if descriptor < 0:
        archive.addfile(header)
        return 0
    assert isinstance(entry, os.stat_result)
    header.size = entry.st_size
    if header.size > room:  # the file has grown since it was counted, or was requested by itself
        raise WorkspaceTooLarge(f"It has more than {TRANSFER_LIMITS.bytes:,} bytes.", remedy=IN_PARTS)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        archive.addfile(header, cast("IO[bytes]", _PaddedFile(file)))
    return header.size


class _PaddedFile:
    """Reads a file and pads it with zeros to its former size: the tar header with that size is already written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


def _is_directory(root: Directory, path: str) -> bool:
    try:
        descriptor = root.open(path, os.O_PATH)
    except FileNotFoundError:
        return False
    try:
        return stat.S_ISDIR(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _make_directories(root: Directory, parts: list[str]) -> str:
    """Create a directory with its parents and return its path; follows links that stay inside the workspace."""
    for end in range(1, len(parts) + 1):
        if not _is_directory(root, "/".join(parts[:end])):
            with Directory.open_inside(root, "/".join(parts[: end - 1]) or ".") as parent:
                os.mkdir(parts[end - 1], 0o755, dir_fd=parent.descriptor)
    return "/".join(parts) or "."
