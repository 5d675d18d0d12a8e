"""Lists the sandboxes and chooses one for a node.

Holds: programs run without a sandbox only if `none` is configured; there is no fallback to it.
"""

from __future__ import annotations

from pathlib import Path

from tool_worker.errors import SandboxUnavailable
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.docker import ContainerSettings, DockerSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Sandbox

AUTO = "auto"
CAPABILITIES = {sandbox.name: sandbox.capabilities for sandbox in (BubblewrapSandbox, DockerSandbox, NoSandbox)}


def make_sandboxes(files: Path, containers: ContainerSettings | None = None) -> dict[str, Sandbox]:
    """Return the sandboxes by name, in the order in which `auto` tries them.

    Args:
        files: Directory in which they may keep their files.
        containers: The operator's settings for containers.
    """
    in_order: list[Sandbox] = [BubblewrapSandbox(files), DockerSandbox(containers or ContainerSettings()), NoSandbox()]
    return {sandbox.name: sandbox for sandbox in in_order}


def find_best_sandbox(files: Path, containers: ContainerSettings | None = None) -> Sandbox:
    """Return the first sandbox that works on this machine and confines programs.

    Raises:
        SandboxUnavailable: no sandbox works.
    """
    reasons = []
    for sandbox in make_sandboxes(files, containers).values():
        if not sandbox.capabilities.confines_programs:
            continue
        reason = sandbox.reason_unavailable()
        if reason is None:
            return sandbox
        reasons.append(reason)
    advice = "Install bubblewrap" if any("bwrap is not installed" in reason for reason in reasons) else "Fix this"
    raise SandboxUnavailable(
        f"No sandbox works on this machine: {'; '.join(reasons)}.",
        remedy=f"{advice}, or set DECKHANDS_SANDBOX=none to run without a sandbox.",
    )


def find_sandbox(name: str, files: Path, containers: ContainerSettings | None = None) -> Sandbox:
    """Return the sandbox with this name; `auto` is the best one.

    Raises:
        SandboxUnavailable: no sandbox has this name, or it does not work on this machine.
    """
    if name == AUTO:
        return find_best_sandbox(files, containers)
    sandbox = make_sandboxes(files, containers).get(name)
    if sandbox is None:
        raise SandboxUnavailable(f"There is no sandbox {name!r}.", remedy="Use auto, bwrap, docker or none.")
    if reason := sandbox.reason_unavailable():
        raise SandboxUnavailable(f"The sandbox {name} does not work on this machine: {reason}.")
    return sandbox
