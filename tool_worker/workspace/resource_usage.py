"""Measures resources of a workspace's programs that no file shows: deleted files, terminals, inotify instances.

Holds: each deleted file and each terminal counts once, however many programs have it open. The measurement reads /proc
from outside, where programs cannot hide.
Does not: see descriptors in transit between two programs, mappings of deleted files unless we are root, or processes
in another pid namespace's /proc, such as those of containers.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DESCRIPTORS_LIMIT = 100_000
_DELETED = " (deleted)"
_WATCHER = "anon_inode:inotify"
_MASTERS = ("/dev/ptmx", "/dev/pts/ptmx", "/ptmx")
_SLAVE_MAJORS = range(136, 144)
_UNLINKED, _TERMINAL, _INOTIFY, _DESCRIPTORS = "unlinked_bytes", "terminals", "watchers", "descriptors"

_Things = dict[tuple[str, Hashable], int]
"""Amounts by resource and by its identity."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """An amount of each resource, used as a limit or as a measurement.

    Attributes:
        unlinked_bytes: Disk space of deleted files that are still open, on the disks of the workspace and of its home.
        terminals: Pseudo-terminals.
        watchers: Inotify instances, of which a user has 128 on many machines.
        descriptors: Open file descriptors. Beyond the limit they are counted but not inspected.
    """

    unlinked_bytes: int = 0
    terminals: int = 0
    watchers: int = 0
    descriptors: int = DESCRIPTORS_LIMIT


class ProgramUsage:
    """A process and its resources. Its process id and its start tick together identify it uniquely."""

    def __init__(self, pid: int, start_tick: int, things: _Things) -> None:
        self.pid = pid
        self.start_tick = start_tick
        self.things = things
        self.amounts: Counter[str] = Counter()
        for (what, _), amount in things.items():
            self.amounts[what] += amount


class WorkspaceUsage:
    """The resources of all programs of a workspace, excluding the host itself."""

    def __init__(self, holders: list[ProgramUsage]) -> None:
        self._holders = holders
        self._amounts: Counter[str] = Counter()
        self._counts: Counter[tuple[str, Hashable]] = Counter()
        for holder in holders:
            for thing, amount in holder.things.items():
                self._counts[thing] += 1
                self._amounts[thing[0]] += amount if self._counts[thing] == 1 else 0

    @property
    def total(self) -> ResourceUsage:
        """The sum over all programs."""
        return ResourceUsage(**{what: self._amounts[what] for what in (_UNLINKED, _TERMINAL, _INOTIFY, _DESCRIPTORS)})

    def largest_consumer(self, bound: ResourceUsage) -> ProgramUsage | None:
        """Return the largest consumer of a resource that is over its limit; None if no resource is."""
        for what in (_DESCRIPTORS, _UNLINKED, _TERMINAL, _INOTIFY):
            if self._amounts[what] > getattr(bound, what):
                return max(self._holders, key=lambda holder: holder.amounts[what], default=None)
        return None

    def drop(self, holder: ProgramUsage) -> None:
        """Remove a program that is being killed from the sum."""
        self._holders.remove(holder)
        for thing, amount in holder.things.items():
            self._counts[thing] -= 1
            self._amounts[thing[0]] -= amount if self._counts[thing] == 0 else 0


def measure_usage(
    main_pid: int, directories: Iterable[Path], descriptors_limit: int = DESCRIPTORS_LIMIT
) -> WorkspaceUsage:
    """Measure all processes below a host.

    Args:
        directories: Deleted files count only on the disks of these directories.
    """
    devices = set()
    for directory in directories:
        with suppress(OSError):
            devices.add(directory.stat().st_dev)
    holders, left = [], descriptors_limit
    for pid in iter_descendants(main_pid):
        with suppress(OSError):  # the process has ended
            names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208  (a path object per file would cost more than the check)
            left -= len(names)
            things: _Things = {(_DESCRIPTORS, pid): len(names)}
            for name in names if left >= 0 else ():
                with suppress(OSError):
                    things.update(_thing(pid, name, devices))
            things.update(_find_mapped(pid, devices))
            holders.append(ProgramUsage(pid, read_start_tick(pid), things))
    return WorkspaceUsage(holders)


def iter_descendants(main_pid: int) -> Iterator[int]:
    """Yield the process ids below a process. The kernel lists a child with the thread that started it."""
    waiting = [main_pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208
                with suppress(OSError):
                    found = [int(pid) for pid in Path(f"/proc/{parent}/task/{thread}/children").read_bytes().split()]
                    yield from found
                    waiting += found


def read_start_tick(pid: int) -> int:
    """Return the start time of a process, in kernel ticks.

    Raises:
        OSError: The process has ended.
    """
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _thing(pid: int, name: str, devices: set[int]) -> _Things:
    path = f"/proc/{pid}/fd/{name}"
    target = os.readlink(path)  # noqa: PTH115  (a path object per file would cost more than the check)
    if target == _WATCHER:
        return {(_INOTIFY, (pid, name)): 1}
    if target in _MASTERS:
        lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
        return {(_TERMINAL, line.split()[1]): 1 for line in lines if line.startswith("tty-index:")}
    if target.endswith(_DELETED) or "/pts/" in target or target.removeprefix("/").isdecimal():
        return _by_status(os.stat(path), devices)  # noqa: PTH116
    return {}


def _by_status(found: os.stat_result, devices: set[int]) -> _Things:
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev in devices:
        return {(_UNLINKED, (found.st_dev, found.st_ino)): found.st_blocks * 512}
    if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) in _SLAVE_MAJORS:
        index = (os.major(found.st_rdev) - _SLAVE_MAJORS.start) * 256 + os.minor(found.st_rdev)
        return {(_TERMINAL, str(index)): 1}
    return {}


def _find_mapped(pid: int, devices: set[int]) -> _Things:
    """Return the deleted files that a process has mapped; only root can inspect mappings."""
    things: _Things = {}
    # Not by `splitlines`: in a name, the kernel escapes a line feed, but no other line separator.
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        if line.endswith(_DELETED.encode()):
            first, last = (int(part, 16) for part in line.split(maxsplit=1)[0].split(b"-"))
            with suppress(OSError):
                things.update(_by_status(Path(f"/proc/{pid}/map_files/{first:x}-{last:x}").stat(), devices))
    return things
