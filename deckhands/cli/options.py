"""Options shared by several commands, and the text given by the user."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from broker.runtime import UsageError
from deckhands.settings import SANDBOX_REMEDY, SANDBOXES, is_sandbox_name

if TYPE_CHECKING:
    from broker.contract import MemorySpec

NAME_REMEDY = "Use up to 64 letters, digits, '.', '_' and '-'."
"""For a tenant, an experiment, a user or a project."""


def _check_sandbox(_context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None and not is_sandbox_name(name):
        raise click.BadParameter(f"{ascii(name)[:100]} is no sandbox. {SANDBOX_REMEDY}", param=parameter)
    return name


sandbox_option = click.option(
    "--sandbox",
    metavar="|".join((*SANDBOXES, "NAME")),
    callback=_check_sandbox,
    help="The sandbox of commands, which may be one of a package; by default DECKHANDS_SANDBOX, or auto.",
)
workspace_root_option = click.option(
    "--workspace-root",
    "workspace_roots",
    multiple=True,
    metavar="DIR",
    help="A directory below which conversations may name their workspace. May be repeated. By default "
    "DECKHANDS_WORKSPACE_ROOTS; without either, conversations may name no directory.",
)
plain_option = click.option(
    "--plain", "is_plain", is_flag=True, help="Print plain lines even on a terminal: no colour, no status line."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


DURATION_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of a command that only lists."""

    as_json: bool


class Amount(click.FloatRange):
    """A finite number. `nan` cannot be compared, and an unlimited value is expressed by omitting the option."""

    def __init__(  # the names are click's
        self,
        *,
        min: float,  # noqa: A002
        min_open: bool = False,
        max: float | None = None,  # noqa: A002
        may_be_infinite: bool = False,
    ) -> None:
        super().__init__(min=min, max=max, min_open=min_open)
        self._may_be_infinite = may_be_infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found) or (math.isinf(found) and not self._may_be_infinite):
            self.fail(f"{value} is not a finite number. Leave the option out for no limit.", param, ctx)
        return found


class Duration(click.ParamType[float]):
    """A length of time, in seconds: `90`, `90s`, `1.5m` or `2h`, up to a limit."""

    name = "duration"

    def __init__(self, *, least_seconds: float, most_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._most_seconds = most_seconds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        text = str(value).strip()
        unit = DURATION_UNITS.get(text[-1:], 0)
        try:
            seconds = float(text[:-1] if unit else text) * (unit or 1)
        except ValueError:
            self.fail(f"{value} is no length of time. Write 90, 90s, 1.5m or 2h.", param, ctx)
        if not self._least_seconds <= seconds <= self._most_seconds:
            self.fail(f"{value} is not between {self._least_seconds:g} s and {self._most_seconds:g} s.", param, ctx)
        return seconds


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """The argument of a command that only takes a conversation."""

    conversation_id: str


def read_task(*texts: str | None, file: Path | None) -> str:
    """Return the task from the command line, the file or standard input.

    Raises:
        UsageError: there is none or more than one, or it is invalid.
    """
    task = read_text(*texts, file=file)
    if task is None:
        if sys.stdin.isatty():
            raise UsageError("No task is given.", remedy="Give one with -t TEXT, with -f FILE or on standard input.")
        task = _standard_input()
    from deckhands.client import check_task  # imports all that describes a task

    check_task(task)
    return task


def read_text(*texts: str | None, file: Path | None) -> str | None:
    """Return the one text given on the command line or in the file; None if none is given.

    Raises:
        UsageError: more than one is given, or the file cannot be read.
    """
    given = [text for text in texts if text is not None]
    if len(given) + (file is not None) > 1:
        raise UsageError(
            "The text is given more than once.", remedy="Give it once: as an argument, with -t or with -f."
        )
    if file is None:
        return given[0] if given else None
    if file == Path("-"):
        return _standard_input()
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The file {file} cannot be read: {error.strerror}.", remedy="Name another with -f."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {file} is not text in UTF-8.", remedy="Name another with -f.") from error


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # in the C locale, invalid bytes arrive as surrogates
    except UnicodeError as error:
        raise UsageError("Standard input is not text in UTF-8.", remedy="Convert it to UTF-8.") from error
    return text


def parse_memory(project: str, user: str) -> MemorySpec:
    """Return the notebook of a project and a user.

    Raises:
        UsageError: the name is invalid.
    """
    from pydantic import ValidationError

    from broker.contract import MemorySpec

    try:
        return MemorySpec(user=user, project=project)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(
            f"A {name} cannot be called {user if name == 'user' else project!r}.",
            remedy=NAME_REMEDY,
        ) from None
