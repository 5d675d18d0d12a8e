"""Terminal output that has not been reported yet, in bounded memory.

Holds: long output is cut to its head and its tail; plain ASCII is passed on without a look at each character.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tool_worker.host.shell.output_file import OutputFile

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
                one is kept for the next call.
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
