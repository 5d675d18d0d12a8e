"""What background jobs write to the disk of a node: workspaces over their limit are found, and their writers killed.

Holds: a workspace is measured when its programs have written, when free space has dropped, and at every twelfth look:
no counter knows what `fallocate` takes. In one that is over its limit and has grown, the programs that wrote are
killed, or the jobs that ran where no counter tells which; its host stays, and its shell unless the shell itself
writes. A measurement and a sweep are bounded, and what was not measured for longest comes first.
Does not: see processes in another pid namespace's /proc, as those of containers may be, or files in directories that
were named. Between two looks, a job writes as fast as the disk is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tool_worker.workspace import Directory, HostFolder, TreeLimits, descendants, start_tick

WRITTEN_BYTES = 2**20
"""Programs that have written less since the last look, and space that has dropped by less, do not fill a disk."""
LOOKS_PER_MEASUREMENT = 12
MEASURED_LIMITS = 2
"""A workspace is measured up to this multiple of its limits."""
SWEEP_LIMITS = 4
"""A sweep stops measuring further workspaces after it has seen this multiple of the limit of files."""

STOPPED = (
    "[Background jobs wrote to this workspace, its home or /tmp, beyond the limit: {size:,} bytes in {files:,} files, "
    "where {limits.bytes:,} bytes in {limits.files:,} files are allowed. The programs that wrote were killed: {count}. "
    "Delete what you do not need.]"
)

Writer = tuple[int, int]
"""The number of a process and its start, which together name it for ever."""


@dataclass(slots=True)
class _Look:
    """What was seen of a workspace when it was last measured.

    Attributes:
        written: how much each of its programs had written.
        ran: for how many nanoseconds each of them had run.
        held: how many files and bytes it held.
        free: how many bytes were free on its disk.
        sweep: when that was, as sweeps count.
        looks: how often it was looked at since.
        times_without_job: how often in a row it had grown beyond its limit and no job was found that wrote.
    """

    written: dict[Writer, int] = field(default_factory=dict)
    ran: dict[Writer, int] = field(default_factory=dict)
    held: tuple[int, int] = (0, 0)
    free: int = 0
    sweep: int = 0
    looks: int = LOOKS_PER_MEASUREMENT
    times_without_job: int = 0


class DiskBounds:
    """Looks after the disk use of one node's workspaces. Blocks.

    Args:
        limits: what each workspace may hold, its home and its /tmp included.
    """

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self._looks: dict[str, _Look] = {}
        self._sweep = 0
        self._left = 0

    def begin_sweep(self, names: list[str]) -> list[str]:
        """Return the workspaces in the order in which they are to be looked at: the least recently measured first."""
        self._sweep += 1
        self._left = SWEEP_LIMITS * self._limits.files
        return sorted(names, key=lambda name: self._looks[name].sweep if name in self._looks else 0)

    def forget_others(self, names: set[str]) -> None:
        """Forget all workspaces but these."""
        for gone in self._looks.keys() - names:
            del self._looks[gone]

    def writers(self, folder: HostFolder, main_pid: int) -> tuple[list[Writer], str]:
        """Return the programs that have to be killed, and what the model has to know of it, with `{count}` in it."""
        before = self._looks.setdefault(folder.conversation_id, _Look())
        written, free = _written(main_pid), _free(folder)
        grown = {
            writer: size - before.written.get(writer, 0)
            for writer, size in written.items()
            if size - before.written.get(writer, 0) >= WRITTEN_BYTES
        }
        below = {pid for child in _children(main_pid) for pid in descendants(child)}
        has_dropped = bool(below) and before.free - free >= WRITTEN_BYTES
        before.free = max(before.free, free)
        before.looks += 1
        is_due = grown or has_dropped or (below and before.looks > LOOKS_PER_MEASUREMENT)
        if not is_due or self._left <= 0:
            return [], ""  # one that has to wait for its turn is due until it has come
        files, size, is_cut = _held(folder, self._limits)
        self._left -= files
        self._looks[folder.conversation_id] = look = _Look(written, _ran(written), (files, size), free, self._sweep, 0)
        is_over = files > self._limits.files or size > self._limits.bytes
        is_growing = files > before.held[0] or size > before.held[1] or (is_cut and (grown or has_dropped))
        if not is_over or not is_growing:
            return [], ""
        notice = STOPPED.format(size=size, files=files, limits=self._limits, count="{count}")
        jobs = [writer for writer in grown if writer[0] in below]
        look.times_without_job = 0 if jobs else before.times_without_job + 1
        # A shell is counted what its commands had written when they ended. Only one that still writes is killed, and
        # other jobs only if it grows once more although no counter of a job shows it.
        if jobs or look.times_without_job < 2:
            return jobs, notice
        running = [writer for writer, ran in look.ran.items() if ran > before.ran.get(writer, 0)]
        return [writer for writer in running if writer[0] in below] or list(grown), notice


def _held(folder: HostFolder, limits: TreeLimits) -> tuple[int, int, bool]:
    """Return how many files and bytes there are, and whether there may be more: no directory is read further then."""
    files = size = 0
    for top in (folder.workspace, folder.home, folder.temporary):
        with suppress(OSError), Directory(top) as directory:
            waiting = ["."]
            while waiting:
                with suppress(OSError):  # it is gone, closed to us, or nested too deep: for the next action to report
                    path = waiting.pop()
                    descriptor = directory.open(path, os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
                    try:
                        with os.scandir(descriptor) as scan:
                            for item in scan:
                                more, is_directory = _seen(item)
                                files, size = files + 1, size + more
                                if is_directory:
                                    waiting.append(f"{path}/{item.name}")
                                if files > MEASURED_LIMITS * limits.files or size > MEASURED_LIMITS * limits.bytes:
                                    return files, size, True
                    finally:
                        os.close(descriptor)
    return files, size, False


def _seen(item: os.DirEntry[str]) -> tuple[int, bool]:
    """Return how much of the disk an entry takes, and whether it is a directory."""
    try:
        status = item.stat(follow_symlinks=False)
    except OSError:  # it has been removed
        return 0, False
    is_file = stat.S_ISREG(status.st_mode)
    return max(status.st_size, status.st_blocks * 512) if is_file else 0, stat.S_ISDIR(status.st_mode)


def _free(folder: HostFolder) -> int:
    with suppress(OSError):
        found = os.statvfs(folder.workspace)
        return found.f_bavail * found.f_frsize
    return 0


def _written(main_pid: int) -> dict[Writer, int]:
    written = {}
    for pid in descendants(main_pid):
        with suppress(OSError, ValueError):  # it has ended
            fields = dict(line.split(b": ") for line in Path(f"/proc/{pid}/io").read_bytes().splitlines())
            # What is written through a mapping is counted only where it reaches the disk.
            written[pid, start_tick(pid)] = max(int(fields[b"wchar"]), int(fields[b"write_bytes"]))
    return written


def _ran(writers: Iterable[Writer]) -> dict[Writer, int]:
    ran = {}
    for pid, tick in writers:
        with suppress(OSError, ValueError):
            threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
            ran[pid, tick] = sum(int(thread.read_bytes().split()[0]) for thread in threads)
    return ran


def _children(main_pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{main_pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found
