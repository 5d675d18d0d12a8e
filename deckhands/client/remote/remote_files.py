"""Files in the workspaces of a server's conversations.

`PackedDirectory` is a directory of this machine, packed as the initial archive of a workspace.

Holds: a directory that may not be a workspace is not packed. The archive stays within the limits of servers and tool
workers, and has no owners. The same files give the same archive.
Does not: keep modes and links of an uploaded directory; each of its files is sent separately; follow links, or include
devices, sockets and pipes.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from broker.contract import UploadedSource
from broker.coordination import MAX_COPY_BYTES, MAX_COPY_FILES, MAX_STORED_FILE_BYTES, FileEntry, make_content_name
from broker.runtime import UsageError
from deckhands.client.named_directory import check_directory
from deckhands.client.remote.server_calls import ServerCalls
from deckhands.client.transfers.packed_files import SPECIAL_BITS, unpack
from deckhands.settings import CliSettings

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # as in packed_files
    from backports import tarfile  # type: ignore[no-redef]

LONG_SECONDS = 900.0
TAR = "application/x-tar"


class RemoteFiles:
    """Copies files between this machine and workspaces; see `WorkspaceFiles`."""

    def __init__(self, calls: ServerCalls) -> None:
        self._calls = calls

    async def read(self, conversation_id: str, path: str, *, at: int | None = None) -> bytes:
        """Return the content of a file."""
        content, kind = await self._fetch(conversation_id, path, at)
        if kind == TAR:
            raise UsageError(f"{path} is not a file.", remedy="Name a file, or download the directory.")
        return content

    async def write(self, conversation_id: str, path: str, content: bytes | str) -> None:
        """Write a file, which appears atomically."""
        plain = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        await self._calls.ask("PUT", _path(conversation_id, path), content=plain, read_seconds=LONG_SECONDS)

    async def upload(self, conversation_id: str, source: Path, path: str) -> None:
        """Copy a file or the files of a directory of this machine into a workspace.

        Raises:
            UsageError: the file or directory cannot be read.
        """
        try:
            found = await asyncio.to_thread(_files_in, source)
            for file in found:
                name = path if file == source else f"{path.rstrip('/')}/{file.relative_to(source).as_posix()}"
                await self.write(conversation_id, name, await asyncio.to_thread(file.read_bytes))
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}.", remedy="Name another.") from error

    async def download(self, conversation_id: str, path: str, target: Path, *, at: int | None = None) -> None:
        """Copy a file or a directory of a workspace to this machine.

        Raises:
            UsageError: the target cannot be written.
        """
        content, kind = await self._fetch(conversation_id, path, at)
        try:
            await asyncio.to_thread(_put, content, kind, path, target)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error}.", remedy="Name another target.") from error

    async def list(self, conversation_id: str, path: str = ".", *, at: int | None = None) -> list[FileEntry]:
        """Return the entries of a directory, by name."""
        query = {"path": path} | _at(at)
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/files", query=query)
        return [FileEntry.model_validate(entry) for entry in answer.json()]

    async def checkpoints(self, conversation_id: str) -> Sequence[int]:
        """Return the events with a checkpoint of the files, in order."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/checkpoints")
        found: Sequence[int] = answer.json()
        return found

    async def _fetch(self, conversation_id: str, path: str, at: int | None) -> tuple[bytes, str]:
        place = _path(conversation_id, path)
        answer = await self._calls.ask("GET", place, query=_at(at), read_seconds=LONG_SECONDS)
        return answer.content, answer.headers["content-type"]


def _path(conversation_id: str, path: str) -> str:
    return f"/conversations/{conversation_id}/files/{'' if path == '.' else quote(path)}"


def _at(event: int | None) -> dict[str, str]:
    return {} if event is None else {"at": str(event)}


def _files_in(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    return sorted(file for file in source.rglob("*") if file.is_file() and not file.is_symlink())


def _put(content: bytes, kind: str, path: str, target: Path) -> None:
    if kind == TAR:
        unpack(io.BytesIO(content), target, lambda: None, is_packed=False)
        return
    name = path.rstrip("/").rpartition("/")[2]
    (target / name if target.is_dir() else target).write_bytes(content)


TAKE_LESS = "Name a part of it, a Git bundle (`git bundle create`), or an archive of the needed files."
LEVEL = 6


class PackedDirectory(NamedTuple):
    """An archive, and the name by which a workspace refers to it."""

    source: UploadedSource
    content: bytes


def pack_directory(directory: Path, *, limit_bytes: int = MAX_STORED_FILE_BYTES) -> PackedDirectory | None:
    """Pack the content of a directory; None if there is no such directory.

    Args:
        limit_bytes: the maximum size of the archive.

    Raises:
        UsageError: the directory may not be a workspace, cannot be read, or exceeds the limit when packed, 4 GiB or
            200,000 files.
    """
    if not directory.is_dir():
        return None
    root = directory.resolve()
    check_directory(root, CliSettings.from_env().environment)
    target = _LimitedBuffer(directory, limit_bytes)
    try:
        with (
            gzip.GzipFile(fileobj=target, mode="wb", compresslevel=LEVEL, mtime=0) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(root, arcname=".", filter=_EntryFilter(archive, directory).select)
    except (OSError, tarfile.TarError) as error:
        name = getattr(error, "filename", None) or directory
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{name} cannot be read: {why}.", remedy="Make it readable, or name another.") from error
    content = target.getvalue()
    name = f"{root.name or 'root'}.tar.gz"[-200:]
    return PackedDirectory(UploadedSource(name=name, format="tar", parcel=make_content_name(content)), content)


class _LimitedBuffer(io.BytesIO):
    """A file in memory with a server's size limit."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        super().__init__()
        self._directory = directory
        self._limit_bytes = limit_bytes

    def write(self, part: bytes) -> int:  # type: ignore[override]
        """Write a part; raises UsageError beyond the limit."""
        if self.tell() + len(part) > self._limit_bytes:
            raise UsageError(
                f"{self._directory} has more than {self._limit_bytes:,} bytes when packed.", remedy=TAKE_LESS
            )
        return super().write(part)


class _EntryFilter:
    """Selects the entries of a directory to pack, and limits their number and size."""

    def __init__(self, archive: tarfile.TarFile, directory: Path) -> None:
        self._archive = archive
        self._directory = directory
        self._files = self._bytes = 0

    def select(self, header: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Return an entry in its packed form; None to leave it out."""
        if not (header.isreg() or header.isdir() or header.issym() or header.islnk()):
            return None
        self._archive.members = []  # type: ignore[attr-defined]  # many of them would stay in memory
        self._files += 1
        self._bytes += header.size
        if self._files > MAX_COPY_FILES or self._bytes > MAX_COPY_BYTES:
            raise UsageError(
                f"{self._directory} has more than {MAX_COPY_FILES:,} files or {MAX_COPY_BYTES:,} bytes.",
                remedy=TAKE_LESS,
            )
        header.mode &= ~SPECIAL_BITS
        header.uid = header.gid = 0
        header.uname = header.gname = ""
        header.mtime = int(header.mtime)
        return header
