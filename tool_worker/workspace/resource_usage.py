"""What the programs of a workspace hold that no file shows: deleted files, terminals, watchers of files.

Holds: each deleted file and each terminal counts once, however many programs have it open; looking is by way of /proc,
from outside, where no program can close itself to us.
Does not: see descriptors that are under way between two programs, mappings of deleted files if we are not root, or
anything where the workspace's processes are in another pid namespace's /proc, as those of containers are.
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
"""How much of what; by what it is, and which one."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """An amount of each; as a bound, and of what is held.

    Attributes:
        unlinked_bytes: that deleted files which are still open take on the disks of the workspace and of its home.
        terminals: pseudo-terminals.
        watchers: inotify instances, of which a user has 128 on many machines.
        descriptors: of open files. Beyond the bound they are counted, and not looked at.
    """

    unlinked_bytes: int = 0
    terminals: int = 0
    watchers: int = 0
    descriptors: int = DESCRIPTORS_LIMIT


class ProgramUsage:
    """A process and what it holds. Its number and its start together name it for ever."""

    def __init__(self, pid: int, start_tick: int, things: _Things) -> None:
        self.pid = pid
        self.start_tick = start_tick
        self.things = things
        self.amounts: Counter[str] = Counter()
        for (what, _), amount in things.items():
            self.amounts[what] += amount


class WorkspaceUsage:
    """What all programs of a workspace hold, the host itself not among them."""

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
        """The sum."""
        return ResourceUsage(**{what: self._amounts[what] for what in (_UNLINKED, _TERMINAL, _INOTIFY, _DESCRIPTORS)})

    def largest_consumer(self, bound: ResourceUsage) -> ProgramUsage | None:
        """Return the largest holder of the resource that is over its limit; None if none is, or nobody holds it."""
        for what in (_DESCRIPTORS, _UNLINKED, _TERMINAL, _INOTIFY):
            if self._amounts[what] > getattr(bound, what):
                return max(self._holders, key=lambda holder: holder.amounts[what], default=None)
        return None

    def drop(self, holder: ProgramUsage) -> None:
        """Count without a holder that is being ended."""
        self._holders.remove(holder)
        for thing, amount in holder.things.items():
            self._counts[thing] -= 1
            self._amounts[thing[0]] -= amount if self._counts[thing] == 0 else 0


def workspace_usage(
    main_pid: int, directories: Iterable[Path], descriptors_limit: int = DESCRIPTORS_LIMIT
) -> WorkspaceUsage:
    """Look at all processes below a host.

    Args:
        directories: deleted files count that are on the disk of one of them.
    """
    devices = set()
    for directory in directories:
        with suppress(OSError):
            devices.add(directory.stat().st_dev)
    holders, left = [], descriptors_limit
    for pid in descendants(main_pid):
        with suppress(OSError):  # it has ended
            names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208  (a path for each would cost more than the look)
            left -= len(names)
            things: _Things = {(_DESCRIPTORS, pid): len(names)}
            for name in names if left >= 0 else ():
                with suppress(OSError):
                    things.update(_thing(pid, name, devices))
            things.update(_mapped(pid, devices))
            holders.append(ProgramUsage(pid, start_tick(pid), things))
    return WorkspaceUsage(holders)


def descendants(main_pid: int) -> Iterator[int]:
    """Yield the processes below one; a child is listed with the thread that started it."""
    waiting = [main_pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208
                with suppress(OSError):
                    found = [int(pid) for pid in Path(f"/proc/{parent}/task/{thread}/children").read_bytes().split()]
                    yield from found
                    waiting += found


def start_tick(pid: int) -> int:
    """Return when a process started, in the kernel's ticks.

    Raises:
        OSError: it has ended.
    """
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _thing(pid: int, name: str, devices: set[int]) -> _Things:
    path = f"/proc/{pid}/fd/{name}"
    target = os.readlink(path)  # noqa: PTH115  (a path object for each would cost more than the look)
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


def _mapped(pid: int, devices: set[int]) -> _Things:
    """Return the deleted files that a process has mapped; only root may look behind a mapping."""
    things: _Things = {}
    # Not by `splitlines`: the kernel writes a line feed in a name as something else, but no other end of a line.
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        if line.endswith(_DELETED.encode()):
            first, last = (int(part, 16) for part in line.split(maxsplit=1)[0].split(b"-"))
            with suppress(OSError):
                things.update(_by_status(Path(f"/proc/{pid}/map_files/{first:x}-{last:x}").stat(), devices))
    return things
