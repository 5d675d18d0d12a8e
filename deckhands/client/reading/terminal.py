r"""The only way to the terminal: all output passes here and is cleaned.

Most displayed text comes from untrusted sources: a model, a file, a repository, a producer. A terminal obeys control
sequences, which can move its cursor, set titles and links, and overwrite earlier text.

The plain output of commands is notices, JSON, tables, costs and times.

Holds: characters that a terminal would obey or hide are printed as escapes, such as `\x1b`; nothing is dropped. All
output goes through `deckhands.client.reading.terminal`.
Does not: decide what to show, see `deckhands.client.reading.rendering` and `deckhands.client.reading.output`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO

import click

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # obeyed by terminals
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f"  # reorders a line, or is invisible
    "\ud800-\udfff]"  # cannot be sent to a terminal
)


def clean(text: str) -> str:
    r"""Return the whole text with control and invisible characters as escapes, such as `\x1b`.

    Nothing is dropped: a command that hides behind an escape sequence is still a command.
    """
    shown = text.replace("\r\n", "\n").expandtabs(4)
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), shown)


def clean_line(text: str, *, limit: int = 200) -> str:
    """Return cleaned text as one line of at most `limit` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def is_coloured(stream: TextIO) -> bool:
    """Return whether a stream gets colours: a terminal, unless NO_COLOR or TERM=dumb forbids it."""
    # late: `--help` prints through this module, and importing the settings costs pydantic
    from deckhands.settings import takes_colour

    return stream.isatty() and takes_colour()


def is_redrawn(stream: TextIO) -> bool:
    """Return whether lines on a stream can be replaced: on a terminal, unless TERM=dumb."""
    from deckhands.settings import can_redraw

    return stream.isatty() and can_redraw()


def count_columns(stream: TextIO) -> int | None:
    """Return the number of columns of a stream; None if it is no terminal, so that lines may have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def measure_width(text: str) -> int:
    """Return the width of a cleaned line in columns: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def fit_width(line: str, columns: int) -> str:
    """Return a cleaned line cut to this many columns, with `…` at the cut."""
    if measure_width(line) <= columns:
        return line
    while line and measure_width(line) > columns - 1:
        line = line[:-1]
    return line + "…" if columns > 0 else ""


CLOSED = frozenset({errno.EPIPE, errno.EIO})
"""Errors of a write to a pipe that has no reader, and to a terminal that has been closed."""


def print_text(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text, with control characters as escapes."""
    click.echo(clean(text) + end, err=err, nl=False)


def print_coloured(lines: Iterable[str], *, err: bool = False, end: str = "\n") -> None:
    """Print lines of a `Renderer`, which are cleaned and coloured already."""
    for line in lines:
        click.echo(line + end, err=err, nl=False, color=True)


def redraw(line: str) -> None:
    """Replace the line at the cursor, on standard error, which is a terminal."""
    click.echo(f"\r\x1b[K{clean(line)}", nl=False, err=True, color=True)


def redraw_lines(lines: Sequence[str], before: int) -> None:
    """Replace the last `before` lines that were printed here, on standard error, which is a terminal."""
    up = f"\x1b[{before}A" if before else ""
    body = "".join(f"\r\x1b[K{clean(line)}\n" for line in lines)
    click.echo(f"{up}{body}\x1b[J", nl=False, err=True, color=True)


def draw(text: str, *, on: TextIO | None = None) -> None:
    """Send text made of cleaned parts and our own control sequences.

    Args:
        on: a terminal; None for the current standard output.
    """
    stream = sys.stdout if on is None else on
    stream.write(text)
    stream.flush()


def ask(question: str) -> None:
    """Print a question on standard error and return the typed answer."""
    sys.stderr.write(clean(question))
    sys.stderr.flush()


def print_patch(patch: bytes) -> None:
    """Print a patch: as the exact bytes for `git apply`, or cleaned on a terminal."""
    if sys.stdout.isatty():
        patch = clean(patch.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")
    click.echo(patch, nl=False)


def print_ascii(text: str) -> None:
    """Print lines of JSON unchanged; JSON in ASCII has no control characters."""
    click.echo(text, nl=False)


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
    except OSError as error:
        if error.errno in CLOSED:  # the rest of the buffer would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextmanager
def ignore_closed_output(on_gone: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Continue after the reader of standard output, or its terminal, has closed it, and drop further output."""
    try:
        yield
    except OSError as error:
        if error.errno not in CLOSED:
            raise
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
            are left out. None for no maximum.
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
