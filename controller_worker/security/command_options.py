"""The meaning of a program's options: the tables `programs.toml` (understood programs) and `gtfobins.toml`.

Holds: an unlisted option is `UNKNOWN`, unless all options of the program that matter are listed. An abbreviation of an
option that starts, writes or sends something counts as that option.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any

from controller_worker.security.path_risk import LOW, MEDIUM, UNCLEAR, Rating

Arguments = Sequence[str | None]
"""The words after the program's name; None for a word that is unknown before it runs."""


class Use(Enum):
    """The use that a program makes of an argument."""

    NOTHING = "flags"
    VALUE = "values"
    READS = "reads"
    WRITES = "writes"
    RUNS = "runs"
    SENDS = "sends"
    OPERAND = "operand"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Program:
    """One program of the tables.

    Attributes:
        options: each listed option, and how its value is used.
        operands: how its operands are used; see `programs.toml`.
        is_listed: it has only the listed options; any other is not understood.
        here: whether it reads or writes the current directory, too.
        is_capable: it can start, write or send something besides its purpose.
        starts_operand: an operand names a program that it starts.
        is_opaque: it starts programs or sends data, independently of its options.
        least: its lowest rating.
    """

    options: Mapping[str, Use]
    operands: str = "text"
    is_listed: bool = False
    here: str = ""
    is_capable: bool = False
    starts_operand: bool = False
    is_opaque: bool = False
    least: Rating = UNCLEAR


DANGEROUS_USES = (Use.RUNS, Use.SENDS, Use.WRITES)
SHELL_FUNCTIONS = frozenset(
    ("shell", "command", "reverse-shell", "bind-shell", "library-load", "privilege-escalation", "upload")
)
LEAST: Mapping[str, Rating] = {"LOW": LOW, "MEDIUM": MEDIUM, "UNCLEAR": UNCLEAR}
TAKES_VALUE = frozenset((Use.VALUE, Use.READS, Use.WRITES, Use.RUNS, Use.SENDS))


@cache
def load_programs() -> tuple[Mapping[str, Program], Mapping[str, Program]]:
    """Return the understood programs, and those of which only dangerous functions are known."""
    listed = _load_table("gtfobins.toml")
    known = {name: _to_known(fields) for name, fields in listed.items()}
    understood = {}
    for fields in _load_table("programs.toml")["program"]:
        options = _to_options(fields)
        for name in fields["names"].split():
            understood[name] = Program(
                options=options,
                operands=fields["operands"],
                is_listed=fields.get("rest") != "harmless",
                here=fields.get("here", ""),
                is_capable=name in known or any(use in DANGEROUS_USES for use in options.values()),
                least=LEAST[fields.get("least", "LOW")],
            )
    return understood, known


def _load_table(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / name).read_text(encoding="utf-8"))


def _to_options(fields: Mapping[str, Any]) -> dict[str, Use]:
    # Where an option has several uses, the more dangerous one comes last.
    uses = (Use.NOTHING, Use.VALUE, Use.READS, Use.WRITES, Use.SENDS, Use.RUNS)
    return {option: use for use in uses for option in fields.get(use.value, "").split()}


def _to_known(fields: Mapping[str, Any]) -> Program:
    starts_operand = bool(fields.get("starts_operand", False))
    is_plain = starts_operand or any(use.value in fields for use in DANGEROUS_USES)
    is_opaque = not is_plain and not SHELL_FUNCTIONS.isdisjoint(fields["functions"].split())
    return Program(_to_options(fields), is_capable=True, starts_operand=starts_operand, is_opaque=is_opaque)


def split_bundle(program: Program, arguments: Arguments) -> Arguments:
    """Return tar's arguments with its first word as options: `tar xf a.tar` is `tar -xf a.tar`.

    In that old form, the values follow the word, in the order of their letters.
    """
    first = arguments[0] if arguments else None
    if first is None or first.startswith("-"):
        return arguments
    left, words = list(arguments[1:]), list[str | None]()
    for letter in first:
        words.append(f"-{letter}")
        if program.options.get(f"-{letter}") in TAKES_VALUE and left:
            words.append(left.pop(0))
    return [*words, *left]


def parse_arguments(program: Program, arguments: Arguments) -> Iterator[tuple[Use, str | None]]:
    """Yield how each argument is used: an option's use with its value, or `OPERAND` with the operand."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            yield from ((Use.OPERAND, operand) for operand in left)
            return
        if word is None or word == "-" or not word.startswith("-"):
            yield Use.OPERAND, word
        elif word.partition("=")[0] in program.options or word.startswith("--"):
            yield from _parse_whole(program, word, left)
        else:
            yield from _parse_letters(program, word, left)


def _parse_whole(program: Program, word: str, left: list[str | None]) -> Iterator[tuple[Use, str | None]]:
    name, has_value, value = word.partition("=")
    use = program.options.get(name) or _find_abbreviated(program, name)
    if use is None:
        if program.is_listed:
            yield Use.UNKNOWN, word
        elif has_value:
            yield Use.READS, value
        return
    if use not in TAKES_VALUE:
        yield use, None
    elif has_value:
        yield use, value
    else:
        yield use, left.pop(0) if left else ""


def _find_abbreviated(program: Program, name: str) -> Use | None:
    """Return the most dangerous use among the long options that a word may abbreviate (getopt_long)."""
    uses = {use for option, use in program.options.items() if len(name) > 2 and option.startswith(name)}
    return next((use for use in DANGEROUS_USES if use in uses), None)


def _parse_letters(program: Program, word: str, left: list[str | None]) -> Iterator[tuple[Use, str | None]]:
    """Read a word such as `-xvf` or `-ofile`."""
    if re.fullmatch(r"-\d+", word) and "-1" not in program.options:
        yield (Use.NOTHING, None) if program.operands in ("reads", "output", "text") else (Use.UNKNOWN, word)
        return
    has_rest = False
    for position in range(1, len(word)):
        use = program.options.get(f"-{word[position]}")
        if use is None and program.is_listed:
            yield Use.UNKNOWN, word
            return
        if use is not None and (use in TAKES_VALUE or use is Use.OPERAND):
            yield use, word[position + 1 :] or (left.pop(0) if left else "")
            return
        has_rest = has_rest or use is None
    if has_rest:
        # The rest may be a path: `grep -f/etc/shadow`.
        path = re.search(r"[/~.].*", word, re.DOTALL)
        yield from ((Use.READS, value) for value in (word[2:], path[0] if path else ""))
