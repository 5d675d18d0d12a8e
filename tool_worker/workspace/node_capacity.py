"""Checks how many more sessions a node can hold, and chooses the sessions to end when it is full.

Each session uses a terminal, of which the kernel has a limited number for the whole machine, and about 12 MB.

Holds: a session with an action in progress is never ended to make room. A session that uses far more of the scarce
resource than others ends first, even with background jobs. Of the others, idle sessions end before those with
background jobs.
Does not: guarantee room: busy sessions are never ended, and other programs use terminals and memory, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tool_worker.errors import WorkspaceUnavailable
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.resource_usage import iter_descendants, measure_usage

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

        Scarce means: less than a tenth of the terminals or of the memory is free, or no inotify instance. A resource
        that cannot be read counts as free.
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
