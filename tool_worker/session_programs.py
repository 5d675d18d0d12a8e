"""Which session programs the workspaces of a worker have, by the pools that it serves, and what they need to start.

Holds: a program runs on our own Python with our own packages, read-only; a pool whose packages or whose
Chromium are missing is an error at the worker's start, not at the first call.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from broker.errors import UsageError

FOLDER = Path(__file__).resolve().parent
CHROMIUM_PLACES = (
    "/usr/lib/chromium/chromium",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/usr/lib/chromium-browser/chromium-browser",
    "/opt/google/chrome/chrome",
)
"""Where distributions keep the program itself; what is in the search path is often a script around it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A session program and what it takes.

    Attributes:
        file: beside this one.
        packages: that it imports.
        has_chromium: whether it is told where Chromium is.
    """

    file: str
    packages: tuple[str, ...]
    has_chromium: bool = False


PROGRAMS: Mapping[str, Program] = {
    "ipython": Program("sessions/ipython_session.py", ("ipykernel", "jupyter_client")),
    "browser": Program("browser/session.py", ("playwright", "PIL"), has_chromium=True),
}
"""By pool, which is also the tool's name."""


@dataclass(frozen=True, slots=True)
class SessionPrograms:
    """What a workspace host is told, and what its sandbox has to show.

    Attributes:
        commands: by tool.
        read_only: paths of this machine.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read_only: tuple[Path, ...] = ()


def session_programs(pools: Iterable[str], *, chromium: str = "") -> SessionPrograms:
    """Return the session programs for these pools.

    Args:
        chromium: Where Chromium is; empty: where it is usually installed.

    Raises:
        UsageError: something that one of them needs is not installed.
    """
    chosen = [pool for pool in pools if pool in PROGRAMS]
    if not chosen:
        return SessionPrograms()
    commands: dict[str, Sequence[str]] = {}
    # The folder's package has to be there too, or another one of that name could be taken for it.
    read_only = [Path(sys.prefix), *(FOLDER / name for name in ("__init__.py", "host", "sessions", "browser"))]
    for pool in chosen:
        program = PROGRAMS[pool]
        for package in program.packages:
            if find_spec(package) is None:
                raise UsageError(
                    f"The pool {pool} needs the package {package}, which is not installed.",
                    remedy=f'Install "deckhands[{pool}]", or do not serve the pool.',
                )
        arguments = []
        if program.has_chromium:
            executable = _chromium(chromium)
            arguments.append(str(executable))
            read_only.append(executable.parent)
        commands[pool] = [sys.executable, "-P", str(FOLDER / program.file), *arguments]
    return SessionPrograms(commands, tuple(read_only))


def _chromium(path: str) -> Path:
    """Return where Chromium is."""
    if path:
        found: str | None = shutil.which(path)
    else:
        found = next((place for place in CHROMIUM_PLACES if Path(place).is_file()), None)
        found = found or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        told = f"DECKHANDS_CHROMIUM is {path!r}, which is no program." if path else "Chromium is not installed."
        raise UsageError(
            f"The pool browser cannot be served: {told}",
            remedy="Install it (on Debian: apt-get install chromium), or set DECKHANDS_CHROMIUM to where it is.",
        )
    return Path(found).resolve()
