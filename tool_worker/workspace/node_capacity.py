"""Checks how many more sessions a node can hold, and chooses the sessions to end when it is full.

Each session uses a terminal, of which the kernel has a limited number for the whole machine, and about 12 MB.

This module measures resources of a workspace's programs that no file shows: deleted files, terminals, inotify
instances.

Holds: a session with an action in progress is never ended to make room. A session that uses far more of the scarce
resource than others ends first, even with background jobs. Of the others, idle sessions end before those with
background jobs. Each deleted file and each terminal counts once, however many programs have it open. The measurement
reads /proc from outside, where programs cannot hide.
Does not: guarantee room, because busy sessions are never ended, and other programs use terminals and memory, too; count
descriptors in transit between two programs, mappings of deleted files unless we are root, or processes in another pid
namespace's /proc, such as those of containers.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tool_worker.errors import WorkspaceUnavailable
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead

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


SPARE_TERMINALS = 0.1
SPARE_MEMORY = 0.1
"""Shares that are kept free, so that the next start does not fail."""

ENDED_SHARE = 16
"""One in this many sessions ends when there is no room, so that the next starts find some."""
GREEDY_FACTOR = 4
"""A session is greedy if it holds more than this multiple of the median, and more than `ORDINARY`."""
ASKED_LIMIT = 256
END_LIMIT_SECONDS = 3.0


class NodeCapacity:
    """The free terminals, memory and inotify instances of the machine.

    Args:
        proc: Mount point of the kernel's process file system.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def is_short(self) -> bool:
        """Whether any resource is scarce; see `find_shortage`."""
        return self.find_shortage() is not None

    def find_shortage(self) -> Callable[[HostFolder], int] | None:
        """Return a function that measures a session's use of the scarce resource; None if nothing is scarce.

        Scarce means that less than a tenth of the terminals or of the memory is free, or no inotify instance. A
        resource that cannot be read counts as free.
        """
        with suppress(OSError, ValueError, KeyError):
            folder = self._proc / "sys/kernel/pty"
            terminals = {name: int((folder / name).read_text()) for name in ("nr", "max", "reserve")}
            # The reserve is only for terminals outside of containers and sandboxes.
            if terminals["nr"] >= (1 - SPARE_TERMINALS) * (terminals["max"] - terminals["reserve"]):
                return _count_terminals
        with suppress(OSError, ValueError, KeyError):
            lines = (self._proc / "meminfo").read_text().splitlines()
            kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            if kilobytes["MemAvailable"] < SPARE_MEMORY * kilobytes["MemTotal"]:
                return _measure_memory
        return None if _has_inotify_left() else _count_watchers


async def free_capacity(folders: Iterable[HostFolder], held: Callable[[HostFolder], int]) -> int:
    """End a sixteenth of the live sessions, at least one: greedy ones first, then the least recently used.

    Args:
        held: Returns a session's use of the scarce resource, see `NodeCapacity.find_shortage`.

    Returns:
        How many sessions ended; fewer if the others are busy.
    """
    living = sorted((folder for folder in folders if folder.is_alive), key=HostFolder.read_last_used)
    greedy = await asyncio.to_thread(_find_greedy, living, held)
    needed = len(living) // ENDED_SHARE + 1
    ended = 0
    for candidates, may_kill in ((greedy, True), (living, False), (living, True)):
        for folder in candidates[:ASKED_LIMIT]:
            if ended >= needed:
                return ended
            ended += folder.is_alive and await retire(folder, may_kill=may_kill)
    return ended


def _find_greedy(living: list[HostFolder], held: Callable[[HostFolder], int]) -> list[HostFolder]:
    """Return the sessions that use far more than the median, the largest consumer first."""
    amounts = {folder: held(folder) for folder in living}
    most = max(GREEDY_FACTOR * statistics.median_low(amounts.values()), ORDINARY[held]) if amounts else 0
    return sorted((folder for folder in living if amounts[folder] > most), key=lambda folder: -amounts[folder])


def _count_terminals(folder: HostFolder) -> int:
    return measure_usage(pid, ()).total.terminals if (pid := folder.read_main_pid()) else 0


def _count_watchers(folder: HostFolder) -> int:
    return measure_usage(pid, ()).total.watchers if (pid := folder.read_main_pid()) else 0


def _measure_memory(folder: HostFolder) -> int:
    """Return the memory of a session's programs that is not backed by a file on disk."""
    pages = 0
    for pid in iter_descendants(folder.read_main_pid() or 0):
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            pages += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return pages * 1024


ORDINARY: dict[Callable[[HostFolder], int], int] = {
    _count_terminals: 8,
    _count_watchers: 8,
    _measure_memory: 256 * 2**20,
}
"""Amounts that a session may hold without being greedy."""


def _has_inotify_left() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return ctypes.get_errno() != errno.EMFILE
    os.close(descriptor)
    return True


async def retire(folder: HostFolder, *, may_kill: bool) -> bool:
    """End one session if it is idle; return whether it ended. A host that hangs or has ended is not touched."""
    try:
        connection = await HostConnection.attach(folder.conversation_id, folder.connect())
    except (OSError, WorkspaceUnavailable):
        return False
    try:
        is_ending = await connection.retire(may_kill=may_kill)
    except WorkspaceUnavailable:
        return False
    finally:
        await connection.detach()
    return is_ending and await wait_until_dead(folder, END_LIMIT_SECONDS)
