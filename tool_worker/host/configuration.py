"""The configuration of a workspace host: a JSON object on its standard input.

On standard input, because everybody who can see a process can read its command line and its environment.
"""

from __future__ import annotations

import os
import sys

from tool_worker.host.json_text import dumps, loads

# Descriptors that are open in a host when it starts. The sandbox has no path to any of them.
# The lock of a living host is its standard output, because a sandbox's outer process keeps that open as well: it is
# released when the last of them is gone.
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
    """How one host works.

    Args:
        workspace: Absolute path of the workspace, as the host sees it.
        identity: Device and number of the directory that this has to be: another may have been put in its place
            before it was bound.
        environment: The whole environment of the shell.
        ttl_seconds: How long the host lives on with nobody attached and no action running.
        idle_seconds: How long it lives on, attached to or not, when nothing runs but the shell that waits.
        resource_limits: Bounds for the shell and its children, by name (`RLIMIT_NOFILE`).
        no_change_timeout_seconds: After how much silence a command's call is answered, unless the call says otherwise.
        output_limit_bytes: Of longer output the head and the tail are kept, half of this each.
        writable: The directories below which alone anything may be changed; empty: no such bound.
        sessions: Tools that separate programs carry out, by name, and how each program is started.
        egress_port: Where on the loopback a proxy is lent a socket; 0: the workspace has no way out.
        announces_pid: Whether to write its process id to `PID_FD`; a sandbox may do that in its place.
        temporary: A directory that the host makes when it starts and removes with all in it when it ends; empty: none.
        memory: What to say of the memory limit when a program was killed; empty: there is no limit of ours.
        lost, kept: What ends with a host beside its programs, and what outlives it, for the notice of the next one.
        packages: The folder of the packages that read documents; empty: where Python looks.
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

    @property
    def temporary_directory(self) -> str:
        """Where programs of the workspace put temporary files."""
        return self.environment.get("TMPDIR") or "/tmp"  # noqa: S108  (the sandbox's own)

    @property
    def programs(self) -> dict[str, list[str]]:
        """Every tool that a program carries out: our own, and what `sessions` names."""
        package = os.path.dirname(os.path.abspath(__file__))
        own = [sys.executable, "-I", "-S"]
        return {
            "code": [*own, os.path.join(package, "search", "code_program.py"), self.packages],
            "acp": [*own, os.path.join(package, "acp", "acp_program.py")],
            **self.sessions,
        }

    def given_to(self, tool: str) -> dict[str, object]:
        """Return what each call of a program says of the workspace."""
        variables = {"variables": self.environment} if tool == "acp" else {}
        return {"memory": self.memory, **variables}

    def encode(self) -> bytes:
        """Return what `decode` reads."""
        return dumps(vars(self)).encode("ascii")

    @classmethod
    def decode(cls, text: bytes) -> HostConfiguration:
        """Read what `encode` wrote, by the same version of Deckhands."""
        fields = loads(text)
        assert isinstance(fields, dict)
        return cls(**fields)
