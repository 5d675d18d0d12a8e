"""Limits the disk use of background jobs: finds workspaces over their limit and chooses the writers to kill.

Holds: a workspace is measured when its programs have written, when free space has dropped, and at every twelfth check,
because no counter includes `fallocate`. If a workspace is over its limit and has grown, the programs that wrote are
killed; if no counter identifies them, all background jobs are killed. The host survives, and so does its shell unless
the shell itself writes. Each measurement and each sweep is bounded; the least recently measured workspace comes first.
Does not: see processes in another pid namespace's /proc, such as those of some containers, or files in named
directories. Between two checks, a job can write at the full speed of the disk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tool_worker.workspace import Directory, HostFolder, TreeLimits, iter_descendants, read_start_tick

WRITTEN_BYTES = 2**20
"""Smaller amounts, written by a program or lost in free space since the last check, are ignored."""
CHECKS_PER_MEASUREMENT = 12
MEASURED_LIMITS = 2
"""A measurement stops at this multiple of the workspace's limits."""
SWEEP_LIMITS = 4
"""A sweep starts no further measurement after it has counted this multiple of the limit of files."""

STOPPED = (
    "[Background jobs wrote to this workspace, its home or /tmp, beyond the limit: {size:,} bytes in {files:,} files, "
    "where {limits.bytes:,} bytes in {limits.files:,} files are allowed. The programs that wrote were killed: {count}. "
    "Delete what you do not need.]"
)

Writer = tuple[int, int]
"""A process id and its start tick, which together identify a process uniquely."""


@dataclass(slots=True)
class _DiskMeasurement:
    """The last measurement of a workspace.

    Attributes:
        written: Bytes that each of its programs had written.
        ran: Nanoseconds that each of its programs had run.
        held: Number of files and of bytes in the workspace.
        free: Free bytes on its disk.
        sweep: Number of the sweep that measured it.
        looks: Number of checks since then.
        times_without_job: Consecutive checks in which it grew over its limit but no writing job was found.
    """

    written: dict[Writer, int] = field(default_factory=dict)
    ran: dict[Writer, int] = field(default_factory=dict)
    held: tuple[int, int] = (0, 0)
    free: int = 0
    sweep: int = 0
    checks: int = CHECKS_PER_MEASUREMENT
    times_without_job: int = 0


class DiskBounds:
    """Checks the disk use of one node's workspaces. Blocks.

    Args:
        limits: Limits of each workspace, including its home and its /tmp.
    """

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self._measurements: dict[str, _DiskMeasurement] = {}
        self._sweep = 0
        self._left = 0

    def start_sweep(self, names: list[str]) -> list[str]:
        """Start a sweep and return the workspaces in checking order: the least recently measured first."""
        self._sweep += 1
        self._left = SWEEP_LIMITS * self._limits.files
        return sorted(names, key=lambda name: self._measurements[name].sweep if name in self._measurements else 0)

    def forget_others(self, names: set[str]) -> None:
        """Forget all workspaces except these."""
        for gone in self._measurements.keys() - names:
            del self._measurements[gone]

    def find_writers(self, folder: HostFolder, main_pid: int) -> tuple[list[Writer], str]:
        """Return the programs to kill, and a notice for the model that contains `{count}`."""
        before = self._measurements.setdefault(folder.conversation_id, _DiskMeasurement())
        written = _read_written_bytes(main_pid)
        free = _read_free_bytes(folder)
        grown = {
            writer: size - before.written.get(writer, 0)
            for writer, size in written.items()
            if size - before.written.get(writer, 0) >= WRITTEN_BYTES
        }
        below = {pid for child in _find_children(main_pid) for pid in iter_descendants(child)}
        has_dropped = bool(below) and before.free - free >= WRITTEN_BYTES
        before.free = max(before.free, free)
        before.checks += 1
        is_due = grown or has_dropped or (below and before.checks > CHECKS_PER_MEASUREMENT)
        if not is_due or self._left <= 0:
            return [], ""  # a workspace that is due stays due until the sweep has room for it
        files, size, is_cut = _measure_folder(folder, self._limits)
        self._left -= files
        self._measurements[folder.conversation_id] = look = _DiskMeasurement(
            written, _read_run_times(written), (files, size), free, self._sweep, 0
        )
        is_over = files > self._limits.files or size > self._limits.bytes
        is_growing = files > before.held[0] or size > before.held[1] or (is_cut and (grown or has_dropped))
        if not is_over or not is_growing:
            return [], ""
        notice = STOPPED.format(size=size, files=files, limits=self._limits, count="{count}")
        jobs = [writer for writer in grown if writer[0] in below]
        look.times_without_job = 0 if jobs else before.times_without_job + 1
        # A shell's counter includes the writes of its finished commands. So a shell is killed only while it still
        # writes, and other jobs only if the workspace grows a second time although no job's counter shows it.
        if jobs or look.times_without_job < 2:
            return jobs, notice
        running = [writer for writer, ran in look.ran.items() if ran > before.ran.get(writer, 0)]
        return [writer for writer in running if writer[0] in below] or list(grown), notice


def _measure_folder(folder: HostFolder, limits: TreeLimits) -> tuple[int, int, bool]:
    """Return the number of files and of bytes, and whether counting stopped early because of the limits."""
    files = size = 0
    for top in (folder.workspace, folder.home, folder.temporary):
        with suppress(OSError), Directory(top) as directory:
            waiting = ["."]
            while waiting:
                # the directory was removed, is unreadable or too deep: the next action reports it
                with suppress(OSError):
                    path = waiting.pop()
                    descriptor = directory.open(path, os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
                    try:
                        with os.scandir(descriptor) as scan:
                            for item in scan:
                                more, is_directory = _read_entry_size(item)
                                files, size = files + 1, size + more
                                if is_directory:
                                    waiting.append(f"{path}/{item.name}")
                                if files > MEASURED_LIMITS * limits.files or size > MEASURED_LIMITS * limits.bytes:
                                    return files, size, True
                    finally:
                        os.close(descriptor)
    return files, size, False


def _read_entry_size(item: os.DirEntry[str]) -> tuple[int, bool]:
    """Return the bytes that an entry takes on the disk, and whether it is a directory."""
    try:
        status = item.stat(follow_symlinks=False)
    except OSError:  # the entry was removed
        return 0, False
    is_file = stat.S_ISREG(status.st_mode)
    return max(status.st_size, status.st_blocks * 512) if is_file else 0, stat.S_ISDIR(status.st_mode)


def _read_free_bytes(folder: HostFolder) -> int:
    with suppress(OSError):
        found = os.statvfs(folder.workspace)
        return found.f_bavail * found.f_frsize
    return 0


def _read_written_bytes(main_pid: int) -> dict[Writer, int]:
    written = {}
    for pid in iter_descendants(main_pid):
        with suppress(OSError, ValueError):  # the process has ended
            fields = dict(line.split(b": ") for line in Path(f"/proc/{pid}/io").read_bytes().splitlines())
            # Writes through a memory mapping count only once they reach the disk.
            written[pid, read_start_tick(pid)] = max(int(fields[b"wchar"]), int(fields[b"write_bytes"]))
    return written


def _read_run_times(writers: Iterable[Writer]) -> dict[Writer, int]:
    ran = {}
    for pid, tick in writers:
        with suppress(OSError, ValueError):
            threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
            ran[pid, tick] = sum(int(thread.read_bytes().split()[0]) for thread in threads)
    return ran


def _find_children(main_pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{main_pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found
