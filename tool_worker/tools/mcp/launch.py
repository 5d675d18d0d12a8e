"""Starts the program of an MCP server in a separate sandbox, with a separate directory.

Besides the system's files, the program needs its virtual environment.

Holds: the program sees neither a workspace nor the tool worker's files, and an agent's programs see neither it nor its
secrets. Only the environment and its base Python are shown, read-only, and none of it where an agent can write.
Otherwise an agent could have another directory mounted, or have its own program started as the server.
Differs: the original runs it in the agent's own sandbox, where every command can read its secrets.
Does not: show the files named by a program's arguments; `read_only` does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from broker.runtime import UsageError
from broker.secrets import MAX_LINKS, Mounts, resolve_links
from broker.tools import McpServerSpec
from tool_worker.sandbox import (
    SYSTEM_PATH,
    ContainerSettings,
    Enclosure,
    Sandbox,
    find_sandbox,
    list_interpreter_prefixes,
)
from tool_worker.tools.mcp.connection import ProgramLaunch
from tool_worker.workspace import EgressGate, make_proxied_command, proxy_environment, run_proxy

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
    """Yield the virtual environments of a program: those around it or its links, and the one in its shebang line."""
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


MOUNT_AT = "/server"
_FILTER_FD = 9


class SandboxedLaunch:
    """Starts servers in the sandbox that the node demands.

    Args:
        demanded: `auto`, `bwrap`, `docker` or `none`, as for workspaces.
        node_dir: Directory below which the servers' directories are created.
        gate: Rules of the servers' proxies.
        search_path: Search path for programs that the system does not have.
        closed: Directories that programs do not see by default: those that agents can write to, and our own.
    """

    def __init__(
        self,
        demanded: str,
        node_dir: Path,
        *,
        gate: EgressGate | None = None,
        containers: ContainerSettings | None = None,
        search_path: str = "",
        closed: Sequence[Path] = (),
    ) -> None:
        self._demanded = demanded
        self._node_dir = node_dir
        self._gate = gate or EgressGate()
        self._containers = containers
        self._search_path = search_path
        self._closed = (node_dir, *closed)
        self._sandbox: Sandbox | None = None

    def __call__(self, spec: McpServerSpec) -> ProgramLaunch:
        """Return how to start a server. The first call tests the sandbox, which takes a moment.

        Raises:
            SandboxUnavailable: The node's sandbox does not work here.
            EgressRefused: The server's hosts are limited, and there is no sandbox to enforce it.
            UsageError: The program's virtual environment is in a directory that agents can write to.
        """
        files = self._node_dir.absolute() / ".sandbox"
        if self._sandbox is None:
            self._sandbox = find_sandbox(self._demanded, files, self._containers)
        sandbox = self._sandbox
        directory = files / "mcp" / spec.name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = files / "mcp" / f"{spec.name}.log"
        mount_at = MOUNT_AT if sandbox.capabilities.confines_programs else str(directory)
        # Not our own gate: its ceiling is for conversations, and this list is the operator's.
        EgressGate().check(spec.allow, has_network=False, is_confined=sandbox.capabilities.confines_programs)
        address = files / "mcp" / f"{spec.name}.out" / "socket"
        needed = self._find_program_files(spec, sandbox)
        read_only = (*spec.read_only, *needed.read_only, *([address] if spec.allow else []))
        enclosure = Enclosure(directory, mount_at, has_network=spec.network, read_only=read_only, is_own=True)
        program = [needed.command, *spec.args]
        environment = {**sandbox.shell_environment(enclosure), "LOGNAME": "agent"}
        program_egress: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        if spec.allow:
            program = make_proxied_command(sandbox, address, program)
            environment |= proxy_environment()
            refusals = files / "mcp" / f"{spec.name}.egress.log"
            program_egress = partial(run_proxy, address, self._gate, spec.allow, log=refusals, name=spec.name)
        environment |= spec.env
        options = sandbox.options(replace(enclosure, environment_names=tuple(environment)))
        if not sandbox.system_call_filter:
            return ProgramLaunch(sandbox.command(program, options), environment, log, program_egress)
        filter_file = files / "mcp" / "filter"
        filter_file.write_bytes(sandbox.system_call_filter)
        # The SDK starts a command line and passes no descriptors: a shell opens the filter and executes the sandbox.
        opening = ["/bin/sh", "-c", f'exec {_FILTER_FD}<"$0"; exec "$@"', str(filter_file)]
        return ProgramLaunch(
            [*opening, *sandbox.command(program, options, _FILTER_FD)], environment, log, program_egress
        )

    def _find_program_files(self, spec: McpServerSpec, sandbox: Sandbox) -> ProgramFiles:
        if sandbox.capabilities.runs_images:  # the image has its own programs
            return ProgramFiles(spec.command)
        is_confined = sandbox.capabilities.confines_programs
        closed = self._closed if is_confined else ()
        return find_program_files(spec.command, search_path=self._search_path, shown=spec.read_only, closed=closed)
