r"""The host's journal: which actions were begun, and their results, by action id.

A file of records, appended and never changed: `boot <id>\n` when a host opens it after a reboot,
`start <action> <fingerprint>\n` before an effect, and `result <action> <bytes>\n<body>\n` after it. The fingerprint
tells an action from another that gets its number when the store has lost the first; older journals have none.

Holds:
    - A result is answered for as long as the file lives; memory holds only where each one stands.
    - A record that a crash cut in half is taken away before the next is appended.
Does not:
    - Sync to disk. The death of a process loses nothing; a power failure may lose the last records, so after a reboot
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
    """The record could not be written; nothing of it remains."""


class Journal:
    """A journal open on a descriptor (read, write, append).

    Args:
        boot_id: names the present boot of the machine.
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
        """How large the file is."""
        return self._size

    @property
    def is_certain(self) -> bool:
        """Whether an action that is not here was certainly never started: false once the machine was rebooted."""
        return len(self._boots) == 1

    @property
    def is_empty(self) -> bool:
        """Whether no action was ever begun."""
        return not self._started

    def has_started(self, action_id: int) -> bool:
        """Whether the action was ever begun."""
        return action_id in self._started

    def fingerprint(self, action_id: int) -> str:
        """Return the fingerprint of an action that was begun; empty if it was not, or is not known."""
        return self._started.get(action_id, "")

    @property
    def newest(self) -> list[object] | None:
        """The action with the highest number that was ever begun, and its fingerprint; None if there is none."""
        action_id = max(self._started, default=None)
        return None if action_id is None else [action_id, self._started[action_id]]

    def record_start(self, action_id: int, fingerprint: str = "") -> None:
        """Note that an effect is about to happen.

        Raises:
            JournalError: it could not be noted, so the effect must not happen.
        """
        self._append(f"start {action_id} {fingerprint}".rstrip().encode() + b"\n")
        self._started[action_id] = fingerprint

    def record_result(self, action_id: int, body: bytes) -> None:
        """Keep the result of an action.

        When the disk is full the result is kept in memory: it is lost only if the host dies too.
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
        """Return what was kept, or None."""
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
        """Read the records and return where the last whole one ends."""
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


def bounded(result: dict[str, object], limit_chars: int) -> dict[str, object]:
    """Cut the text for the model and leave out what cannot be used in part."""
    bounded = dict(result)
    for name in _KEPT_TEXTS:
        text = bounded.get(name)
        if isinstance(text, str) and len(text) > limit_chars:
            half = limit_chars // 2
            bounded[name] = f"{text[:half]}{CUT_NOTICE}{text[-half:]}" if name == "content" else None
    return bounded
