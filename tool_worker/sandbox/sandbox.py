"""What a sandbox is: it turns a program into the command that runs it confined.

Holds: the program runs as Python's own interpreter, on the code in `code_root`; it gets only the environment and the
descriptors that it is given.
Does not: start anything; `host_launch` does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
HOST_CODE = ("__init__.py", "host")
"""The part of the package `tool_worker` that a workspace host runs."""
HOST_ID_VARIABLE = "DECKHANDS_HOST_ID"
"""In the environment of every shell: identifies processes that outlive their host."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Keeps programs from waiting for a key in a pager and from drawing on a screen that nobody sees.
PLAIN_TERMINAL = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "LANG": "C.UTF-8"}

OWN_PROGRAMS = ".local/bin"
"""The directory below the home where pip installs commands."""
# There is nothing that packages of the agent could break: the system's own directories are read-only.
OWN_PACKAGES = {"PIP_BREAK_SYSTEM_PACKAGES": "1"}

TEMPORARY_LIMIT_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits for the shell of a workspace and everything it starts; None: no limit of ours.

    Attributes:
        processes: at once. Without control groups the kernel exempts the machine's root from it.
        open_files: of one process.
        file_bytes: size of a file that is written.
        memory_bytes: of all of them together where there are control groups, else of each process; half of the
            machine's if nobody says otherwise.
    """

    processes: int | None = 4096
    open_files: int | None = 16384
    file_bytes: int | None = 16 * 2**30
    memory_bytes: int | None = field(
        default_factory=lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )

    @property
    def temporary_bytes(self) -> int:
        """Bound of a temporary directory: all of them are in memory, and full ones must leave room for programs."""
        return min(TEMPORARY_LIMIT_BYTES, (self.memory_bytes or 8 * TEMPORARY_LIMIT_BYTES) // 8)

    def by_name(self, *, are_processes_counted_apart: bool, is_memory_bounded: bool = True) -> dict[str, int]:
        """Return the limits by the kernel's names; core dumps are always off.

        Args:
            are_processes_counted_apart: Whether the kernel counts only what runs in the sandbox. Otherwise it would
                count everything of the same user, on the whole machine.
            is_memory_bounded: Whether the memory of all programs together is bounded otherwise, or need not be.
        """
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": self.processes if are_processes_counted_apart else None,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_DATA": None if is_memory_bounded else self.memory_bytes,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Enclosure:
    """What a confined program sees of the machine besides the system itself.

    Attributes:
        workspace: the one directory that it may change.
        mount_at: the path at which it finds the workspace.
        has_network: whether it shares the machine's network; otherwise it has a private loopback and nothing else.
        read_only: further directories and files that it may read.
        temporary_bytes: bound of each of its directories in memory.
        home, temporary: the directories that are its home and its /tmp; None: directories in memory.
        is_own: whether the workspace is a directory of ours, and not of the user's.
        image, labels, limits, entrance: of a container: which one, its marks, its bounds, and the socket at which its
            host gets its descriptors.
        environment_names: variables that a container takes over from the process that starts it.
        ends_with_starter: whether it is killed, with all it started, when the thread that started it ends.
    """

    workspace: Path
    mount_at: str
    has_network: bool = False
    read_only: tuple[Path, ...] = ()
    temporary_bytes: int = TEMPORARY_LIMIT_BYTES
    home: Path | None = None
    temporary: Path | None = None
    is_own: bool = False
    image: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    entrance: Path | None = None
    environment_names: tuple[str, ...] = ()
    ends_with_starter: bool = False


@dataclass(frozen=True, slots=True)
class HostDescriptors:
    """Descriptors that are open in the command line of a host. A sandbox that confines nothing uses none of them.

    Attributes:
        pid: the sandbox writes `{"child-pid": …}` to it, naming the process whose death ends all others.
        options: holds the options, each followed by a NUL; on the command line everybody inside could read them.
        system_calls: holds the sandbox's filter, if it has one.
    """

    pid: int
    options: int
    system_calls: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sandbox can do. Callers ask for this, never for its name.

    Attributes:
        confines_programs: keeps programs from the machine; they have a separate process namespace.
        inherits_descriptors: programs get the descriptors of the process that starts them; otherwise a host receives
            them through a socket.
        runs_images: programs run on the files of a container image instead of this machine's.
        uses_control_groups: programs can be put into a control group of ours; where no group can be made, resource
            limits bound each process.
    """

    confines_programs: bool = False
    inherits_descriptors: bool = True
    runs_images: bool = False
    uses_control_groups: bool = False


class Sandbox(Protocol):
    """One way to confine a program."""

    @property
    def name(self) -> str:
        """Its name in settings and events."""
        ...

    @property
    def code_root(self) -> str:
        """Where a confined program finds the package `tool_worker`, of which only `host` need be there."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def reach(self) -> str:
        """What of the machine programs in it can reach all the same, as the end of a sentence."""
        ...

    @property
    def system_call_filter(self) -> bytes:
        """What a filter of system calls, as a program for the kernel, refuses to all in it; empty: no filter."""
        ...

    def reason_unavailable(self) -> str | None:
        """Try it and say why it does not work on this machine, or None if it does. Takes up to some seconds."""
        ...

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:
        """Return the environment that a shell in it starts with."""
        ...

    def keeps_home(self, enclosure: Enclosure) -> bool:
        """Say whether the home of an enclosure can be a directory, and not memory."""
        ...

    def keeps_temporary(self, enclosure: Enclosure) -> bool:
        """Say whether its temporary directory can be one as well; asked only where the home can."""
        ...

    def writable(self, enclosure: Enclosure) -> Sequence[str]:
        """Return the directories, as programs in it see them, below which they can change anything; empty: all."""
        ...

    def options(self, enclosure: Enclosure) -> Sequence[str]:
        """Return the sandbox's options for this enclosure; empty if it takes none."""
        ...

    def command(
        self, program: Sequence[str], options: Sequence[str], descriptors: HostDescriptors | int | None = None
    ) -> Sequence[str]:
        """Return the command line, beginning with an absolute path, that runs `program` confined.

        Args:
            options: From `options`; not looked at if a host's descriptors are given.
            descriptors: For a host, which then is the first process of its namespace, if it gets one. A number: the
                descriptor of the filter alone, for a program that gets no environment. None: no filter.
        """
        ...

    def kill_stragglers(self, host_id: str) -> None:
        """Kill what outlived the host with this id, wait until it is gone, and remove its temporary files.

        May take a while.
        """
        ...


@functools.cache
def interpreter() -> str:
    """Return the real path of the running Python, outside any virtual environment."""
    return os.path.realpath(sys.executable)


@functools.cache
def interpreter_prefixes() -> tuple[Path, ...]:
    """Return the directories that this Python needs to start, as they are written and as they really are."""
    found = [Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(interpreter()).parent.parent]
    return tuple(dict.fromkeys([*found, *(path.resolve() for path in found)]))
