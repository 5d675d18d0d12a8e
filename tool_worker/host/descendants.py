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


def kill_descendants(root: int) -> bool:
    """Send SIGKILL to all below `root`, but not to it; return whether there were any."""
    victims = live_descendants(root)
    for victim in victims:
        _kill(victim.pid)
    return bool(victims)


def kill_tree(root: int, *, since_tick: int, spared: frozenset[int]) -> None:
    """Send SIGKILL to `root`, and then to all below it that began at this tick or later.

    Args:
        spared: Children of `root` that live on, with all below them: a tick is too coarse to tell what began shortly
            before from what began shortly after.
    """
    # Looked up before, because the tree falls apart with its root; killed after, so that it cannot say "Killed".
    entries = {entry.pid: entry for entry in live_descendants(root)}
    victims = []
    for entry in entries.values():
        ancestor: Descendant | None = entry
        while ancestor is not None and ancestor.pid not in spared:
            ancestor = entries.get(ancestor.parent)
        if ancestor is None and entry.started >= since_tick:
            victims.append(entry.pid)
    _kill(root)
    for pid in victims:
        _kill(pid)


def children(pid: int) -> frozenset[int]:
    """Return the children of a process; empty where the kernel was built without that list."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


def _kill(pid: int) -> None:
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
