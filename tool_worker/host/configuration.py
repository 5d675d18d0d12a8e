"""The configuration of a workspace host: a JSON object on its standard input.

Standard input keeps it private, while other processes can see a process's command line and environment.
"""

from __future__ import annotations

import os
import sys

from tool_worker.host.json_text import dumps, loads

# Descriptors that are open in a host when it starts. The sandbox has no path to any of them. The lock that shows that a
# host is alive is its standard output. A sandbox's outer process keeps standard output open as well, so the lock is
# released when both have exited.
ALIVE_FD = 1
LISTENER_FD = 3
JOURNAL_FD = 4
HISTORY_FD = 5
PID_FD = 6
OPTIONS_FD = 7
FILTER_FD = 8

DEFAULT_NO_CHANGE_TIMEOUT_SECONDS = 30.0
DEFAULT_OUTPUT_LIMIT_BYTES = 256 * 1024


class HostConfiguration:
    """The settings of one host.

    Args:
        workspace: Absolute path of the workspace, as the host sees it.
        identity: Device and inode number that the workspace must have; it may have been replaced before it was mounted.
        environment: The whole environment of the shell.
        ttl_seconds: How long the host lives with no client attached and no action running.
        idle_seconds: How long the host lives, with or without clients, when nothing runs but an idle shell.
        resource_limits: Bounds for the shell and its children, by name (`RLIMIT_NOFILE`).
        no_change_timeout_seconds: Silence after which a command's call is answered, unless the call sets another limit.
        output_limit_bytes: Longer output is cut to its head and its tail, half of this size each.
        writable: The only directories below which files may be changed; empty for no bound.
        sessions: Tools that separate programs run: the command line of each program by tool name.
        egress_port: Loopback port whose listening socket is lent to the egress proxy; 0: the workspace has no egress.
        announces_pid: Whether to write its process id to `PID_FD`; a sandbox may do that instead.
        temporary: A directory that the host creates at its start and removes with its contents at its end; empty: none.
        memory: The explanation for a program killed by the memory limit; empty if there is no limit.
        lost, kept: What a host's end loses besides its programs, and what survives it; for the notice of the next host.
        packages: The folder of the packages that read documents; empty for Python's default path.
        shell_state: What the first shell of a fork restores: `script` and `directory`. None for a new shell.
    """

    def __init__(
        self,
        *,
        workspace: str,
        identity: list[int],
        environment: dict[str, str],
        ttl_seconds: float,
        idle_seconds: float,
        resource_limits: dict[str, int],
        no_change_timeout_seconds: float = DEFAULT_NO_CHANGE_TIMEOUT_SECONDS,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
        writable: list[str] | None = None,
        announces_pid: bool = False,
        sessions: dict[str, list[str]] | None = None,
        egress_port: int = 0,
        temporary: str = "",
        memory: str = "",
        lost: str = "",
        kept: str = "all files",
        packages: str = "",
        shell_state: dict[str, str | int] | None = None,
    ) -> None:
        self.workspace = workspace
        self.identity = identity
        self.environment = environment
        self.ttl_seconds = ttl_seconds
        self.idle_seconds = idle_seconds
        self.resource_limits = resource_limits
        self.no_change_timeout_seconds = no_change_timeout_seconds
        self.output_limit_bytes = output_limit_bytes
        self.writable = writable or []
        self.announces_pid = announces_pid
        self.sessions = sessions or {}
        self.egress_port = egress_port
        self.temporary = temporary
        self.memory = memory
        self.lost = lost
        self.kept = kept
        self.packages = packages
        self.shell_state = shell_state

    @property
    def temporary_directory(self) -> str:
        """The directory for temporary files of the workspace's programs."""
        return self.environment.get("TMPDIR") or "/tmp"  # noqa: S108  (the sandbox's own)

    @property
    def programs(self) -> dict[str, list[str]]:
        """The command line of each session program by its tool: our own programs, and those in `sessions`."""
        package = os.path.dirname(os.path.abspath(__file__))
        own = [sys.executable, "-I", "-S"]
        return {
            "code": [*own, os.path.join(package, "search", "code_program.py"), self.packages],
            "acp": [*own, os.path.join(package, "acp", "acp_program.py")],
            **self.sessions,
        }

    def fields_for(self, tool: str) -> dict[str, object]:
        """Return the fields about the workspace that every call of this tool's program receives."""
        variables = {"variables": self.environment} if tool == "acp" else {}
        return {"memory": self.memory, **variables}

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads."""
        return dumps(vars(self)).encode("ascii")

    @classmethod
    def decode(cls, text: bytes) -> HostConfiguration:
        """Parse the output of `encode`, written by the same version of Deckhands."""
        fields = loads(text)
        assert isinstance(fields, dict)
        return cls(**fields)
