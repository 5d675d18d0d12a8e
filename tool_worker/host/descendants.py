"""Find and kill the descendants of a process through /proc.

Holds: all processes that a host ever started are its descendants, however they detached, because orphans become the
host's own children.
"""

from __future__ import annotations

import os
from time import CLOCK_BOOTTIME, clock_gettime

from tool_worker.host.compiled import signal

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Descendant:
    """A live entry of the process table."""

    __slots__ = ("parent", "pid", "started")

    def __init__(self, pid: int, parent: int, started: int) -> None:
        self.pid = pid
        self.parent = parent
        self.started = started


def current_tick() -> int:
    """Return the current time in the kernel's clock of process start times, in ticks."""
    return int(clock_gettime(CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


def live_descendants(root: int) -> list[Descendant]:
    """Return the live descendants of `root`, without `root` itself."""
    children_of: dict[int, list[Descendant]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := _read_entry(name)):
            children_of.setdefault(entry.parent, []).append(entry)
    found: list[Descendant] = []
    waiting = [root]
    while waiting:
        children_here = children_of.get(waiting.pop(), [])
        found += children_here
        waiting += [child.pid for child in children_here]
    return found


def kill_descendants(root: int) -> bool:
    """Send SIGKILL to all descendants of `root`; return whether there were any."""
    victims = live_descendants(root)
    for victim in victims:
        kill(victim.pid)
    return bool(victims)


def kill_marked(root: int, variable: str) -> None:
    """Send SIGKILL to all descendants of `root` that started with this variable (`NAME=value`)."""
    for entry in live_descendants(root):
        try:
            with open(f"/proc/{entry.pid}/environ", "rb") as file:
                is_marked = variable.encode() in file.read().split(b"\0")
        except OSError:
            continue
        if is_marked:
            kill(entry.pid)


def find_started_since(root: int, tick: int, spared: frozenset[int]) -> list[int]:
    """Return the descendants of `root` that started at this tick or later.

    Args:
        spared: Processes to leave out together with their descendants. A tick alone is too coarse to distinguish
            processes that start at nearly the same time.
    """
    entries = {entry.pid: entry for entry in live_descendants(root)}
    found = []
    for entry in entries.values():
        ancestor: Descendant | None = entry
        while ancestor is not None and ancestor.pid not in spared:
            ancestor = entries.get(ancestor.parent)
        if ancestor is None and entry.started >= tick:
            found.append(entry.pid)
    return found


def find_children(pid: int) -> frozenset[int]:
    """Return the children of a process; empty if the kernel was built without that list."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


def command_line(pid: int) -> bytes:
    """Return the arguments of a process, each followed by a NUL; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process catches or ignores a signal, instead of being ended by it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith((b"SigIgn:", b"SigCgt:"))]
    except OSError:
        return False
    return any(int(mask, 16) & 1 << number - 1 for mask in masks)


def kill(pid: int) -> None:
    """Send SIGKILL to a process if it still exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read_entry(name: str) -> Descendant | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Descendant(int(name), parent=int(fields[1]), started=int(fields[19]))
