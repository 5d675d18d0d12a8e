"""Lists the sandboxes, including those of installed packages, and chooses one for a node.

A package registers a class in the entry points `deckhands.sandboxes`, under the class's `name`. The class implements
`Sandbox` and is created with the arguments of `make_sandboxes`.

Holds: programs run without a sandbox only if `none` is configured; there is no fallback to it. A sandbox of a package
is used only if named, and must pass the same self-test as ours. If it cannot be loaded, the worker runs without it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from broker.tools import entry_points
from tool_worker.errors import SandboxUnavailable
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.containers import ContainerSettings
from tool_worker.sandbox.docker import DockerSandbox
from tool_worker.sandbox.kubernetes.pods import KubernetesSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Capabilities, Sandbox

AUTO = "auto"
ENTRY_POINTS = "deckhands.sandboxes"
BUILT_IN: dict[str, Capabilities] = {
    sandbox.name: sandbox.capabilities for sandbox in (BubblewrapSandbox, DockerSandbox, KubernetesSandbox, NoSandbox)
}
CHOSEN_BY_NAME = frozenset(("kubernetes", "none"))
"""The sandboxes of ours that `auto` does not choose."""

_log = logging.getLogger(__name__)


def find_capabilities(name: str) -> Capabilities | None:
    """Return the features of the sandbox with this name; None if it is unknown or cannot be loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    loaded = _load_class(name) if name in entry_points(ENTRY_POINTS).names else None
    found: Capabilities | None = None if loaded is None or isinstance(loaded, str) else loaded.capabilities
    return found


def make_sandboxes(files: Path, containers: ContainerSettings | None = None) -> dict[str, Sandbox]:
    """Return the sandboxes by name: ours in the order in which `auto` tries them, then those of packages.

    Args:
        files: Directory in which they may keep their files.
        containers: The operator's settings for containers.
    """
    containers = containers or ContainerSettings()
    in_order: list[Sandbox] = [BubblewrapSandbox(files), DockerSandbox(containers)]
    in_order += [KubernetesSandbox(files, containers), NoSandbox()]
    for name in sorted(entry_points(ENTRY_POINTS).names - BUILT_IN.keys()):
        made = _make_of_package(name, files, containers)
        if isinstance(made, str):
            _log.error("%s", made)
        else:
            in_order.append(made)
    return {sandbox.name: sandbox for sandbox in in_order}


def find_best_sandbox(files: Path, containers: ContainerSettings | None = None) -> Sandbox:
    """Return the first sandbox that works on this machine and confines programs.

    Raises:
        SandboxUnavailable: no sandbox works.
    """
    reasons = []
    for sandbox in make_sandboxes(files, containers).values():
        if sandbox.name in CHOSEN_BY_NAME or sandbox.name not in BUILT_IN:
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
        containers = containers or ContainerSettings()
        if name in entry_points(ENTRY_POINTS).names:
            raise SandboxUnavailable(
                f"{_make_of_package(name, files, containers)}.", remedy="Repair or reinstall its package."
            )
        remedy = "Use auto, bwrap, docker, kubernetes or none, or install the package that has it."
        raise SandboxUnavailable(f"There is no sandbox {name!r}.", remedy=remedy)
    if reason := sandbox.reason_unavailable():
        raise SandboxUnavailable(f"The sandbox {name} does not work on this machine: {reason}.")
    return sandbox


def _make_of_package(name: str, files: Path, containers: ContainerSettings) -> Sandbox | str:
    """Return the sandbox of a package, or the reason why it cannot be used."""
    loaded = _load_class(name)
    if isinstance(loaded, str):
        return loaded
    try:
        made: Sandbox = loaded(files, containers)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a foreign class may raise anything)
        return f"The sandbox {name} cannot be created: {type(error).__name__}: {error}"
    return made


def _load_class(name: str) -> Any:
    """Return the class of a package, or the reason why it cannot be used."""
    try:
        loaded = entry_points(ENTRY_POINTS)[name].load()
        if loaded.name != name or not isinstance(loaded.capabilities, Capabilities):
            return f"The sandbox {name} cannot be used: its class has another name, or no Capabilities"
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a foreign module may raise anything)
        return f"The sandbox {name} cannot be loaded: {type(error).__name__}: {error}"
    return loaded
