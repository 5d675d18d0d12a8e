"""The commands of the command line, found without importing the modules that define them.

A module of `deckhands.cli.commands` or `deckhands.cli.tui` defines a command by three things at its top level: the
`SECTION` of `deckhands --help`, an entry in `SUMMARIES` (the command and its summary), and a click command of the same
name, or with an underscore appended. There is no other list.

Holds: `--help` reads the modules' text and imports none of them; calling a command imports one module.
Does not: evaluate code. Both values are literals, and a test compares them with the imported ones.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

SECTIONS = (
    "Start a conversation",
    "Evaluate agents",
    "Read conversations",
    "Control a conversation",
    "Files of a workspace",
    "Budgets, secrets, notes",
    "Operate a cluster",
)
"""The sections of `--help`, in order; one that is not listed comes last."""
PACKAGES = ("commands", "tui")
GENERATED = "generated"

Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: its module, and its entry in `--help`."""

    name: str
    module: str
    section: str
    summary: str

    def command(self) -> click.Command:
        """Import the module and return the click command."""
        module = import_module(self.module)
        found: click.Command = getattr(module, f"{self.name}_", None) or getattr(module, self.name)
        return found


@cache
def find_commands() -> dict[str, CommandEntry]:
    """Return the commands by name, in the order of `--help`."""
    found: list[CommandEntry] = []
    for file in sorted(_list_files(), key=lambda file: file.name):
        found += _parse_file(file)
    found.sort(key=lambda verb: SECTIONS.index(verb.section) if verb.section in SECTIONS else len(SECTIONS))
    return {verb.name: verb for verb in found}


@cache
def find_command(name: str) -> CommandEntry | None:
    """Return one command; None if there is none with this name. Parses only the files that contain the name."""
    quoted = f'"{name}"'.encode(errors="replace")
    entries = (entry for file in _list_files() if quoted in file.read_bytes() for entry in _parse_file(file))
    return next((entry for entry in entries if entry.name == name), None)


def _list_files() -> list[Path]:
    return [file for package in PACKAGES for file in (Path(__file__).parent / package).glob("*.py")]


def _parse_file(file: Path) -> list[CommandEntry]:
    return parse_commands(f"deckhands.cli.{file.parent.name}.{file.stem}", file.read_text(encoding="utf-8"))


def parse_commands(module: str, text: str) -> list[CommandEntry]:
    """Return the commands that the text of a module declares."""
    section = text.partition("\nSECTION = ")[2].partition("\n")[0]
    declared = text.partition("\nSUMMARIES = ")[2]
    first_line = declared.partition("\n")[0]
    if not section or not declared:
        return []
    table = first_line if first_line.endswith("}") else declared.partition("\n}")[0] + "\n}"
    summaries: dict[str, str] = literal_eval(table)
    return [CommandEntry(name, module, literal_eval(section), summary) for name, summary in summaries.items()]


def with_options(kind: type[Options]) -> Callable[[Callable[[Options], Result]], Callable[..., Result]]:
    """Call a command with one options object, a dataclass with a field for each parameter of the click command.

    If it has the field `generated`, given parameters without their own field are stored there. This is the only place
    where command-line options become an object.
    """
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()

    def decorate(verb: Callable[[Options], Result]) -> Callable[..., Result]:
        @wraps(verb)
        def call(**values: Any) -> Result:
            if GENERATED in known:
                found = {name: values.pop(name) for name in values.keys() - known}
                values[GENERATED] = {name: value for name, value in found.items() if value not in (None, ())}
            return verb(kind(**values))

        return call

    return decorate


class LazyCommandGroup(click.Group):
    """The commands as a click group. Each is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Return the names of the commands in the order of `--help`."""
        return list(find_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command; None if there is no such command."""
        verb = find_command(cmd_name)
        return verb.command() if verb else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Return the commands with this prefix, without importing them, and the options."""
        found = [CompletionItem(verb.name, help=verb.summary) for verb in find_commands().values()]
        begun = [item for item in found if str(item.value).startswith(incomplete)]
        return begun + (click.Command.shell_complete(self, ctx, incomplete) if incomplete.startswith("-") else [])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the nearest one."""
        if find_command(args[0]) is None and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], find_commands(), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "`deckhands --help` lists the commands."
            raise click.UsageError(f"No such command: {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands by section, without importing them."""
        width = max(map(len, find_commands()))
        for section in dict.fromkeys(verb.section for verb in find_commands().values()):
            with formatter.section(section):
                rows = [
                    (verb.name.ljust(width), verb.summary)
                    for verb in find_commands().values()
                    if verb.section == section
                ]
                formatter.write_dl(rows)
