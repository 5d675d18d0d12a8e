r"""The text of a file, and the properties needed to write it back in the file's own format.

A model sees and edits text whose lines end in `\n`. The file may be UTF-8 or UTF-16 with or without a byte order mark,
or have a legacy encoding, see `encoding_guess`. Its lines may end in `\n`, `\r\n`, `\r`, or a mixture.

Holds: `decode(content).encode(text)` equals `content` if the text was not changed, and otherwise differs from it only
in the changed lines. The cost of a diff is linear in the size of the texts; a diff applied to the old text with `patch`
gives the new one.
Does not: know every encoding. Text in an unknown encoding is read as Windows-1252 or Latin-1 and shows wrong letters,
but its bytes survive every edit. It does not find the smallest diff. One edit changes one range of lines, so the change
is everything between the common head and the common tail. `difflib` would take minutes for some texts of 10 MB, and its
import takes longer than the whole start of the workspace host.
"""

from __future__ import annotations

import codecs
import io

_CONTEXT_LINES = 3


def split_lines(text: str) -> list[str]:
    r"""Split at `\n` alone; every line but the last keeps its `\n`, and an empty text has no lines."""
    return io.StringIO(text).readlines()


def count_equal_ends(old: list[str], new: list[str]) -> tuple[int, int]:
    """Count the equal items at the start and, among the rest, at the end of two lists."""
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return head, tail


def render_unified_diff(old: str, new: str, path: str) -> str:
    r"""Return the change from `old` to `new` as a unified diff with one hunk.

    Args:
        old: The text before, with `\n` as line break; "" for a file that did not exist.
        new: The text after.
        path: The name in both header lines.

    Returns:
        The diff, or "" if the texts are equal.
    """
    if old == new:
        return ""
    old_lines, new_lines = split_lines(old), split_lines(new)
    head, tail = count_equal_ends(old_lines, new_lines)
    start = max(0, head - _CONTEXT_LINES)
    old_change_end = len(old_lines) - tail
    new_change_end = len(new_lines) - tail
    old_end = min(len(old_lines), old_change_end + _CONTEXT_LINES)
    new_end = new_change_end + old_end - old_change_end
    hunk = [
        *(" " + line for line in old_lines[start:head]),
        *("-" + line for line in old_lines[head:old_change_end]),
        *("+" + line for line in new_lines[head:new_change_end]),
        *(" " + line for line in old_lines[old_change_end:old_end]),
    ]
    return "".join(
        [
            f"--- {path}\n+++ {path}\n",
            f"@@ -{_hunk_range(start, old_end)} +{_hunk_range(start, new_end)} @@\n",
            *(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in hunk),
        ]
    )


def _hunk_range(start: int, end: int) -> str:
    """Format the lines from `start` (from 0) up to `end` (exclusive); an empty range names the line before it."""
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Tried in this order; Latin-1 decodes the bytes that Windows-1252 leaves undefined.
_WESTERN = ("cp1252", "latin-1")
# BEL, BS, TAB, LF, VT, FF, CR, ESC, printable ASCII and everything above.
_BYTES_OF_8_BIT_TEXT = bytes([*range(7, 14), 27, *range(32, 127), *range(128, 256)])


class TextFile:
    r"""The decoded content of a file.

    Attributes:
        text: The content with `\n` for every line break.
        encoding: Name of the Python codec, without the byte order mark.
    """

    __slots__ = ("_byte_order_mark", "_original", "encoding", "text")

    def __init__(self, original: str, encoding: str, byte_order_mark: bytes) -> None:
        self._original = original
        self._byte_order_mark = byte_order_mark
        self.encoding = encoding
        self.text = with_plain_breaks(original)

    @property
    def is_guessed(self) -> bool:
        """Whether the encoding was guessed from the content."""
        return not self._byte_order_mark and self.encoding not in ("utf-8", *_WESTERN)

    @classmethod
    def decode(cls, content: bytes, known: str = "") -> TextFile | None:
        """Decode the bytes of a file; None if they are not text.

        Args:
            known: The encoding that was guessed at the last read or write of the file; empty: none.
        """
        for mark, encoding in _BYTE_ORDER_MARKS:
            if content.startswith(mark):
                return cls._decode_as(encoding, content, mark)
        if file := cls._decode_as("utf-8", content, b""):
            return file
        is_8_bit_text = not content.translate(None, _BYTES_OF_8_BIT_TEXT)
        if not is_8_bit_text and b"\0" not in content:
            return None
        from tool_worker.host.text_files.encoding_guess import decodes, guess_encoding

        name = known if known and decodes(content, known) else guess_encoding(content)
        if name and (file := cls._decode_as(name, content, b"")):
            return file
        for encoding in _WESTERN if is_8_bit_text else ():
            if file := cls._decode_as(encoding, content, b""):
                return file
        return None

    def encode(self, text: str) -> bytes:
        r"""Encode an edited version of the text in the file's format.

        Args:
            text: The edited text, with `\n` as line break. Unchanged lines keep their line breaks; changed lines get
                the most frequent one of the file.

        Raises:
            UnicodeEncodeError: the file's encoding has no code for a character of the text.
        """
        return self._byte_order_mark + self._with_own_breaks(text).encode(self.encoding)

    @classmethod
    def _decode_as(cls, encoding: str, content: bytes, mark: bytes) -> TextFile | None:
        try:
            original = content[len(mark) :].decode(encoding)
        except UnicodeDecodeError:
            return None
        return None if "\0" in original else cls(original, encoding, mark)

    def _with_own_breaks(self, text: str) -> str:
        windows_breaks = self._original.count("\r\n")
        counts = {
            "\n": self._original.count("\n") - windows_breaks,
            "\r\n": windows_breaks,
            "\r": self._original.count("\r") - windows_breaks,
        }
        most_frequent = max(counts, key=lambda line_break: counts[line_break])
        if counts[most_frequent] == sum(counts.values()):
            return text.replace("\n", most_frequent)
        original_lines = io.StringIO(self._original, newline="").readlines()
        edited_lines = split_lines(text)
        head, tail = count_equal_ends(split_lines(self.text), edited_lines)
        changed = "".join(edited_lines[head : len(edited_lines) - tail])
        mixed = "".join(
            [
                *original_lines[:head],
                changed.replace("\n", most_frequent),
                *original_lines[len(original_lines) - tail :],
            ]
        )
        # An edit can put a lone `\r` before a lone `\n`; together they would be read as one line break.
        return mixed if with_plain_breaks(mixed) == text else text.replace("\n", most_frequent)


def with_plain_breaks(text: str) -> str:
    r"""Replace every line break of a text by `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
