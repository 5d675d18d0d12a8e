r"""Converts terminal output to plain text as displayed, without colours, spinners and cursor moves.

Holds: the time is linear in the length of the output, whatever its bytes, and the text has no control characters but
`\n` and `\t`. The output of a program that redraws its screen becomes its last screen, see `screen`.
"""

from __future__ import annotations

import re

from tool_worker.host.shell.screen import NEEDS_SCREEN, Screen, TooCostly, without_padding

_ERASE_RIGHT = "\x01"
_ERASE_LINE = "\x02"
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MARKS = re.compile(f"[\x00{_ERASE_RIGHT}{_ERASE_LINE}]")
_MOVE = re.compile(r"\x1b\[([0-2]?)([GK])")
_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|[ -/]+[0-~]"  # character sets
    r"|[0-~])"
)

_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]{0,4096}|[ -/]*)"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
_BROKEN_START = re.compile(rb"\A[\x80-\xbf]{1,3}")


def plain_text(raw: bytes) -> str:
    """Return the text of terminal output; bytes that are not UTF-8 become U+FFFD."""
    text = raw.decode("utf-8", "replace")
    if not _UNWANTED.search(text):
        return text
    if NEEDS_SCREEN.search(text):
        try:
            return _UNWANTED.sub("", Screen().play(text))
        except TooCostly:
            text = "\n".join(map(without_padding, text.split("\n")))
    text = _MARKS.sub("", text)
    text = _MOVE.sub(_mark, text)
    text = _ESCAPE.sub("", text)
    text = "\n".join(_overwritten(line.rstrip("\r")) for line in text.split("\n"))
    return _UNWANTED.sub("", text)


def _mark(match: re.Match[str]) -> str:
    if match[2] == "G":
        return "\r"
    return _ERASE_RIGHT if match[1] in ("", "0") else _ERASE_LINE


def _overwritten(line: str) -> str:
    """Apply carriage returns, backspaces and erasures, as in progress bars."""
    if not ("\r" in line or "\b" in line or _ERASE_RIGHT in line or _ERASE_LINE in line):
        return line
    cells: list[str] = []
    column = 0
    for character in line:
        if character == "\r":
            column = 0
        elif character == "\b":
            column = max(0, column - 1)
        elif character == _ERASE_RIGHT:
            del cells[column:]
        elif character == _ERASE_LINE:
            cells.clear()
            column = 0
        else:
            cells[column : column + 1] = character
            column += 1
    return "".join(cells)


def unfinished_from(raw: bytes) -> int:
    """Return the start of an incomplete character or escape sequence at the end; the length if there is none."""
    match = _UNFINISHED.search(raw, max(0, len(raw) - 4200))
    return match.start() if match else len(raw)


def without_broken_start(raw: bytes) -> bytes:
    """Return the bytes without a partial character at their start."""
    return _BROKEN_START.sub(b"", raw)
