"""Progress of a long command: a bar on a terminal, occasional lines elsewhere; all on standard error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from broker.runtime import SYSTEM_CLOCK
from deckhands.client import fit_width, format_duration, is_redrawn, note, redraw

BAR_COLUMNS = 24
REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0
LEAST_SECONDS = 1.0
"""No rate is shown before this time."""


class ProgressCounter:
    """Counts finished items.

    Args:
        what: the counted items, such as `tasks submitted`.
        total: the total number; None if unknown.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._is_bar = is_redrawn(sys.stderr)
        self._began = self._shown_at = SYSTEM_CLOCK.monotonic()
        self._has_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the last state on the screen, even if the command fails."""
        if self._is_bar and self._has_line:
            self._redraw()
            note("")

    def add(self, number: int = 1) -> None:
        """Count further items, and show the progress if due."""
        self.done += number
        now = SYSTEM_CLOCK.monotonic()
        if now - self._shown_at < (REDRAW_SECONDS if self._is_bar else LINE_SECONDS):
            return
        self._shown_at = now
        self._has_line = True
        if self._is_bar:
            self._redraw()
        else:
            note(self.text())

    def text(self) -> str:
        """Return the progress as a line."""
        if self._total is None:
            counted = f"{self.done:,} {self._what}"
        else:
            counted = f"{self.done:,} of {self._total:,} {self._what}"
        if not self._is_bar:
            return counted
        seconds = SYSTEM_CLOCK.monotonic() - self._began
        return bar_line(counted, self.done, self._total, seconds)

    def _redraw(self) -> None:
        redraw(fit_width(self.text(), max(1, shutil.get_terminal_size().columns - 1)))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that shows the transferred bytes: a bar on a terminal, cleared at the end."""
    began = SYSTEM_CLOCK.monotonic()
    has_shown = False

    def show(done: int, total: int | None) -> None:
        nonlocal has_shown
        if is_redrawn(sys.stderr):
            has_shown = True
            of_all = f" of {total / 2**20:,.0f}" if total is not None else ""
            counted = f"{what} {done / 2**20:,.0f}{of_all} MiB"
            scale = total / 2**20 if total is not None else None
            line = bar_line(counted, done / 2**20, scale, SYSTEM_CLOCK.monotonic() - began)
            with suppress(OSError):
                redraw(fit_width(line, max(1, shutil.get_terminal_size().columns - 1)))

    try:
        yield show
    finally:
        if has_shown:
            with suppress(OSError):
                redraw("")


def bar_line(counted: str, done: float, total: float | None, seconds: float) -> str:
    """Return a bar with the count, the rate and the remaining time.

    Args:
        done, total: in any unit; None for an unknown total.
        seconds: since the start.
    """
    if total is None:
        pace = f" · {done / seconds:,.1f}/s" if seconds >= LEAST_SECONDS else ""
        return f"{counted}{pace} · {format_duration(seconds)}"
    filled = int(BAR_COLUMNS * min(done, total) // max(total, 1))
    share = 100 * min(done, total) / total if total else 100
    left = ""
    if 0 < done < total and seconds >= LEAST_SECONDS:
        left = f" · {format_duration(seconds * (total - done) / done)} left"
    return f"[{'#' * filled}{'-' * (BAR_COLUMNS - filled)}] {share:3.0f} % {counted} · {format_duration(seconds)}{left}"
