r"""Converts terminal output to plain text as displayed, without colours, spinners and cursor moves.

Holds: the time is linear in the length of the output, whatever its bytes, and the text has no control characters but
`\n` and `\t`. The output of a program that redraws its screen becomes its last screen, see `Screen`.
"""

from __future__ import annotations

import re

ROWS = COLUMNS = 1000
CELL_BUDGET = 3_000_000
"""Maximum number of cells that one text may fill: a few full screens."""
ROW_COST = 20
"""The cost of a row, in cells."""
KEPT_BLANKS = 8
KEPT_REPEATS = 40

NEEDS_SCREEN = re.compile(r"\x1b(?:\[[0-9;]*[ABHJdf]|\[\?(?:47|1047|1049)[hl]|M)")
"""Sequences that move the cursor to another line."""

_TOKEN = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?P<other>\x1b(?:\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]+[0-~]|[0-~]))"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    r"|(?P<control>[\x00-\x1f\x7f-\x9f])"
)
_LONG_BLANKS = re.compile(" {16,}")
_LONG_REPEATS = re.compile(r"(\S)\1{79,}")
_LINES = str.maketrans("jklmnqtuvwx", "┘┐┌└┼─├┤┴┬│")

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


class TooCostly(Exception):
    """The output exceeds the budget of cells."""


class TerminalScreen:
    """Emulates one screen, and keeps the text that scrolled out above it.

    A program that redraws its screen sends the same lines again and again, padded with blanks to 1000 columns. A model
    instead reads the earlier text once and then the last screen, without padding.

    Does not: support colours, margins, custom tab stops, or characters of double width.
    """

    def __init__(self) -> None:
        self._above: list[str] = []
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._saved = (0, 0)
        self._is_redrawn = False
        self._has_lines = False
        self._budget = CELL_BUDGET
        self._moves = {"A": (-1, 0), "B": (1, 0), "e": (1, 0), "C": (0, 1), "a": (0, 1), "D": (0, -1)}

    def play(self, text: str) -> str:
        """Return the text that remains after playing the output.

        Raises:
            TooCostly: the budget was exceeded before the end.
        """
        for token in _TOKEN.finditer(text):
            if token["text"] is not None:
                self._write(token["text"].translate(_LINES) if self._has_lines else token["text"])
            elif token["final"] is not None:
                self._control(token["parameters"], token["final"])
            elif token["control"] is not None:
                self._step(token["control"])
            else:
                self._escape(token["other"])
        self._leave()
        return "\n".join(self._above)

    def _write(self, text: str) -> None:
        row = self._rows[self._row]
        end = self._column + len(text)
        self._spend(max(0, self._column - len(row)))
        if len(row) < self._column:
            row.extend(" " * (self._column - len(row)))
        row[self._column : end] = text
        self._column = end

    def _step(self, control: str) -> None:
        if control == "\n":
            self._go(self._row + 1, 0, is_new_line=True)
        elif control == "\r":
            self._column = 0
        elif control == "\b":
            self._column = max(0, self._column - 1)
        elif control == "\t":
            self._column += 8 - self._column % 8
            self._spend(8)

    def _escape(self, sequence: str) -> None:
        if sequence in ("\x1b(0", "\x1b(B"):
            self._has_lines = sequence == "\x1b(0"
        elif sequence == "\x1b7":
            self._saved = (self._row, self._column)
        elif sequence == "\x1b8":
            self._go(*self._saved)
        elif sequence == "\x1bM":
            self._go(self._row - 1, self._column)

    def _control(self, parameters: str, final: str) -> None:
        if parameters.startswith("?"):
            if final in "hl" and parameters[1:] in ("47", "1047", "1049"):
                self._leave()
            return
        numbers = [int(word[:6]) if word.isdecimal() else 0 for word in parameters.split(";")]
        count = min(max(1, numbers[0]), COLUMNS)
        if final in self._moves:
            down, right = self._moves[final]
            self._go(self._row + down * count, self._column + right * count)
        elif final in "Hf":
            self._redraw()
            self._go(count - 1, (min(max(1, numbers[1]), COLUMNS) if len(numbers) > 1 else 1) - 1)
        elif final == "d":
            self._redraw()
            self._go(count - 1, self._column)
        elif final in "G`":
            self._go(self._row, count - 1)
        elif final in "EF":
            self._go(self._row + (count if final == "E" else -count), 0)
        elif final == "J":
            self._erase_screen(numbers[0])
        elif final in "KXP@":
            self._change_row(final, numbers[0], count)
        elif final in "LM":
            self._change_rows(final, count)

    def _go(self, row: int, column: int, *, is_new_line: bool = False) -> None:
        """Move the cursor; only a line break can go below the last addressable row."""
        self._row = max(0, row if is_new_line else min(row, max(self._row, ROWS - 1)))
        self._column = max(0, min(column, max(self._column, COLUMNS - 1)))
        missing = self._row + 1 - len(self._rows)
        if missing > 0:
            self._spend(missing * ROW_COST)
            self._rows.extend([] for _ in range(missing))

    def _redraw(self) -> None:
        """Start a screen whose rows are addressed by number; the earlier text stays above it."""
        if not self._is_redrawn:
            self._leave()
            self._is_redrawn = True

    def _leave(self) -> None:
        rows = ["".join(row) for row in self._rows]
        self._above += _compact(rows) if self._is_redrawn else rows
        if self._above and not self._above[-1]:
            self._above.pop()
        self._rows = [[]]
        self._row = 0
        self._column = 0
        self._is_redrawn = False

    def _erase_screen(self, part: int) -> None:
        if part in (2, 3):
            self._redraw()
            row_number, column = self._row, self._column
            self._rows = [[]]
            self._go(row_number, column)
        elif part == 1:
            self._spend(self._row)
            for row in self._rows[: self._row]:
                row.clear()
            self._change_row("K", 1, 1)
        else:
            del self._rows[self._row + 1 :]
            del self._rows[self._row][self._column :]

    def _change_row(self, final: str, part: int, count: int) -> None:
        row, column = self._rows[self._row], self._column
        if final == "P":
            self._spend(ROW_COST)
            del row[column : column + count]
        elif final == "@" and column < len(row):
            self._spend(count)
            row[column:column] = " " * count
        elif final == "K" and part in (0, 2):
            del row[column if part == 0 else 0 :]
        elif final in "KX":
            first, last = (column, column + count) if final == "X" else (0, column + 1)
            last = min(last, len(row))
            self._spend(max(0, last - first))
            row[first:last] = " " * max(0, last - first)

    def _change_rows(self, final: str, count: int) -> None:
        if final == "M":
            self._spend(ROW_COST)
            del self._rows[self._row : self._row + count]
        else:
            self._spend(count * ROW_COST)
            self._rows[self._row : self._row] = ([] for _ in range(count))
            del self._rows[max(ROWS, self._row + 1) :]
        if self._row >= len(self._rows):
            self._go(self._row, self._column)

    def _spend(self, cells: int) -> None:
        self._budget -= cells + 1
        if self._budget < 0:
            raise TooCostly


