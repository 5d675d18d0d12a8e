"""How many more sessions a node can hold, and which of them end when it can hold no more.

Every session has a terminal, of which the kernel gives a limited number to the whole machine, and about 12 MB.

Holds: no session in which an action is in progress is ended for room. Who holds far more than others of what there is
too little of ends first, whatever runs in the background; of all others one with background jobs only if none rests.
Does not: promise room: sessions that work are never ended, and other programs use terminals and memory, too.
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
from tool_worker.workspace.resource_usage import descendants, workspace_usage

SPARE_TERMINALS = 0.1
SPARE_MEMORY = 0.1
"""Shares that are kept free, so that what is about to start does not fail."""

ENDED_SHARE = 16
"""One in this many sessions ends when there is no room, so that the next starts find some."""
GREEDY_FACTOR = 4
"""A session is greedy if it holds more than this multiple of what most hold, and more than most programs need."""
ASKED_LIMIT = 256
END_LIMIT_SECONDS = 3.0


class NodeCapacity:
    """What is left of the machine's terminals, memory and inotify instances.

    Args:
        proc: Where the kernel's process file system is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def is_short(self) -> bool:
        """Whether there is too little of anything; see `shortage`."""
        return self.shortage() is not None

    def shortage(self) -> Callable[[HostFolder], int] | None:
        """Return how to measure a session's share of the scarce resource; None if nothing is scarce.

        Less than a tenth of the terminals or of the memory, or no inotify instance. What cannot be read is not short.
        """
        with suppress(OSError, ValueError, KeyError):
            terminals = {name: self._number(f"sys/kernel/pty/{name}") for name in ("nr", "max", "reserve")}
            # The reserve is for terminals outside of any container or sandbox.
            if terminals["nr"] >= (1 - SPARE_TERMINALS) * (terminals["max"] - terminals["reserve"]):
                return _terminals
        with suppress(OSError, ValueError, KeyError):
            lines = (self._proc / "meminfo").read_text().splitlines()
            kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            if kilobytes["MemAvailable"] < SPARE_MEMORY * kilobytes["MemTotal"]:
                return _memory
        return None if _is_inotify_left() else _watchers

    def _number(self, name: str) -> int:
        return int((self._proc / name).read_text())


async def free_capacity(folders: Iterable[HostFolder], held: Callable[[HostFolder], int]) -> int:
    """End a sixteenth of the living sessions, at least one: the greedy first, then those used least recently.

    Args:
        held: how much of the scarce resource one holds, see `NodeCapacity.shortage`.

    Returns:
        How many have ended; fewer if the others are at work.
    """
    living = sorted((folder for folder in folders if folder.is_alive), key=HostFolder.last_used)
    greedy = await asyncio.to_thread(_greedy, living, held)
    wanted = len(living) // ENDED_SHARE + 1
    ended = 0
    for asked, may_kill in ((greedy, True), (living, False), (living, True)):
        for folder in asked[:ASKED_LIMIT]:
            if ended >= wanted:
                return ended
            ended += folder.is_alive and await retire(folder, may_kill=may_kill)
    return ended


def _greedy(living: list[HostFolder], held: Callable[[HostFolder], int]) -> list[HostFolder]:
    """Return the sessions that hold far more than most, the largest consumer first."""
    amounts = {folder: held(folder) for folder in living}
    most = max(GREEDY_FACTOR * statistics.median_low(amounts.values()), ORDINARY[held]) if amounts else 0
    return sorted((folder for folder in living if amounts[folder] > most), key=lambda folder: -amounts[folder])


def _terminals(folder: HostFolder) -> int:
    return workspace_usage(pid, ()).total.terminals if (pid := folder.main_pid()) else 0


def _watchers(folder: HostFolder) -> int:
    return workspace_usage(pid, ()).total.watchers if (pid := folder.main_pid()) else 0


def _memory(folder: HostFolder) -> int:
    """Return the memory of all programs, as far as it is in no file on a disk."""
    pages = 0
    for pid in descendants(folder.main_pid() or 0):
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            pages += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return pages * 1024


ORDINARY: dict[Callable[[HostFolder], int], int] = {_terminals: 8, _watchers: 8, _memory: 256 * 2**20}
"""What any session may hold without being greedy."""


def _is_inotify_left() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return ctypes.get_errno() != errno.EMFILE
    os.close(descriptor)
    return True


async def retire(folder: HostFolder, *, may_kill: bool) -> bool:
    """End one session if it is not at work; a host that ended or hangs meanwhile is left as it is."""
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
