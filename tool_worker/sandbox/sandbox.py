"""The interface of a sandbox: it turns a program into the command that runs it confined.

Holds: the program is Python's own interpreter running the code in `code_root`. It gets only the given environment and
descriptors.
Does not: start anything; `host_launch` does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
HOST_CODE = ("__init__.py", "host")
"""The part of the package `tool_worker` that a workspace host runs."""
DOCUMENT_PACKAGES = ("pypdf",)
"""What reads documents there."""
HOST_ID_VARIABLE = "DECKHANDS_HOST_ID"
"""In the environment of every shell: identifies processes that outlive their host."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Keep programs from waiting for a key in a pager and from drawing on an invisible screen.
PLAIN_TERMINAL = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "LANG": "C.UTF-8"}

TEMPORARY_LIMIT_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits for the shell of a workspace and all its child processes. None: Deckhands sets no limit.

    Attributes:
        processes: maximum number at the same time. Without control groups, the kernel exempts the machine's root.
        open_files: per process.
        file_bytes: maximum size of a written file.
        memory_bytes: with control groups, the total of all programs; else per process. The default is half of the
            machine's memory.
    """

    processes: int | None = 4096
    open_files: int | None = 16384
    file_bytes: int | None = 16 * 2**30
    memory_bytes: int | None = field(
        default_factory=lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )

    @property
    def temporary_bytes(self) -> int:
        """The limit of a temporary directory. These directories are in memory and must leave room for programs."""
        return min(TEMPORARY_LIMIT_BYTES, (self.memory_bytes or 8 * TEMPORARY_LIMIT_BYTES) // 8)

    def by_name(self, *, are_processes_counted_apart: bool, is_memory_bounded: bool = True) -> dict[str, int]:
        """Return the limits by the kernel's names; core dumps are always off.

        Args:
            are_processes_counted_apart: Whether the kernel counts only the sandbox's processes. Otherwise it counts all
                processes of the same user on the whole machine.
            is_memory_bounded: Whether the memory of all programs together is limited elsewhere, or needs no limit.
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
    """The part of the machine that a confined program can access, besides the system itself.

    Attributes:
        workspace: the only directory that it may change.
        mount_at: the path of the workspace inside the sandbox.
        has_network: whether it shares the machine's network; otherwise it has only a private loopback interface.
        read_only: additional readable directories and files.
        temporary_bytes: limit of each of its directories in memory.
        home, temporary: the directories for its home and its /tmp; None: directories in memory.
        is_own: whether the workspace is a directory of ours, not of the user's.
        image, labels, limits, entrance: for a container: its image, its labels, its limits, and the socket through
            which its host gets its descriptors.
        environment_names: variables that a container takes over from the process that starts it.
        ends_with_starter: whether the program and all its processes are killed when the thread that started it ends.
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
    """Descriptors that are open in the command line of a host. A sandbox without confinement uses none of them.

    Attributes:
        pid: the sandbox writes `{"child-pid": …}` to it: the pid of the process whose death ends all others.
        options: contains the options, each followed by a NUL. On the command line, all programs inside could read them.
        system_calls: contains the sandbox's filter, if it has one.
    """

    pid: int
    options: int
    system_calls: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a sandbox. Callers check these, never its name.

    Attributes:
        confines_programs: separates programs from the machine; they have their own process namespace.
        inherits_descriptors: programs get the descriptors of the process that starts them; otherwise a host receives
            them through a socket.
        runs_images: programs run on the files of a container image instead of this machine's.
        uses_control_groups: programs can be put into a control group of ours. If no group can be created, resource
            limits apply per process.
        packages_at: the directory where programs see the packages that read documents. Empty if these are `read_only`
            paths of an enclosure.
        start_limit_seconds: how long the start of a host may take that receives its descriptors through a socket.
    """

    confines_programs: bool = False
    inherits_descriptors: bool = True
    runs_images: bool = False
    uses_control_groups: bool = False
    packages_at: str = ""
    start_limit_seconds: float = 60.0


