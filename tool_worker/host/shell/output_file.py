"""Saves the whole of a long output in a file of the workspace's temporary directory, for the model to search.

Holds: a short output creates no file; the size of each file and of all files together is bounded, and the oldest are
removed first; a write error does not affect the command.
Does not: remove escape sequences, or outlive the temporary directory.
"""

from __future__ import annotations

import os

FOLDER = "command-output"
LONG_OUTPUT_BYTES = 30_000
"""Prompts cut longer outputs, unless their limit is set higher (OpenHands: `max_message_chars`)."""
MAX_FILE_BYTES = 16 * 2**20
MAX_FOLDER_BYTES = 64 * 2**20
_MAX_NAME_DIGITS = 9


class OutputFile:
    """Receives the output of one command after another.

    Args:
        temporary: The directory for temporary files.
    """

    def __init__(self, temporary: str) -> None:
        self._folder = os.path.join(temporary, FOLDER)
        self._buffered = bytearray()
        self._descriptor = -1
        self._path = ""
        self._has_failed = False
        self._size = 0
        self._written = 0

    def add(self, chunk: bytes) -> None:
        """Add output."""
        self._size += len(chunk)
        if self._descriptor >= 0:
            self._write(chunk)
        elif not self._has_failed:
            self._buffered += chunk
            if self._size > LONG_OUTPUT_BYTES:
                self._open()
                self._write(bytes(self._buffered))
                self._buffered.clear()

    def note(self) -> str:
        """Return a note for the model with the path of the current command's output; empty if there is no file."""
        if not self._written or self._has_failed:
            return ""
        what = "The whole output"
        if self._written < self._size:
            what = f"The first {self._written} bytes of the output"
        return f"\n[{what} ({self._size} bytes) is in {self._path}; search it with grep, or view parts of it.]"

    def end(self) -> None:
        """Close the file; the next output belongs to another command."""
        self._buffered.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._path = ""
        self._has_failed = False
        self._size = 0
        self._written = 0

    def _open(self) -> None:
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            number = self._make_room() + 1
            self._path = os.path.join(self._folder, f"{number}.txt")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError:
            self._has_failed = True

    def _make_room(self) -> int:
        """Remove the oldest files until there is room for one more; return the highest number that was in use."""
        numbers = sorted(
            int(stem)
            for stem, dot, ending in (name.partition(".") for name in os.listdir(self._folder))
            if dot and ending == "txt" and stem.isascii() and stem.isdigit() and len(stem) <= _MAX_NAME_DIGITS
        )
        sizes = {number: os.lstat(os.path.join(self._folder, f"{number}.txt")).st_size for number in numbers}
        for number in numbers:
            if sum(sizes.values()) + MAX_FILE_BYTES <= MAX_FOLDER_BYTES:
                break
            os.unlink(os.path.join(self._folder, f"{number}.txt"))
            del sizes[number]
        return numbers[-1] if numbers else 0

    def _write(self, chunk: bytes) -> None:
        room = MAX_FILE_BYTES - self._written
        # A NUL would make search tools treat the file as binary.
        left = memoryview(chunk[:room].replace(b"\0", b" "))
        try:
            while left:
                count = os.write(self._descriptor, left)
                self._written += count
                left = left[count:]
        except OSError:
            return  # the disk is full or the file was removed; the written part stays, and the note gives its size
