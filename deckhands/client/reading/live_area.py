"""Lines at the bottom of a terminal that are replaced in place, while everything else is printed above them.

Holds: the lines are cleaned and cut to the width of the terminal, so none wraps and all can be erased again. Printed
text and the lines below it are sent in one write.
Does not: use the whole screen, or leave anything on it once it is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TextIO

from deckhands.client.reading.terminal import clean, draw, fit_width

_ERASE_BELOW = "\r\x1b[J"


class LiveArea:
    """The last lines of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._drawn = 0
        self._is_hidden = False

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines; nothing is sent if nothing changes."""
        fitting = self._fit_lines(lines)
        if fitting == self._lines and (self._drawn or not fitting):
            return
        self._lines = fitting
        self._send("")

    def above(self, lines: Iterable[str]) -> None:
        """Print cleaned lines above, which may have colours."""
        self._send("".join(f"{line}\n" for line in lines))

    def hide(self) -> None:
        """Erase the lines until `unhide`, so that the user can type in their place."""
        self._is_hidden = True
        self._send("")

    def unhide(self) -> None:
        """Show the lines again."""
        self._is_hidden = False
        self._send("")

    def close(self) -> None:
        """Erase the lines."""
        self._lines = []
        self._send("")

    def _fit_lines(self, lines: Sequence[str]) -> list[str]:
        columns = max(1, shutil.get_terminal_size().columns - 1)  # the last column would wrap on some terminals
        return [fit_width(" ".join(clean(line).split("\n")), columns) for line in lines]

    def _send(self, text: str) -> None:
        """Send text, with the lines below it."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        away = f"{up}{_ERASE_BELOW}" if self._drawn else ""
        shown = [] if self._is_hidden else self._fit_lines(self._lines)
        below = "".join(f"\x1b[2m{line}\x1b[0m\n" for line in shown).removesuffix("\n")
        self._drawn = len(shown)
        if whole := away + text + below:
            draw(whole, on=self._stream)
