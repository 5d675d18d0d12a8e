r"""The one way to the terminal: what is sent there, and what never is.

Most of what a person reads was written by somebody else: a model, a file, a repository, a producer. A terminal obeys
what it is sent: it moves its cursor, sets titles and links, overwrites what was there.

Holds: what a terminal would obey or hide is spelt out, as in `\x1b`; nothing is dropped.
Does not: decide what is shown, see `deckhands.reading.rendering` and `deckhands.cli.output`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import click

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # what a terminal obeys
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f"  # what reorders a line or is not seen
    "\ud800-\udfff]"  # what no terminal can be sent
)


def clean(text: str) -> str:
    r"""Return text that a terminal shows as it is, whole: what it would obey or hide is spelt out, as in `\x1b`.

    Nothing is dropped: a command that hides behind an escape sequence is still a command.
    """
    shown = text.replace("\r\n", "\n").expandtabs(4)
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), shown)


def clean_line(text: str, *, limit: int = 200) -> str:
    """Return cleaned text as one line of at most `limit` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def print_text(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text, its control characters spelt out."""
    click.echo(clean(text) + end, err=err, nl=False)


def print_coloured(lines: Iterable[str], *, err: bool = False, end: str = "\n") -> None:
    """Print lines of a `Renderer`, which has cleaned them and has decided on colour."""
    for line in lines:
        click.echo(line + end, err=err, nl=False, color=True)


def redraw(line: str) -> None:
    """Put a line in the place of the one that the cursor is on, on standard error, which is a terminal."""
    click.echo(f"\r\x1b[K{clean(line)}", nl=False, err=True, color=True)


def ask(question: str) -> None:
    """Print a question on standard error; the answer is typed behind it."""
    sys.stderr.write(clean(question))
    sys.stderr.flush()


def print_patch(patch: bytes) -> None:
    """Print a patch: as the bytes that `git apply` takes, or readable on a terminal, which would obey some of them."""
    if sys.stdout.isatty():
        patch = clean(patch.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")
    click.echo(patch, nl=False)


def print_ascii(text: str) -> None:
    """Print lines of JSON as they are; JSON in ASCII has no control characters."""
    click.echo(text, nl=False)
