"""Which sandboxes there are, and which one a node uses.

Holds: nothing falls back to no sandbox by itself; that takes somebody who asks for `none`.
"""

from __future__ import annotations

from pathlib import Path

from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.workspace_errors import SandboxUnavailable

AUTO = "auto"


def sandboxes(files: Path) -> dict[str, Sandbox]:
    """Return the sandboxes by name, the strongest first.

    Args:
        files: Directory in which they may keep files of their own.
    """
    strongest_first: list[Sandbox] = [BubblewrapSandbox(files), NoSandbox()]
    return {sandbox.name: sandbox for sandbox in strongest_first}


def available(files: Path) -> dict[str, str | None]:
    """Say for each sandbox, by name, why it does not work on this machine; None: it works."""
    return {name: sandbox.reason_unavailable() for name, sandbox in sandboxes(files).items()}


def best_sandbox(files: Path) -> Sandbox:
    """Return the strongest sandbox that works on this machine and keeps programs from it.

    Raises:
        SandboxUnavailable: none does.
    """
    reasons = []
    for sandbox in sandboxes(files).values():
        if not sandbox.is_confining:
            continue
        reason = sandbox.reason_unavailable()
        if reason is None:
            return sandbox
        reasons.append(reason)
    raise SandboxUnavailable(
        f"No sandbox works on this machine: {'; '.join(reasons)}.",
        remedy="Install bubblewrap, or set DECKHANDS_SANDBOX=none to run without a sandbox.",
    )


def named_sandbox(name: str, files: Path) -> Sandbox:
    """Return the sandbox with this name; `auto` is the best one.

    Raises:
        SandboxUnavailable: there is none with this name, or it does not work on this machine.
    """
    if name == AUTO:
        return best_sandbox(files)
    sandbox = sandboxes(files).get(name)
    if sandbox is None:
        raise SandboxUnavailable(f"There is no sandbox {name!r}.", remedy="Use auto, bwrap or none.")
    if reason := sandbox.reason_unavailable():
        raise SandboxUnavailable(f"The sandbox {name} does not work on this machine: {reason}.")
    return sandbox
