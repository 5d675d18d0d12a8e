"""The session programs of a worker's workspaces, chosen by its pools, and their requirements.

Holds: a program runs on our own Python with our own packages, read-only. Missing packages or a missing Chromium are an
error at the worker's start, not at the first call. In a container, a program runs with the image's software; if that
is incomplete, each call is answered with the reason.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.runtime import UsageError
from tool_worker.host.sessions.programs import PROGRAMS, find_chromium
from tool_worker.sandbox import CODE_ROOT, HOST_CODE, PACKAGE_ROOT, find_capabilities

PACKAGE = PACKAGE_ROOT / "tool_worker"


@dataclass(frozen=True, slots=True)
class SessionPrograms:
    """The commands for a workspace host, and the paths that its sandbox must show.

    Attributes:
        commands: Command line by tool.
        read_only: Paths of this machine.
        in_containers: Command line by tool, for workspaces in containers.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read_only: tuple[Path, ...] = ()
    in_containers: Mapping[str, Sequence[str]] = field(default_factory=dict)


def find_session_programs(pools: Iterable[str], *, chromium: str = "", sandbox: str = "") -> SessionPrograms:
    """Return the session programs for these pools.

    Args:
        chromium: Path of Chromium; if empty, the usual places are searched.
        sandbox: The sandbox that the node demands; for containers, this machine needs no packages.

    Raises:
        UsageError: A required program or package is not installed.
    """
    chosen = [pool for pool in pools if pool in PROGRAMS]
    if not chosen:
        return SessionPrograms()
    started = f"{CODE_ROOT}/tool_worker/host/sessions/image_start.py"
    in_containers = {pool: ["python3", "-s", "-P", started, pool] for pool in chosen}
    capabilities = find_capabilities(sandbox)
    if capabilities is not None and capabilities.runs_images:
        return SessionPrograms(in_containers=in_containers)
    commands: dict[str, Sequence[str]] = {}
    # The parent package must be shown, too; otherwise another package of that name could replace it.
    read_only = [Path(sys.prefix), *(PACKAGE / name for name in HOST_CODE)]
    for pool in chosen:
        program = PROGRAMS[pool]
        for package in program.missing:
            raise UsageError(
                f"The pool {pool} needs the package {package}, which is not installed.",
                remedy=f'Install "deckhands[{pool}]", or do not serve the pool.',
            )
        arguments = []
        if program.has_chromium:
            executable = _find_chromium(chromium)
            arguments.append(str(executable))
            read_only.append(executable.parent)
        commands[pool] = [sys.executable, "-s", "-P", str(PACKAGE / program.file), *arguments]
    return SessionPrograms(commands, tuple(read_only), in_containers)


def _find_chromium(path: str) -> Path:
    """Return the path of Chromium."""
    found = shutil.which(path) if path else find_chromium()
    if found is None:
        problem = f"DECKHANDS_CHROMIUM is {path!r}, which is not a program." if path else "Chromium is not installed."
        raise UsageError(
            f"The pool browser cannot be served: {problem}",
            remedy="Install it (on Debian: apt-get install chromium), or set DECKHANDS_CHROMIUM to where it is.",
        )
    return Path(found).resolve()
