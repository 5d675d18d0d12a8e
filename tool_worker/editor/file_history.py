"""Earlier versions of edited files, for `undo_edit`.

Holds: at most `versions_per_file` versions of a file and `limit_bytes` over all files; the oldest go first, so that
what is left of a file's history has no gaps.
Does not: survive the workspace host, nor notice edits made by other programs.
"""

from __future__ import annotations

# What an entry costs beside its content, so that versions of empty files are bounded too.
_ENTRY_OVERHEAD_BYTES = 512


class FileHistory:
    """A bounded stack of contents per path.

    Args:
        versions_per_file: The bound for one path; 10 in OpenHands.
        limit_bytes: The bound for all paths together.
    """

    def __init__(self, *, versions_per_file: int = 10, limit_bytes: int = 16 * 2**20) -> None:
        self._versions_per_file = versions_per_file
        self._limit_bytes = limit_bytes
        self._entries: list[tuple[str, bytes]] = []  # oldest first
        self._size_bytes = 0

    def push(self, path: str, content: bytes) -> None:
        """Keep a version of the file; older ones may be dropped for it."""
        self._entries.append((path, content))
        self._size_bytes += len(content) + _ENTRY_OVERHEAD_BYTES
        versions = [index for index, entry in enumerate(self._entries) if entry[0] == path]
        if len(versions) > self._versions_per_file:
            self._remove(versions[0])
        while self._size_bytes > self._limit_bytes:
            self._remove(0)

    def newest(self, path: str) -> bytes | None:
        """Get the newest version of the file; None if there is none."""
        index = self._newest_index(path)
        return None if index is None else self._entries[index][1]

    def drop_newest(self, path: str) -> None:
        """Forget the newest version of the file, if there is one."""
        index = self._newest_index(path)
        if index is not None:
            self._remove(index)

    def _newest_index(self, path: str) -> int | None:
        for index in reversed(range(len(self._entries))):
            if self._entries[index][0] == path:
                return index
        return None

    def _remove(self, index: int) -> None:
        _, content = self._entries.pop(index)
        self._size_bytes -= len(content) + _ENTRY_OVERHEAD_BYTES
