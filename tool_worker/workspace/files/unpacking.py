"""Unpacks untrusted archives below a directory, while untrusted programs may change the directory.

Holds:
    - Nothing is written outside: names that lead out are refused, and no link is followed, neither one from the archive
      nor one that a program created meanwhile.
    - A file appears atomically: it is written under another name and then renamed.
    - No more is written than the limits allow, and no header makes us read megabytes into memory.
Does not: unpack devices, FIFOs and sockets, or keep owners and set-user-id bits.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import secrets
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

from tool_worker.errors import FileUnfit, WorkspaceTooLarge
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.files.openat2_paths import Directory

CHUNK_BYTES = 2**20
MAX_HEADER_BYTES = 4 * 2**20
MAX_LINK_BYTES = 4096
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


@dataclass(slots=True)
class UnpackResult:
    """The number of written entries of every kind, and the bytes of regular files."""

    files: int = 0
    size_bytes: int = 0


class Unpacking:
    """The unpacking of one archive into a directory.

    Args:
        limits: Limits of the written content.
        rename_first: Replaces the first component of every name. If empty, that component is removed; if None, names
            are kept.
    """

    def __init__(self, directory: Directory, limits: TreeLimits, *, rename_first: str | None = None) -> None:
        self.done = UnpackResult()
        self._directory = directory
        self._limits = limits
        self._rename_first = rename_first

    def unpack(self, content: bytes, form: Literal["tar", "zip"]) -> UnpackResult:
        """Unpack an archive.

        Raises:
            FileUnfit: The archive is damaged, not an archive, or has forbidden entries; a part may have been written.
            WorkspaceTooLarge: The archive exceeds the limits; a part may have been written.
            OSError: An existing entry of the directory is in the way.
        """
        try:
            if form == "zip":
                self._unpack_zip(io.BytesIO(content))
            else:
                opener = next((opener for magic, opener in _COMPRESSED.items() if content.startswith(magic)), None)
                stream: IO[bytes] = opener(io.BytesIO(content)) if opener else io.BytesIO(content)
                self._unpack_tar(cast("IO[bytes]", _LimitedReads(stream)))
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
            raise FileUnfit(f"The archive is damaged: {error}") from error
        except RuntimeError as error:  # raised by zipfile for a password, and for an unknown method
            raise FileUnfit(f"The archive cannot be unpacked: {error}") from error
        return self.done

    def unpack_stream(self, plain: IO[bytes]) -> UnpackResult:
        """Unpack a tar file from a stream that cannot seek. Raises the same errors as `unpack`."""
        try:
            self._unpack_tar(
                cast(
                    "IO[bytes]",
                    _LimitedReads(cast("IO[bytes]", _ForwardStream(plain))),
                )
            )
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise FileUnfit(f"The archive is damaged: {error}") from error
        return self.done

    def _unpack_tar(self, stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # a million of them would stay in memory
                if member.isdir():
                    self._make_directories(self._split_name(member.name))
                elif member.issym():
                    self._write_link(self._split_name(member.name), member.linkname)
                elif member.islnk():
                    self._write_hard_link(self._split_name(member.name), self._split_name(member.linkname))
                elif member.isreg():
                    content = archive.extractfile(member)
                    assert content is not None
                    self._write_file(self._split_name(member.name), content, member.mode)
                else:
                    raise FileUnfit(f"The archive holds {member.name!r}, which is not a file, directory or link.")

    def _unpack_zip(self, file: io.BytesIO) -> None:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                mode = info.external_attr >> 16
                parts = self._split_name(info.filename)
                if info.is_dir():
                    self._make_directories(parts)
                    continue
                with archive.open(info) as content:
                    if stat.S_ISLNK(mode):
                        self._write_link(parts, os.fsdecode(content.read(MAX_LINK_BYTES + 1)))
                    else:
                        self._write_file(parts, content, stat.S_IMODE(mode) or 0o644)

    def _split_name(self, name: str) -> tuple[str, ...]:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name or any(len(os.fsencode(part)) > 255 for part in parts):
            raise FileUnfit(f"The archive holds {name!r}, which leads out of the directory.")
        if self._rename_first is not None:
            parts[:1] = [self._rename_first] if self._rename_first else []
        return tuple(parts)

    def _make_directories(self, parts: tuple[str, ...]) -> None:
        """Create a directory and its parents; existing ones are kept."""
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            try:
                os.close(self._directory.open(path, os.O_PATH | os.O_DIRECTORY, follows_links=False))
            except FileNotFoundError:
                self._count(0, is_entry=True)
                with self._open_parent(parts[:end]) as parent, suppress(FileExistsError):
                    os.mkdir(parts[end - 1], 0o755, dir_fd=parent)

    def _write_file(self, parts: tuple[str, ...], content: IO[bytes], mode: int) -> None:
        with self._create_draft(parts) as (parent, draft), _new_file(parent, draft) as file:
            while chunk := content.read(CHUNK_BYTES):
                self._count(len(chunk))
                file.write(chunk)
            os.fchmod(file.fileno(), mode & 0o777 | 0o600)

    def _write_link(self, parts: tuple[str, ...], target: str) -> None:
        if not 0 < len(os.fsencode(target)) <= MAX_LINK_BYTES or "\0" in target:
            raise FileUnfit(f"The archive holds the link {'/'.join(parts)!r}, which cannot be made.")
        with self._create_draft(parts) as (parent, draft):
            os.symlink(target, draft, dir_fd=parent)

    def _write_hard_link(self, parts: tuple[str, ...], earlier: tuple[str, ...]) -> None:
        with self._open_parent(earlier) as source, self._create_draft(parts) as (parent, draft):
            status = os.stat(earlier[-1], dir_fd=source, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise FileUnfit(f"The archive holds {'/'.join(parts)!r}, a second name of what is not a file.")
            os.link(earlier[-1], draft, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    @contextmanager
    def _create_draft(self, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Yield a directory and a free name in it; the file created there is then renamed to its final name."""
        if not parts:
            raise FileUnfit("The archive holds a file without a name.")
        self._count(0, is_entry=True)
        self._make_directories(parts[:-1])
        with self._open_parent(parts) as parent:
            draft = f".{secrets.token_hex(8)}.part"
            try:
                yield parent, draft
                os.rename(draft, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=parent)
                raise

    @contextmanager
    def _open_parent(self, parts: tuple[str, ...]) -> Iterator[int]:
        path = "/".join(parts[:-1]) or "."
        descriptor = self._directory.open(path, os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _count(self, size: int, *, is_entry: bool = False) -> None:
        self.done.size_bytes += size
        self.done.files += is_entry
        if self.done.size_bytes > self._limits.bytes:
            raise WorkspaceTooLarge(f"The archive holds more than {self._limits.bytes:,} bytes.")
        if self.done.files > self._limits.files:
            raise WorkspaceTooLarge(f"The archive holds more than {self._limits.files:,} files.")


@contextmanager
def _new_file(directory: int, name: str) -> Iterator[IO[bytes]]:
    """Yield a new file that gets its name when it is complete: if this process is killed before, no file remains.

    If the file system has no unnamed files, the file has its name from the start.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        descriptor, is_named = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory), False
    except OSError:
        own = flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor, is_named = os.open(name, own, 0o600, dir_fd=directory), True
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        if not is_named:
            os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=directory)


class _LimitedReads:
    """A file that refuses large reads: a header may claim a size of gigabytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too large")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _ForwardStream:
    """A forward-only stream with a file interface; it can seek back by one byte, which tarfile needs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._position = 0
        self._last = b""
        self._is_back = False

    def read(self, size: int) -> bytes:
        pieces = [self._last] if self._is_back and size else []
        wanted = size - len(pieces)
        while wanted > 0 and (piece := self._stream.read(min(wanted, CHUNK_BYTES))):
            pieces.append(piece)
            wanted -= len(piece)
        found = b"".join(pieces)
        if found:
            self._last, self._is_back = found[-1:], False
        self._position += len(found)
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET
        if offset == self._position - 1 and self._last and not self._is_back:
            self._position = offset
            self._is_back = True
        elif offset < self._position:
            raise tarfile.ReadError("a member starts before the end of the previous one")
        while self._position < offset and self.read(min(CHUNK_BYTES, offset - self._position)):
            pass
        return self._position

    def tell(self) -> int:
        return self._position
