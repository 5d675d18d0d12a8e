"""How far a long command has got: a bar on a terminal, a line now and then elsewhere; all of it on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from broker.runtime.clock import SYSTEM_CLOCK
from deckhands.cli.output import note
from deckhands.reading.terminal import is_redrawn, redraw

BAR_COLUMNS = 24
REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0


class Progress:
    """Counts what is done.

    Args:
        what: of the things that are counted, such as `tasks submitted`.
        total: how many there will be; None: nobody knows.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._is_bar = is_redrawn(sys.stderr)
        self._shown_at = SYSTEM_CLOCK.monotonic()
        self._has_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the last word on the screen, also where the command fails."""
        if self._is_bar and self._has_line:
            redraw(self.text())
            note("")

    def add(self, number: int = 1) -> None:
        """Count some more, and show it if it is time to."""
        self.done += number
        now = SYSTEM_CLOCK.monotonic()
        if now - self._shown_at < (REDRAW_SECONDS if self._is_bar else LINE_SECONDS):
            return
        self._shown_at = now
        self._has_line = True
        if self._is_bar:
            redraw(self.text())
        else:
            note(self.text())

    def text(self) -> str:
        """Return it as a line."""
        if self._total is None:
            return f"{self.done:,} {self._what}"
        filled = BAR_COLUMNS * min(self.done, self._total) // max(self._total, 1)
        bar = f"[{'#' * filled}{'-' * (BAR_COLUMNS - filled)}] " if self._is_bar else ""
        return f"{bar}{self.done:,} of {self._total:,} {self._what}"
