"""Bounds for all programs of a workspace together, kept by the kernel's control groups where we may make some.

Version 2 where its controllers are given to us (systemd: `Delegate=memory pids` and a separate group), else version
1. Only these bound memory, and the number of processes of root.

Holds: a workspace that takes too much loses one of its programs (status 137); the host and other workspaces stay.
Does not: exist where nobody gives us a group; `ControlGroups.find` says why, and `doctor` prints it.
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
    """Bounds for one workspace; None: none.

    Attributes:
        memory_bytes: of all its programs together, files in its temporary directories included.
        processes: threads count as well.
    """

    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Where groups can be made: one directory in version 2, one for each controller in version 1.

    Attributes:
        parents: The directories, without repetition.
        version: 1 or 2.
    """

    parents: tuple[Path, ...]
    version: int

    @classmethod
    def find(cls, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> ControlGroups | str:
        """Return where we can make groups with both controllers, or the reason why we cannot."""
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError as error:
            return f"control groups cannot be read: {error}"
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        reasons = []
        if "" in paths:
            parent = root / paths[""].lstrip("/")
            if (reason := _refusal(parent, "cgroup.subtree_control")) is None:
                return cls((parent,), 2)
            reasons.append(reason)
        if all(name in paths for name in CONTROLLERS):
            parents = tuple(root / name / paths[name].lstrip("/") for name in CONTROLLERS)
            refusals = [_refusal(parent, None) for parent in parents]
            if refusals == [None, None]:
                return cls(parents, 1)
            reasons += [refusal for refusal in refusals if refusal]
        return "; ".join(dict.fromkeys(reasons)) or "there are no control groups here"

    def enclose(self, host_id: str, pids: Iterable[int], limits: GroupLimits) -> None:
        """Put processes, and whatever they start from now on, into the group of a workspace. Idempotent.

        Blocks for ten milliseconds or so, in which the kernel waits for its processors; not for those that are in it.

        Raises:
            OSError: the kernel refuses a bound or a process.
        """
        pids = [pid for pid in pids if not self._has(host_id, pid)]
        for parent in self.parents if pids else ():
            group = parent / f"{PREFIX}{host_id}"
            for left in reversed(range(FILL_ATTEMPTS)):
                try:
                    _fill(group, pids, limits)
                    break
                except OSError as error:
                    # Another worker of this machine may take it away for as long as nothing runs in it.
                    if not left or error.errno not in (errno.ENOENT, errno.ENODEV):
                        raise

    def _has(self, host_id: str, pid: int) -> bool:
        try:
            groups = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False
        return groups.count(f"/{PREFIX}{host_id}\n") == len(self.parents)

    def drop_empty(self) -> None:
        """Take away the groups in which nothing runs any more."""
        for parent in self.parents:
            for group in parent.glob(f"{PREFIX}*"):
                with suppress(OSError):  # somebody lives in it
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


def _refusal(parent: Path, control: str | None) -> str | None:
    """Say why no bounded group can be made in a directory, after having made one."""
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
        return f"no group can be made in {parent}: {error.strerror}"
    return None
