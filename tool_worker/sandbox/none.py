"""No sandbox: programs run as the tool worker's user, with all its permissions.

Holds: it is used only if configured by name. Orphans of a dead host are found by a mark in their environment and
killed. `TMPDIR` names a directory that is removed with the host.
Does not: protect anything, including the host's own journal and socket. Does not find an orphan that dropped its
environment.
"""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tool_worker.sandbox.sandbox import (
    HOST_ID_VARIABLE,
    PACKAGE_ROOT,
    PLAIN_TERMINAL,
    SYSTEM_PATH,
    Capabilities,
    Enclosure,
    HostDescriptors,
    find_interpreter,
)

DEATH_LIMIT_SECONDS = 5.0
"""The longest wait for a killed process."""


def find_temporary_directory(host_id: str) -> Path:
    """Return the directory for a host's temporary files. The path is short, because they include sockets."""
    return Path(tempfile.gettempdir(), f"deckhands-{host_id[:16]}")


class NoSandbox:
    """Runs programs without confinement; a `Sandbox`."""

    name = "none"
    code_root = str(PACKAGE_ROOT)
    capabilities = Capabilities()
    reach = "all that this worker's user can: every workspace of this node, its processes, and the machine's network"
    system_call_filter = b""

    def reason_unavailable(self) -> str | None:
        """See `Sandbox.reason_unavailable`."""
        return None

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.shell_environment`."""
        account = pwd.getpwuid(os.getuid())
        return {
            **PLAIN_TERMINAL,
            "PATH": f"{SYSTEM_PATH}:{Path(find_interpreter()).parent}",
            "HOME": account.pw_dir,
            "USER": account.pw_name,
            "SHELL": "/bin/bash",
        }

    def keeps_home(self, enclosure: Enclosure) -> bool:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.keeps_home`."""
        return False

    def keeps_temporary(self, enclosure: Enclosure) -> bool:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.keeps_temporary`."""
        return False

    def writable(self, enclosure: Enclosure) -> Sequence[str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.writable`."""
        return ()

    def forbidden_addresses(self) -> Sequence[str]:
        """See `Sandbox.forbidden_addresses`."""
        return ()

    def options(self, enclosure: Enclosure) -> Sequence[str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.options`."""
        return ()

    def command(
        self,
        program: Sequence[str],
        options: Sequence[str],  # noqa: ARG002  (the protocol's)
        descriptors: HostDescriptors | int | None = None,  # noqa: ARG002  (the protocol's)
    ) -> Sequence[str]:
        """See `Sandbox.command`."""
        return program

    def remove_dead(self, root: Path, is_alive: Callable[[str], bool]) -> None:
        """See `Sandbox.remove_dead`. Processes of dead hosts end by `kill_stragglers`."""

    def kill_stragglers(self, host_id: str) -> None:
        """See `Sandbox.kill_stragglers`."""
        mark = f"{HOST_ID_VARIABLE}={host_id}".encode()
        with ExitStack() as closing:
            killed = []
            for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  (a glob fails when one of them ends)
                # Processes of other users, and processes that just ended, cannot be read.
                with suppress(OSError):
                    if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                        killed.append(os.pidfd_open(int(name)))
                        closing.callback(os.close, killed[-1])
                        signal.pidfd_send_signal(killed[-1], signal.SIGKILL)
            for process in killed:
                select.select([process], [], [], DEATH_LIMIT_SECONDS)
        shutil.rmtree(find_temporary_directory(host_id), ignore_errors=True)
