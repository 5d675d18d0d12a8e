"""Checks what this machine supports for workspaces.

`python -m tool_worker.worker.examination` prints the result as JSON.

Holds: every missing layer is reported with its reason.
Does not: change anything; the self-test runs in a temporary directory. Its pods, in Kubernetes, have their locks where
those of the worker are.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.runtime import UsageError
from tool_worker.errors import SandboxUnavailable
from tool_worker.host.hardening import MINIMUM_ABI, landlock_version
from tool_worker.host.sessions.programs import PROGRAMS
from tool_worker.sandbox import (
    AUTO,
    BUILT_IN,
    CHOSEN_BY_NAME,
    ContainerSettings,
    ControlGroups,
    Sandbox,
    find_capabilities,
    make_sandboxes,
    make_system_call_filter,
    run_self_test,
)
from tool_worker.settings import ToolSettings, load_tool_settings
from tool_worker.workspace import COPY_NOTICES, NodeCapacity, find_copy_method, find_session_programs


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """The result of one check.

    Attributes:
        name: The subject of the check.
        is_good: Whether the check passed.
        is_needed: Whether a worker with default settings needs it.
        detail: One line of explanation.
    """

    name: str
    is_good: bool
    is_needed: bool
    detail: str


def examine(
    demanded: str = AUTO, containers: ContainerSettings | None = None, files: Path | None = None
) -> list[MachineFinding]:
    """Check the sandboxes and the other protections of this machine. Takes about a second.

    Args:
        demanded: The sandbox that workspaces use here.
        containers: Settings of containers; without images, the `docker` sandbox is not checked, and `kubernetes` only
            if it is demanded.
        files: Existing directory of the node, where every sandbox can show files; None for the machine's /tmp.
    """
    with tempfile.TemporaryDirectory(prefix="deckhands-examination-", dir=files) as folder:
        known = make_sandboxes(Path(folder), containers)
        if files and demanded == "kubernetes":
            # The worker itself then knows the pods of an examination that was killed, and removes them.
            known["kubernetes"] = make_sandboxes(files / ".sandbox", containers)["kubernetes"]
        found = known.values()
        confining = [sandbox for sandbox in found if sandbox.capabilities.confines_programs]
        needed = next((sandbox for sandbox in confining if sandbox.name == demanded), confining[0])
        findings = [
            _check_sandbox(sandbox, Path(folder), is_needed=sandbox is needed)
            for sandbox in confining
            if not sandbox.capabilities.runs_images
            or sandbox.name not in BUILT_IN
            or (sandbox.name not in CHOSEN_BY_NAME and containers and containers.images)
            or sandbox is needed
        ]
        forks = _check_forks(Path(folder, "forks"), may_mount=needed.capabilities.inherits_descriptors)
    return [*findings, _check_filter(), _check_landlock(), _check_control_groups(), _check_room(demanded), forks]


def examine_programs(settings: ToolSettings) -> list[MachineFinding]:
    """Check for the programs that the pools in these settings need."""
    findings = []
    for pool in (pool for pool in settings.pools if pool in PROGRAMS):
        try:
            find_session_programs([pool], chromium=settings.variables.chromium, sandbox=settings.variables.sandbox)
            finding = MachineFinding(f"pool {pool}", is_good=True, is_needed=True, detail="can be served")
        except UsageError as error:
            finding = MachineFinding(f"pool {pool}", is_good=False, is_needed=True, detail=str(error))
        findings.append(finding)
    return findings


def _check_sandbox(sandbox: Sandbox, files: Path, *, is_needed: bool) -> MachineFinding:
    name = f"sandbox {sandbox.name}"
    reason = sandbox.reason_unavailable()
    if reason is not None:
        return MachineFinding(name, is_good=False, is_needed=is_needed, detail=reason)
    try:
        report = run_self_test(sandbox, files)
    except SandboxUnavailable as error:
        return MachineFinding(name, is_good=False, is_needed=is_needed, detail=str(error))
    escapes = ", ".join(f"{result.name} ({result.reached})" for result in report.escapes)
    detail = f"got out: {escapes}" if escapes else f"holds: {len(report.results)} attempts to get out were stopped"
    return MachineFinding(name, is_good=not escapes, is_needed=is_needed, detail=detail)


def _check_filter() -> MachineFinding:
    machine = platform.machine()
    size = len(make_system_call_filter(machine))
    detail = f"{size // 8} instructions" if size else f"not known for {machine}: programs may make every system call"
    return MachineFinding("system call filter", is_good=size > 0, is_needed=False, detail=detail)


def _check_landlock() -> MachineFinding:
    version = landlock_version()
    if version >= MINIMUM_ABI:
        return MachineFinding("Landlock", is_good=True, is_needed=False, detail=f"version {version}")
    detail = "the kernel has none, or an old one: what programs may write is bounded by mounts alone"
    return MachineFinding("Landlock", is_good=False, is_needed=False, detail=detail)


def _check_control_groups() -> MachineFinding:
    found = ControlGroups.find()
    if isinstance(found, str):
        detail = f"{found}: memory is bounded for each process alone, processes not at all if the tool worker is root"
        return MachineFinding("control groups", is_good=False, is_needed=False, detail=detail)
    return MachineFinding("control groups", is_good=True, is_needed=False, detail=f"version {found.version}")


def _check_forks(folder: Path, *, may_mount: bool) -> MachineFinding:
    folder.mkdir()
    try:
        method = find_copy_method(folder, may_mount=may_mount)
    except OSError as error:
        return MachineFinding("files of forks", is_good=False, is_needed=False, detail=f"cannot be tried: {error}")
    return MachineFinding("files of forks", is_good=method != "copy", is_needed=False, detail=COPY_NOTICES[method])


def _check_room(demanded: str) -> MachineFinding:
    try:
        for descriptor in os.openpty():
            os.close(descriptor)
    except OSError as error:
        # Confining sandboxes have their own terminals.
        detail = f"no terminal can be opened, which a shell without a sandbox needs: {error}"
        capabilities = find_capabilities(demanded)
        is_needed = capabilities is not None and not capabilities.confines_programs
        return MachineFinding("room for sessions", is_good=False, is_needed=is_needed, detail=detail)
    is_short = NodeCapacity().is_short()
    detail = "less than a tenth of the terminals or of the memory is free" if is_short else "terminals and memory"
    return MachineFinding("room for sessions", is_good=not is_short, is_needed=False, detail=detail)


def main() -> None:
    """Print the findings."""
    settings = load_tool_settings()
    files = settings.node_dir if settings.node_dir.is_dir() else None
    findings = [*examine(settings.variables.sandbox, settings.containers, files), *examine_programs(settings)]
    sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")


if __name__ == "__main__":
    main()
