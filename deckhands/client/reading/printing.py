"""Plain output of commands: notices, JSON, tables, costs and times. Needs no events.

Holds: all output goes through `deckhands.client.reading.terminal`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from deckhands.client.reading.terminal import clean_line, fit_width, measure_width, print_ascii, print_text

GAP = "  "
LAST_COLUMN = 20
"""The minimum width of a table's last column; other columns are left out to keep it."""


def print_json(value: Any) -> None:
    """Print a JSON object as one line of ASCII."""
    print_ascii(json.dumps(value) + "\n")


def note(text: str) -> None:
    """Print a notice on standard error, if it is open."""
    try:
        print_text(clean_line(text, limit=1_000), err=True)
    except BrokenPipeError:  # the rest of the buffer would change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except OSError:
        return


@contextmanager
def ignore_closed_output(on_gone: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Continue after the reader of standard output has closed it, and drop further output."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        on_gone()


def render_cost(cost_usd: float, *, is_whole: bool) -> str:
    """Return a cost as text, marked as incomplete if a price is not known."""
    if is_whole:
        return f"${cost_usd:.4f}"
    return f"at least ${cost_usd:.4f}" if cost_usd else "unknown"


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int | None = None, spare: Sequence[str] = ()
) -> list[str]:
    """Return a table as lines, its columns as wide as their widest cell.

    Args:
        columns: the maximum width of a line. The last column is cut to fit; before it gets too narrow, other columns
            are left out. None: no maximum.
        spare: the heads of the columns that may be left out, in that order.
    """
    cleaned = [list(head), *([clean_line(cell, limit=60) for cell in row] for row in rows)]
    left_out = list(spare)
    while columns is not None and left_out and _width_left(cleaned, columns) < 0:
        position = cleaned[0].index(left_out.pop(0))
        for row in cleaned:
            del row[position]
    widths = _widths(cleaned)
    lines = [
        GAP.join(cell + " " * (width - measure_width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cleaned
    ]
    return lines if columns is None else [fit_width(line, columns) for line in lines]


def _width_left(rows: Sequence[Sequence[str]], columns: int) -> int:
    """Return the width left after giving the last column its full width, or `LAST_COLUMN`."""
    *widths, last = _widths(rows)
    return columns - sum(widths) - len(GAP) * len(widths) - min(last, LAST_COLUMN)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(measure_width(cell) for cell in column) for column in zip(*rows, strict=True)]


def format_time(moment: datetime) -> str:
    """Format a time for display, in UTC and without fractions."""
    return f"{(moment + timedelta(microseconds=500_000)).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
