r"""The text of a file, and the details needed to write it back in the file's own format.

A model sees and edits text whose lines end in `\n`. The file may be UTF-8 or UTF-16 with or without a byte order mark,
or have a legacy encoding, see `encoding_guess`. Its lines may end in `\n`, `\r\n`, `\r`, or a mixture.

Holds: `decode(content).encode(text)` equals `content` if the text was not changed, and otherwise differs from it only
in the changed lines.
Does not: know every encoding. Text in an unknown encoding is read as Windows-1252 or Latin-1 and shows wrong letters,
but its bytes survive every edit.
"""

from __future__ import annotations

import codecs
import io

from tool_worker.host.text_files.text_diff import count_equal_ends, split_lines

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
