r"""Earlier versions of edited files, for `undo_edit`, and the file that keeps them when the workspace host ends.

The file holds records, each appended in one write: `push <path bytes> <content bytes> <digest>\n<path><content>` and
`drop <path bytes>\n<path>`. Loading replays the records in order.

Holds: at most `versions_per_file` versions of a file and `limit_bytes` over all files. The oldest are dropped first, so
the rest of a file's history has no gaps. The file is at most twice as large, plus one record.
Does not: fail an edit if the history's file cannot be written. The history is then lost with the host.
"""

from __future__ import annotations

import os
from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Counted for each entry besides its content, so that the number of empty versions is bounded too.
_ENTRY_OVERHEAD_BYTES = 512
_HEADER_LIMIT_BYTES = 128


class FileVersion:
    """The content of a file before an edit, and the digest of its replacement."""

    __slots__ = ("_digest", "content")

    def __init__(self, content: bytes, digest: str) -> None:
        self.content = content
        self._digest = digest

    def was_replaced_by(self, content: bytes) -> bool:
        """Return whether the edit wrote this content."""
        return _digest_of(content) == self._digest


class FileHistory:
    """A bounded stack of contents per path.

    Args:
        versions_per_file: The bound for one path; 10 in OpenHands.
        limit_bytes: The bound for all paths together.
        descriptor: The file that keeps them, open for reading and appending; -1: none.
    """

    def __init__(self, *, versions_per_file: int = 10, limit_bytes: int = 16 * 2**20, descriptor: int = -1) -> None:
        self._versions_per_file = versions_per_file
        self._limit_bytes = limit_bytes
        self._entries: list[tuple[str, bytes, str]] = []  # oldest first
        self._size_bytes = 0
        self._descriptor = descriptor
        self._file_bytes = 0
        if descriptor >= 0:
            try:
                self._load()
            except OSError:
                self._descriptor = -1

    def push(self, path: str, content: bytes, written: bytes) -> None:
        """Add the version of the file that was replaced by `written`; older versions may be dropped."""
        digest = _digest_of(written)
        self._push(path, content, digest)
        self._append(_push_record(path, content, digest))

    def newest(self, path: str) -> FileVersion | None:
        """Return the newest version of the file; None if there is none."""
        index = self._newest_index(path)
        return None if index is None else FileVersion(*self._entries[index][1:])

    def drop_newest(self, path: str) -> None:
        """Drop the newest version of the file, if there is one."""
        index = self._newest_index(path)
        if index is not None:
            self._remove(index)
            name = os.fsencode(path)
            self._append(b"drop %d\n%s" % (len(name), name))

    def _push(self, path: str, content: bytes, digest: str) -> None:
        self._entries.append((path, content, digest))
        self._size_bytes += len(content) + _ENTRY_OVERHEAD_BYTES
        versions = [index for index, entry in enumerate(self._entries) if entry[0] == path]
        if len(versions) > self._versions_per_file:
            self._remove(versions[0])
        while self._size_bytes > self._limit_bytes:
            self._remove(0)

    def _newest_index(self, path: str) -> int | None:
        for index in reversed(range(len(self._entries))):
            if self._entries[index][0] == path:
                return index
        return None

    def _remove(self, index: int) -> None:
        _, content, _ = self._entries.pop(index)
        self._size_bytes -= len(content) + _ENTRY_OVERHEAD_BYTES

    def _append(self, record: bytes) -> None:
        if self._descriptor < 0:
            return
        try:
            if self._file_bytes + len(record) > 2 * self._limit_bytes:
                os.ftruncate(self._descriptor, 0)
                self._file_bytes = 0
                record = b"".join(_push_record(*entry) for entry in self._entries)
            if os.write(self._descriptor, record) < len(record):
                os.ftruncate(self._descriptor, self._file_bytes)
                self._descriptor = -1
            self._file_bytes += len(record)
        except OSError:
            self._descriptor = -1

    def _load(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            while self._replay_record(file.readline(_HEADER_LIMIT_BYTES), file.read):
                self._file_bytes = file.tell()
        os.ftruncate(self._descriptor, self._file_bytes)

    def _replay_record(self, header: bytes, read: Callable[[int], bytes]) -> bool:
        """Replay one record; return False if it is incomplete or not valid."""
        words = header.split()
        sizes = [int(word) for word in words[1:3] if word.isdigit()]
        is_push = words[:1] == [b"push"] and len(words) == 4
        is_drop = words[:1] == [b"drop"] and len(words) == 2
        if not header.endswith(b"\n") or len(sizes) != len(words[1:3]) or not (is_push or is_drop):
            return False
        parts = [read(size) if size <= self._limit_bytes else b"" for size in sizes]
        if any(len(part) != size for part, size in zip(parts, sizes, strict=True)):
            return False
        path = os.fsdecode(parts[0])
        if is_push:
            self._push(path, parts[1], words[3].decode("ascii", "replace"))
        elif (index := self._newest_index(path)) is not None:
            self._remove(index)
        return True


def _digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _push_record(path: str, content: bytes, digest: str) -> bytes:
    name = os.fsencode(path)
    return b"push %d %d %s\n%s%s" % (len(name), len(content), digest.encode(), name, content)
