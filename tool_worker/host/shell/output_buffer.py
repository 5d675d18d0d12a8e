"""Terminal output that has not been reported yet, in bounded memory.

The whole of a long output is saved in a file of the workspace's temporary directory, for the model to search.

Holds: long output is cut to its head and its tail; plain ASCII passes without an inspection of each character. A short
output creates no file; the size of each file and of all files together is bounded, and the oldest are removed first; a
write error does not affect the command.
Does not: remove escape sequences, or outlive the temporary directory.
"""

from __future__ import annotations

import os

CUT_NOTICE = "\n[... Observation truncated due to length ...]\n"

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"


class OutputBuffer:
    """Unreported output: its head, its tail, and the number of omitted bytes between them.

    Args:
        file: Also receives all output.
    """

    def __init__(self, limit_bytes: int, file: OutputFile | None = None) -> None:
        self._file = file
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._omitted = 0

    def add(self, chunk: bytes) -> None:
        """Add output."""
        if self._file is not None:
            self._file.add(chunk)
        self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) >= 2 * self._half:
            self._drop_excess()

    def take(self, *, is_final: bool) -> tuple[str, int]:
        """Return the text since the last call, and the number of bytes omitted from its middle.

        Args:
            is_final: Whether no more output can complete the last character or escape sequence. If False, an incomplete
                character or sequence is kept for the next call.
        """
        self._drop_excess()
        head = bytes(self._head)
        tail = bytes(self._tail)
        omitted = self._omitted
        self._head.clear()
        self._tail.clear()
        self._omitted = 0
        last = tail if omitted else head + tail
        if _is_plain(head) and _is_plain(last):
            text = last.decode("ascii")
            return (head.decode("ascii") + CUT_NOTICE + text if omitted else text), omitted
        from tool_worker.host.shell.terminal_text import find_unfinished, plain_text, without_broken_start

        end = len(last) if is_final else find_unfinished(last)
        self._keep(last[end:])
        if not omitted:
            return plain_text(last[:end]), 0
        return plain_text(head) + CUT_NOTICE + plain_text(without_broken_start(last[:end])), omitted

    def _drop_excess(self) -> None:
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self._omitted += excess


def _is_plain(raw: bytes) -> bool:
    return not raw.translate(None, _PLAIN)


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
