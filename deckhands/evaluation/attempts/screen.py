"""The displayed progress of an evaluation: a table on a terminal, otherwise a line from time to time.

The progress goes to standard error, the final summary to standard output.
"""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Self

from broker.runtime import SYSTEM_CLOCK
from deckhands.client import clean_line, fit_width, is_redrawn, note, redraw_lines, render_table
from deckhands.evaluation.attempts.status import EvaluationStatus

REDRAW_SECONDS = 0.5
LINE_SECONDS = 10.0
OTHER_LINES = 6
HEAD = ("INSTANCE", "MODEL", "TRY", "STATE", "WAITS FOR", "STEPS", "SECONDS", "USD", "WORKER")
SPARE = ("WORKER", "WAITS FOR", "MODEL", "USD")


class ProgressScreen:
    """Shows the progress repeatedly."""

    def __init__(self) -> None:
        self._is_table = is_redrawn(sys.stderr)
        self._lines = 0
        self._shown_at = float("-inf")
        self._bound = self._line = ""
        self._last: EvaluationStatus | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the final state on the screen, even if the command fails."""
        if self._last is not None:
            self._show(self._last)

    def show(self, status: EvaluationStatus) -> None:
        """Show the progress, if it is due."""
        now = SYSTEM_CLOCK.monotonic()
        is_new = not self._is_table and status.render_bound_line != self._bound and self._last is not None
        if now - self._shown_at < (REDRAW_SECONDS if self._is_table else LINE_SECONDS) and not is_new:
            self._last = status
            return
        self._shown_at = now
        self._show(status)
        self._last = None if status.state == "over" else status

    def _show(self, status: EvaluationStatus) -> None:
        self._bound = status.render_bound_line
        if not self._is_table:
            if status.render_line != self._line:
                note(status.render_line)
            self._line = status.render_line
            return
        size = shutil.get_terminal_size()
        lines = render_progress(status, columns=size.columns, rows=size.lines)
        redraw_lines(lines, self._lines)
        self._lines = len(lines)


def render_progress(status: EvaluationStatus, *, columns: int, rows: int) -> list[str]:
    """Return the progress as lines that fit on a screen; attempts that do not fit are counted."""
    room = max(1, rows - OTHER_LINES)
    shown = status.attempts[:room]
    cells = [
        [
            one.instance,
            one.model,
            str(one.attempt),
            one.state,
            one.waits_for,
            str(one.iterations),
            f"{one.seconds:.0f}",
            f"{one.cost_usd:.4f}",
            one.worker,
        ]
        for one in shown
    ]
    lines = render_table(HEAD, cells, columns=columns, spare=SPARE) if cells else []
    if status.in_flight > len(shown):
        lines.append(f"… and {status.in_flight - len(shown):,} more in flight")
    progress, _, spending = status.render_line.partition("; ")
    return [*lines, *(fit_width(clean_line(line, limit=1_000), columns) for line in (progress, spending))]
