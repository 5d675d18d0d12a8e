"""The ids of an archive, newest first, for a search that continues at any of them.

A listing of a million files takes seconds, so a thread makes it, and it is kept for the searches that continue.

Holds: one listing at a time, in at most half of the time; nobody waits for it longer than asked. A position reveals the
time at which a file was written, and not its id.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from broker.runtime import SYSTEM_CLOCK
from deckhands.client.archive.storage import ArchiveStorage

KEPT_SECONDS = 600.0
"""How long a listing is used for searches that continue."""
LATEST_SECONDS = 9e9
"""The year 2255: the limit of a time that a place reports."""
POSITION_BYTES = 16
"""The length of a position: the negated time of the write in nanoseconds, then the start of a hash of the id."""


@dataclass(frozen=True, slots=True)
class ArchiveIndex:
    """The files of an archive at one time.

    Attributes:
        entries: position and id of each file, newest first. A file takes about 85 bytes.
        started: when the listing was started, in Unix seconds.
        seconds: how long it took.
    """

    entries: Sequence[bytes]
    started: float
    seconds: float

    def find_after(self, position: bytes, count: int) -> list[tuple[bytes, str]]:
        """Return the positions and ids of up to `count` files after a position; empty for the first ones."""
        # No id has the byte 0xff, so this is behind the entry of the position itself.
        start = bisect_right(self.entries, position + b"\xff") if position else 0
        return [_split(entry) for entry in self.entries[start : start + count]]

    def find_at(self, position: bytes) -> tuple[bytes, str] | None:
        """Return the file at a position; None if it is gone."""
        start = bisect_right(self.entries, position)
        found = self.entries[start] if start < len(self.entries) else b""
        return _split(found) if found.startswith(position) else None


class ArchiveListing:
    """Makes and keeps the index of an archive."""

    def __init__(self, storage: ArchiveStorage) -> None:
        self._storage = storage
        self._index: ArchiveIndex | None = None
        self._making: asyncio.Task[ArchiveIndex] | None = None
        self._is_closed = threading.Event()

    async def load(self, *, since: float, limit_seconds: float) -> ArchiveIndex | None:
        """Return an index that has all files written before `since`; None if there is none after `limit_seconds`.

        It is made in the meantime.

        Args:
            since: a time in Unix seconds; one that lies ahead counts as now.

        Raises:
            ArchiveUnavailable: the archive cannot be used.
        """
        deadline = SYSTEM_CLOCK.monotonic() + limit_seconds
        since = min(since, SYSTEM_CLOCK.now().timestamp())
        while True:
            index = self._index
            if index is not None and since <= index.started >= SYSTEM_CLOCK.now().timestamp() - KEPT_SECONDS:
                return index
            if self._making is None:
                self._making = asyncio.create_task(asyncio.to_thread(self._make, index))
            making = self._making
            await asyncio.wait({making}, timeout=max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
            if not making.done():
                return None
            if self._making is making:
                self._making = None
                self._index = making.result()

    def close(self) -> None:
        """End the current listing. Idempotent."""
        self._is_closed.set()

    def _make(self, last: ArchiveIndex | None) -> ArchiveIndex:
        if last is not None:
            self._is_closed.wait(max(0.0, last.started + 2 * last.seconds - SYSTEM_CLOCK.now().timestamp()))
        started = SYSTEM_CLOCK.now().timestamp()
        entries: list[bytes] = []
        for folder in self._storage.list_folders():
            entries += make_entries(folder)
            if self._is_closed.is_set():
                break
        entries.sort()
        return ArchiveIndex(entries, started, SYSTEM_CLOCK.now().timestamp() - started)


def make_entries(files: Iterable[tuple[float, str]]) -> list[bytes]:
    """Return the entries of files, given by the time of their write in seconds and their id."""
    return [
        (2**63 - int(min(max(written, 0.0), LATEST_SECONDS) * 1e9)).to_bytes(8, "big")
        + sha256(name.encode()).digest()[:8]
        + name.encode()
        for written, name in files
    ]


def read_time(position: bytes) -> float:
    """Return the time of the write of the file at a position, in seconds."""
    return (2**63 - int.from_bytes(position[:8], "big")) / 1e9


def _split(entry: bytes) -> tuple[bytes, str]:
    return entry[:POSITION_BYTES], entry[POSITION_BYTES:].decode()