class Sandbox(Protocol):
    """One way to confine a program."""

    @property
    def name(self) -> str:
        """Its name in settings and events."""
        ...

    @property
    def code_root(self) -> str:
        """The path of the package `tool_worker` inside the sandbox. Only its part `host` must be there."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Its features."""
        ...

    @property
    def reach(self) -> str:
        """The parts of the machine that confined programs can still reach, phrased as the end of a sentence."""
        ...

    @property
    def system_call_filter(self) -> bytes:
        """The filter of system calls for all programs, as a program for the kernel; empty for no filter."""
        ...

    def reason_unavailable(self) -> str | None:
        """Try the sandbox. Return why it does not work on this machine; None if it works. May take some seconds."""
        ...

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:
        """Return the initial environment of a shell inside."""
        ...

    def keeps_home(self, enclosure: Enclosure) -> bool:
        """Return whether the home of an enclosure can be a directory instead of memory."""
        ...

    def keeps_temporary(self, enclosure: Enclosure) -> bool:
        """Return whether /tmp can be a directory on disk; called only if the home is one."""
        ...

    def writable(self, enclosure: Enclosure) -> Sequence[str]:
        """Return the writable directories, as programs inside see them; empty: all."""
        ...

    def forbidden_addresses(self) -> Sequence[str]:
        """Return further addresses, `HOST:PORT`, that a program without network must not reach; for the self-test."""
        ...

    def options(self, enclosure: Enclosure) -> Sequence[str]:
        """Return the sandbox's options for this enclosure; empty if it takes none."""
        ...

    def command(
        self, program: Sequence[str], options: Sequence[str], descriptors: HostDescriptors | int | None = None
    ) -> Sequence[str]:
        """Return the command line that runs `program` confined. It starts with an absolute path.

        Args:
            options: From `options`; ignored if a host's descriptors are given.
            descriptors: The descriptors of a host, which becomes the first process of its namespace, if there is one. A
                number is the descriptor of the filter, for a program without a host. None: no filter.
        """
        ...

    def remove_dead(self, root: Path, is_alive: Callable[[str], bool]) -> None:
        """Remove leftovers of killed tool workers and hosts; called before the first use by a tool worker.

        Args:
            root: the node's directory of workspaces, as in the label `root` of an enclosure.
            is_alive: whether a conversation, given by its id, has a living host.

        Raises:
            SandboxUnavailable: they cannot be removed.
        """
        ...

    def kill_stragglers(self, host_id: str) -> None:
        """Kill processes that outlived the host with this id, wait for their end, and remove their temporary files.

        May take a while.
        """
        ...


@functools.cache
def find_interpreter() -> str:
    """Return the real path of the running Python, outside any virtual environment."""
    return os.path.realpath(sys.executable)


@functools.cache
def find_document_packages() -> Path | None:
    """Return the folder of the package that reads PDF files, or None if it is not installed."""
    found = find_spec("pypdf")
    return Path(found.origin).parents[1] if found is not None and found.origin else None


@functools.cache
def list_interpreter_prefixes() -> tuple[Path, ...]:
    """Return the directories that this Python needs to start, both as named and with links resolved."""
    found = [Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(find_interpreter()).parent.parent]
    return tuple(dict.fromkeys([*found, *(path.resolve() for path in found)]))


def make_agent_environment(home: str, system_path: str = SYSTEM_PATH) -> dict[str, str]:
    """Return the shell's environment where a sandbox makes the user, whose packages are installed in its home."""
    return {
        **PLAIN_TERMINAL,
        # Safe, because the agent's packages cannot break the system: its directories are read-only.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PATH": f"{home}/.local/bin:{system_path}",
        "HOME": home,
        "USER": "agent",
        "SHELL": "/bin/bash",
    }
