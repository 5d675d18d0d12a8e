"""Resource limits for all programs of a workspace together, through the kernel's control groups where available.

Version 2 is used if its controllers are delegated to us (systemd: `Delegate=memory pids` and a separate group), else
version 1. Only control groups limit total memory, and the number of processes of root.

Holds: a workspace that exceeds its memory loses one of its programs (status 137). The host and other workspaces stay.
Does not: work without a delegated group. `ControlGroups.find` then returns the reason, which `doctor` prints.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "deckhands-"
TRIAL_PREFIX = "deckhands.trial-"
"""A separate prefix, so that the cleanup of other groups leaves trials alone."""
FILL_ATTEMPTS = 100
CONTROLLERS = ("memory", "pids")

_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
_SWAP_FILES = (("memory.swap.max", "0"), ("memory.oom.group", "0"))


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits for one workspace. None means no limit.

    Attributes:
        memory_bytes: total of all its programs, including files in its temporary directories.
        processes: including threads.
    """

    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The place where groups can be created: one directory in version 2, one per controller in version 1.

    Attributes:
        parents: The directories, without duplicates.
        version: 1 or 2.
    """

    parents: tuple[Path, ...]
    version: int

    @classmethod
    def find(cls, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> ControlGroups | str:
        """Return the place where groups with both controllers can be created, or the reason why there is none."""
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError as error:
            return f"control groups cannot be read: {error}"
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        reasons = []
        if "" in paths:
            parent = root / paths[""].lstrip("/")
            if (reason := _find_refusal(parent, "cgroup.subtree_control")) is None:
                return cls((parent,), 2)
            reasons.append(reason)
        if all(name in paths for name in CONTROLLERS):
            parents = tuple(root / name / paths[name].lstrip("/") for name in CONTROLLERS)
            refusals = [_find_refusal(parent, None) for parent in parents]
            if refusals == [None, None]:
                return cls(parents, 1)
            reasons += [refusal for refusal in refusals if refusal]
        return "; ".join(dict.fromkeys(reasons)) or "there are no control groups here"

    def enclose(self, host_id: str, pids: Iterable[int], limits: GroupLimits) -> None:
        """Move processes, and all that they start later, into the group of a workspace. Idempotent.

        Blocks for about 10 ms while the kernel synchronizes its processors; less if the processes are already in the
        group.

        Raises:
            OSError: the kernel refuses a limit or a process.
        """
        pids = [pid for pid in pids if not self._has(host_id, pid)]
        for parent in self.parents if pids else ():
            group = parent / f"{PREFIX}{host_id}"
            for left in reversed(range(FILL_ATTEMPTS)):
                try:
                    _fill(group, pids, limits)
                    break
                except OSError as error:
                    # Another worker on this machine may remove the group while nothing runs in it.
                    if not left or error.errno not in (errno.ENOENT, errno.ENODEV):
                        raise

    def _has(self, host_id: str, pid: int) -> bool:
        try:
            groups = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False
        return groups.count(f"/{PREFIX}{host_id}\n") == len(self.parents)

    def drop_empty(self) -> None:
        """Remove groups without running processes."""
        for parent in self.parents:
            for group in parent.glob(f"{PREFIX}*"):
                with suppress(OSError):  # a process still runs in it
                    group.rmdir()


def _fill(group: Path, pids: Iterable[int], limits: GroupLimits) -> None:
    group.mkdir(exist_ok=True)
    wanted = {**dict.fromkeys(_MEMORY_FILES, limits.memory_bytes), "pids.max": limits.processes}
    for name, bound in wanted.items():
        if bound is not None and (group / name).exists():
            (group / name).write_text(str(bound))
    for name, value in _SWAP_FILES:
        if (group / name).exists():
            (group / name).write_text(value)
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _find_refusal(parent: Path, control: str | None) -> str | None:
    """Create a trial group in a directory. Return the reason if that fails."""
    trial = parent / f"{TRIAL_PREFIX}{os.getpid()}-{threading.get_ident()}"
    try:
        if control is not None:
            offered = (parent / "cgroup.controllers").read_text().split()
            missing = [name for name in CONTROLLERS if name not in offered]
            if missing:
                return f"{parent} does not offer {' and '.join(missing)}"
            (parent / control).write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        trial.mkdir(exist_ok=True)
        (trial / "cgroup.procs").read_text()
        trial.rmdir()
    except OSError as error:
        return f"cannot create a group in {parent}: {error.strerror}"
    return None
