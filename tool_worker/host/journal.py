r"""The host's journal: the started actions and their results, by action id.

An append-only file of records: `boot <id>\n` when a host opens it after a reboot, `start <action> <fingerprint>\n`
before an effect, and `result <action> <bytes>\n<body>\n` after it. The fingerprint distinguishes two actions with the
same number: the store may lose an action and assign its number again. Older journals have no fingerprints.

Holds:
    - A result stays available as long as the file exists; memory holds only the offset of each result.
    - A record that a crash cut in half is removed before the next one is appended.
Does not:
    - Sync to disk. The death of a process loses nothing. A power failure may lose the last records, so after a reboot
      the absence of an action proves nothing (`is_certain`).
    - Lock: the tool worker that starts the host makes sure that there is only one.
"""

from __future__ import annotations

import os

from tool_worker.host.shell.output_buffer import CUT_NOTICE

LONG_TEXT_CHARS = 2**20
SHORT_TEXT_CHARS = 2048

_WORDS = {b"boot": (2,), b"start": (2, 3), b"result": (3,)}
_KEPT_TEXTS = ("content", "diff", "old_content", "new_content")


class JournalError(Exception):
    """A record could not be written; the journal contains no part of it."""


class Journal:
    """A journal on an open descriptor (read, write, append).

    Args:
        boot_id: The kernel's id of the current boot.
    """

    def __init__(self, fd: int, boot_id: str) -> None:
        self._fd = fd
        self._results: dict[int, tuple[int, int]] = {}
        self._started: dict[int, str] = {}
        self._unwritten: dict[int, bytes] = {}
        self._boots: list[str] = []
        self._size = self._load()
        if os.fstat(fd).st_size > self._size:
            os.ftruncate(fd, self._size)
        if boot_id not in self._boots[-1:]:
            self._append(f"boot {boot_id}\n".encode())
            self._boots.append(boot_id)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._size

    @property
    def is_certain(self) -> bool:
        """Whether an action without a record was certainly never started; False after a reboot of the machine."""
        return len(self._boots) == 1

    @property
    def is_empty(self) -> bool:
        """Whether no action was ever started."""
        return not self._started

    def has_started(self, action_id: int) -> bool:
        """Return whether the action was ever started."""
        return action_id in self._started

    def fingerprint(self, action_id: int) -> str:
        """Return the fingerprint of a started action; empty if the action or its fingerprint is not known."""
        return self._started.get(action_id, "")

    @property
    def newest(self) -> list[object] | None:
        """The highest action id that was ever started, and its fingerprint; None if there is none."""
        action_id = max(self._started, default=None)
        return None if action_id is None else [action_id, self._started[action_id]]

    def record_start(self, action_id: int, fingerprint: str = "") -> None:
        """Record that an effect is about to happen.

        Raises:
            JournalError: the record could not be written, so the effect must not happen.
        """
        self._append(f"start {action_id} {fingerprint}".rstrip().encode() + b"\n")
        self._started[action_id] = fingerprint

    def record_result(self, action_id: int, body: bytes) -> None:
        """Record the result of an action.

        If the disk is full, the result is kept in memory and is lost only if the host dies as well.
        """
        header = f"result {action_id} {len(body)}\n".encode()
        offset = self._size + len(header)
        self._started.setdefault(action_id, "")
        try:
            self._append(header + body + b"\n")
        except JournalError:
            self._unwritten[action_id] = body
        else:
            self._results[action_id] = (offset, len(body))

    def result(self, action_id: int) -> bytes | None:
        """Return the recorded result, or None."""
        if action_id in self._unwritten:
            return self._unwritten[action_id]
        if action_id not in self._results:
            return None
        offset, length = self._results[action_id]
        return os.pread(self._fd, length, offset)

    def _append(self, record: bytes) -> None:
        try:
            written = os.write(self._fd, record)
        except OSError as error:
            raise JournalError(str(error)) from error
        if written < len(record):
            os.ftruncate(self._fd, self._size)
            raise JournalError("the disk is full")
        self._size += written

    def _load(self) -> int:
        """Read the records; return the offset at which the last complete one ends."""
        end = 0
        size = os.fstat(self._fd).st_size
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            while True:
                header = file.readline(256)
                words = header.split()
                if not header.endswith(b"\n") or len(words) not in _WORDS.get(words[0] if words else b"", ()):
                    return end
                if words[0] == b"boot":
                    self._boots.append(words[1].decode("ascii", "replace"))
                elif not all(word.isdigit() for word in (words[1:] if words[0] == b"result" else words[1:2])):
                    return end
                else:
                    action_id = int(words[1])
                    if words[0] == b"result":
                        offset, length = file.tell(), int(words[2])
                        if offset + length >= size:
                            return end
                        file.seek(length, os.SEEK_CUR)
                        if file.read(1) != b"\n":
                            return end
                        self._results[action_id] = (offset, length)
                        self._started.setdefault(action_id, "")
                    else:
                        self._started[action_id] = words[2].decode("ascii", "replace") if len(words) > 2 else ""
                end = file.tell()


def truncate_result(result: dict[str, object], limit_chars: int) -> dict[str, object]:
    """Truncate the model's text (`content`) to `limit_chars`, and drop other long texts."""
    bounded = dict(result)
    for name in _KEPT_TEXTS:
        text = bounded.get(name)
        if isinstance(text, str) and len(text) > limit_chars:
            half = limit_chars // 2
            bounded[name] = f"{text[:half]}{CUT_NOTICE}{text[-half:]}" if name == "content" else None
    return bounded
