"""docs/commands.md, made of the command line itself. `make docs` writes it, and a test compares it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache

import click

from deckhands.cli.main import cli
from tests.class_reference import table

RUN = "deckhands run"
INTRODUCTION = """# Commands and options

Every verb with its options, as `deckhands VERB --help` prints them. `make docs` writes this page from the command line, and a test compares the two. [The command line](cli.md) explains how they work together, exit codes and output.
"""


def commands_page() -> str:
    sections = [_section(name, command) for name, command in _commands(cli, "deckhands")]
    return INTRODUCTION + "\n" + "\n\n".join(sections) + "\n"


def _commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=name)
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {verb}")
        elif not command.hidden:
            yield f"{name} {verb}", command


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    parts = [f"## `{name}`", _escaped(inspect.cleandoc(command.help or ""))]
    if arguments:
        parts.append(f"Arguments: {', '.join(f'`{one}`' for one in arguments)}.")
    rows = [_row(one, context) for one in options]
    if name != RUN:
        shared = [row for row in rows if row in _rows_of_run()]
        rows = [row for row in rows if row not in shared]
        if shared:
            names = ", ".join(row[0].partition(" `")[0].rstrip(",") for row in shared)
            parts.append(f"As for [`{RUN}`](#deckhands-run): {names}.")
    return "\n\n".join([*parts, *([table(("option", "meaning"), rows)] if rows else [])])


@cache
def _rows_of_run() -> list[tuple[str, str]]:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    context = click.Context(command, info_name=RUN)
    return [_row(one, context) for one in command.params if isinstance(one, click.Option) and not one.hidden]


def _row(option: click.Option, context: click.Context) -> tuple[str, str]:
    return _names(option, context), _escaped(_meaning(option, context))


def _names(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag or option.count else f"{names} `{option.make_metavar(context)}`"


def _meaning(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    return re.sub(r"  +", " ", record[1]) if record else ""


def _escaped(text: str) -> str:
    """Return a text whose brackets and angles are text outside of code, too."""
    pieces = re.split(r"(`[^`]*`)", re.sub(r"^\x08\n?", "", text, flags=re.MULTILINE))
    return "".join(
        piece if number % 2 else re.sub(r"([\[\]<>*_])", r"\\\1", piece) for number, piece in enumerate(pieces)
    )
