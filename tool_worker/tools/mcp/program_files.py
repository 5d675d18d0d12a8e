"""Finds the files that an MCP server's program needs besides the system's: its virtual environment.

Holds: only the environment and its base Python are shown, read-only, and none of it where an agent can write. Otherwise
an agent could have another directory mounted, or have its own program started as the server.
Does not: show files that a program's arguments name; `read_only` does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.runtime import UsageError
from broker.secrets import MAX_LINKS, Mounts, resolve_links
from tool_worker.sandbox import SYSTEM_PATH, list_interpreter_prefixes

MARK = "pyvenv.cfg"
"""Every virtual environment has this file (PEP 405)."""
MAX_HEAD_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """A program, and the paths that its sandbox must show.

    Attributes:
        command: Its path, or its name if it belongs to the system.
        read_only: The environment and its Python, both as written and resolved.
    """

    command: str
    read_only: tuple[Path, ...] = ()


def find_program_files(
    command: str, *, search_path: str = "", shown: Iterable[Path] = (), closed: Sequence[Path] = ()
) -> ProgramFiles:
    """Find a program and the files that it needs.

    Args:
        command: An absolute path, or a name. A name that is not the system's is searched beside our own Python, and
            then in `search_path`.
        shown: Paths that the operator shows to the program anyway.
        closed: Directories that agents can write to, and our own.

    Raises:
        UsageError: A needed file is in one of the closed directories.
    """
    path = _find_program(command, search_path)
    if path is None:
        return ProgramFiles(command)
    environments = dict.fromkeys(_find_environments(path))
    if not environments:
        return ProgramFiles(command)
    files = [file for environment in environments for file in (environment, *_find_base_prefixes(environment))]
    # For a link from outside, its target is started: the link itself is not visible in the sandbox.
    inside = [
        name for name in _follow_links(path) if any(name.is_relative_to(environment) for environment in environments)
    ]
    path = inside[0] if inside else path
    files += [] if inside else [path]
    needed = dict.fromkeys(name for file in files for name in (file, file.resolve()))
    open_anyway = (Path("/usr"), *list_interpreter_prefixes(), *shown)
    missing = [file for file in needed if not any(file.is_relative_to(one) for one in open_anyway)]
    for file in missing:
        _check_closed(file, closed)
    return ProgramFiles(str(path), tuple(missing))


def _find_program(command: str, search_path: str) -> Path | None:
    """Return the path of a program outside the system; None if it is the system's, or not found."""
    if "/" in command:
        path = Path(os.path.normpath(command))
        return path if path.is_absolute() and path.is_file() else None
    if shutil.which(command, path=SYSTEM_PATH):
        return None
    found = shutil.which(command, path=f"{Path(sys.executable).parent}:{search_path}")
    return Path(found) if found and Path(found).is_absolute() else None


def _find_environments(program: Path) -> Iterator[Path]:
    """Yield the virtual environments of a program: those around it or its links, and that of its shebang line."""
    for path in (program, *_find_interpreters(program)):
        for name in _follow_links(path):
            root = name.parent.parent
            if name.parent.name == "bin" and root != Path("/") and (root / MARK).is_file():
                yield root


def _follow_links(path: Path) -> Iterator[Path]:
    """Yield a path, and the targets of its chain of links."""
    for _ in range(MAX_LINKS):
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _find_interpreters(program: Path) -> list[Path]:
    """Return the interpreter of a script's shebang; for a long path, pip writes a shell line that contains it."""
    with program.open("rb") as file:
        head = file.read(MAX_HEAD_BYTES)
    first, _, rest = head.partition(b"\n")
    if not first.startswith(b"#!"):
        return []
    words = first[2:].split()[:1]
    if words == [b"/bin/sh"] and rest.startswith(b"'''exec' "):
        path = rest.partition(b" ")[2]
        words = path.split(b'"')[1:2] if path.startswith(b'"') else path.split()[:1]
    paths = [Path(os.fsdecode(word)) for word in words if b"\0" not in word]
    return [path for path in paths if path.is_absolute()]


def _find_base_prefixes(environment: Path) -> list[Path]:
    """Return the installation directories of an environment's base Python, if they look like one."""
    programs = list(_follow_links(environment / "bin" / "python"))[1:]
    homes = [program.parent for program in programs]
    with (environment / MARK).open("rb") as file:
        lines = os.fsdecode(file.read(MAX_HEAD_BYTES)).splitlines()
    settings = (line.partition("=") for line in lines)
    homes += [Path(value.strip()) for name, _, value in settings if name.strip() == "home"]
    homes += [home.resolve() for home in homes]
    found = dict.fromkeys(home.parent for home in homes if home.is_absolute() and home.name == "bin")
    possible = [prefix for prefix in found if prefix not in (environment, Path("/"))]
    return [prefix for prefix in possible if any(prefix.glob("lib/python3*/os.py"))]


def _check_closed(file: Path, closed: Sequence[Path]) -> None:
    mounts = Mounts.current()
    for place in closed:
        theirs = mounts.locate(place.resolve())
        for name in resolve_links(file):
            ours = mounts.locate(name)
            if ours.is_in(theirs) or theirs.is_in(ours):
                raise UsageError(
                    f"The program needs {file}, and {place} is closed to it: agents can write there, or it is "
                    "Deckhands' own.",
                    remedy="Install it elsewhere, or name the directory under `read_only` in its entry.",
                )