def _compact(rows: list[str]) -> list[str]:
    """Return the rows of a screen without padding; repeated rows are replaced by their count."""
    compacted: list[str] = []
    repeats = 0
    for row in [*rows, None]:
        shown = None if row is None else without_padding(row)
        if shown is not None and compacted and shown == compacted[-1]:
            repeats += 1
            continue
        if repeats and compacted[-1]:
            compacted += [compacted[-1]] if repeats == 1 else [f"[the same line {repeats} more times]"]
        repeats = 0
        if shown is not None:
            compacted.append(shown)
    return compacted


def without_padding(row: str) -> str:
    """Return a row of a screen without padding blanks and rules."""
    row = _LONG_BLANKS.sub(" " * KEPT_BLANKS, row.rstrip())
    return _LONG_REPEATS.sub(lambda match: match[1] * KEPT_REPEATS, row)


def plain_text(raw: bytes) -> str:
    """Return the text of terminal output; bytes that are not UTF-8 become U+FFFD."""
    text = raw.decode("utf-8", "replace")
    if not _UNWANTED.search(text):
        return text
    if NEEDS_SCREEN.search(text):
        try:
            return _UNWANTED.sub("", TerminalScreen().play(text))
        except TooCostly:
            text = "\n".join(map(without_padding, text.split("\n")))
    text = _MARKS.sub("", text)
    text = _MOVE.sub(_mark, text)
    text = _ESCAPE.sub("", text)
    text = "\n".join(_apply_overwrites(line.rstrip("\r")) for line in text.split("\n"))
    return _UNWANTED.sub("", text)


def _mark(match: re.Match[str]) -> str:
    if match[2] == "G":
        return "\r"
    return _ERASE_RIGHT if match[1] in ("", "0") else _ERASE_LINE


def _apply_overwrites(line: str) -> str:
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


def find_unfinished(raw: bytes) -> int:
    """Return the start of an incomplete character or escape sequence at the end; the length if there is none."""
    match = _UNFINISHED.search(raw, max(0, len(raw) - 4200))
    return match.start() if match else len(raw)


def without_broken_start(raw: bytes) -> bytes:
    """Return the bytes without a partial character at their start."""
    return _BROKEN_START.sub(b"", raw)
