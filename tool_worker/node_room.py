"""How many more sessions a node can hold, and which of them end when it can hold no more.

Every session has a terminal, of which the kernel gives a limited number to the whole machine, and about 12 MB.

Holds: no session in which an action is in progress is ended for room; one with background jobs only if none rests.
Does not: promise room: sessions that work are never ended, and other programs use terminals and memory, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tool_worker.host_connection import HostConnection
from tool_worker.host_folder import HostFolder
from tool_worker.host_launch import wait_until_dead
from tool_worker.workspace_errors import WorkspaceUnavailable

SPARE_TERMINALS = 0.1
SPARE_MEMORY = 0.1
"""Shares that are kept free, so that what is about to start does not fail."""

ENDED_SHARE = 16
"""One in so many sessions ends when there is no room: enough that this is not needed at every start."""
ASKED_LIMIT = 256
END_LIMIT_SECONDS = 3.0


class NodeRoom:
    """What is left of the machine's terminals and memory.

    Args:
        proc: Where the kernel's process file system is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def is_short(self) -> bool:
        """Whether less than a tenth of the terminals or of the memory is free. What cannot be read is not short."""
        with suppress(OSError, ValueError, KeyError):
            terminals = {name: self._number(f"sys/kernel/pty/{name}") for name in ("nr", "max", "reserve")}
            # The reserve is for terminals outside of any container or sandbox.
            if terminals["nr"] >= (1 - SPARE_TERMINALS) * (terminals["max"] - terminals["reserve"]):
                return True
        with suppress(OSError, ValueError, KeyError):
            lines = (self._proc / "meminfo").read_text().splitlines()
            kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            return kilobytes["MemAvailable"] < SPARE_MEMORY * kilobytes["MemTotal"]
        return False

    def _number(self, name: str) -> int:
        return int((self._proc / name).read_text())


async def end_least_used(folders: Iterable[HostFolder]) -> int:
    """End a sixteenth of the living sessions, at least one, those first that were used least recently.

    Returns:
        How many have ended; fewer if the others are at work.
    """
    living = sorted((folder for folder in folders if folder.is_alive), key=HostFolder.last_used)
    wanted = len(living) // ENDED_SHARE + 1
    ended = 0
    for may_kill in (False, True):
        for folder in living[:ASKED_LIMIT]:
            if ended >= wanted:
                return ended
            ended += folder.is_alive and await _retire(folder, may_kill=may_kill)
    return ended


async def _retire(folder: HostFolder, *, may_kill: bool) -> bool:
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
