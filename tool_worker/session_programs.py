"""Which session programs the workspaces of a worker have, by the pools that it serves, and what they need to start.

Holds: a program runs on our own Python with our own packages, read-only, on the code in `sessions`; a pool whose
packages are missing is an error at the worker's start, not at the first call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from broker.errors import UsageError

FOLDER = Path(__file__).resolve().parent

PROGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ipython": ("ipython_session.py", ("ipykernel", "jupyter_client")),
}
"""By pool, which is also the tool's name: the program, and the packages that it imports."""


@dataclass(frozen=True, slots=True)
class SessionPrograms:
    """What a workspace host is told, and what its sandbox has to show.

    Attributes:
        commands: by tool.
        read_only: paths of this machine.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read_only: tuple[Path, ...] = ()


def session_programs(pools: Iterable[str]) -> SessionPrograms:
    """Return the session programs for these pools.

    Raises:
        UsageError: a package that one of them needs is not installed.
    """
    chosen = [pool for pool in pools if pool in PROGRAMS]
    for pool in chosen:
        for package in PROGRAMS[pool][1]:
            if find_spec(package) is None:
                raise UsageError(
                    f"The pool {pool} needs the package {package}, which is not installed.",
                    remedy=f'Install "deckhands[{pool}]", or do not serve the pool.',
                )
    if not chosen:
        return SessionPrograms()
    commands = {pool: [sys.executable, "-P", str(FOLDER / "sessions" / PROGRAMS[pool][0])] for pool in chosen}
    # The folder's package has to be there too, or another one of that name could be taken for it.
    return SessionPrograms(commands, (Path(sys.prefix), FOLDER / "__init__.py", FOLDER / "sessions"))
