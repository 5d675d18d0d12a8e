"""The processes below a process, found and ended by way of /proc.

Does not: find a process that left both the tree and the terminal session; a sandbox with a process namespace does.
"""

from __future__ import annotations

import os
import signal
from time import CLOCK_BOOTTIME, clock_gettime

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Descendant:
    """A live entry of the process table."""

    __slots__ = ("parent", "pid", "session", "started")

    def __init__(self, pid: int, parent: int, session: int, started: int) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.started = started


def present_tick() -> int:
    """Return the clock in which the kernel notes when a process began."""
    return int(clock_gettime(CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


def live_descendants(root: int) -> list[Descendant]:
    """Return what runs below `root` or in the terminal session that it leads; not `root`, and nothing that has died."""
    table = [entry for name in os.listdir("/proc") if name.isdigit() and (entry := _read(name))]
    children: dict[int, list[Descendant]] = {}
    for entry in table:
        children.setdefault(entry.parent, []).append(entry)
    found = {entry.pid: entry for entry in table if entry.session == root}
    waiting = [root, *found]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child.pid not in found:
                found[child.pid] = child
                waiting.append(child.pid)
    found.pop(root, None)
    return list(found.values())


def kill_descendants(root: int, *, since_tick: int = 0) -> bool:
    """Send SIGKILL to all below `root` that began at this tick or later; return whether there were any."""
    victims = [entry for entry in live_descendants(root) if entry.started >= since_tick and entry.pid != os.getpid()]
    for victim in victims:
        kill(victim.pid)
    return bool(victims)


def kill(pid: int) -> None:
    """Send SIGKILL to a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(name: str) -> Descendant | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Descendant(int(name), parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))
