"""Limits the resources that a workspace's programs hold between actions; see `resource_usage` and `disk_bounds`.

Holds: checking takes at most a twentieth of the time. In a workspace over its limits, the largest consumers are killed
until it is within them; its host, its other programs and other workspaces are not affected.
Does not: keep a workspace within its limits at every moment. The kernel offers no such limits to unprivileged users, so
a workspace may exceed them until the next check.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import OrderedDict
from contextlib import ExitStack, suppress
from pathlib import Path

from broker.runtime import make_extra
from tool_worker.worker.node.disk_bounds import DiskBounds
from tool_worker.workspace import HostFolder, ResourceUsage, measure_usage, read_start_tick

SWEEP_SECONDS = 5.0
PAUSE_FACTOR = 20.0
TERMINALS = 64
WATCHERS = 32
REMEMBERED_NOTICES = 1_000

ENDED = (
    "[Programs in this workspace held {held}; the limit is {bound}. The programs that held the most were killed: "
    "{count}.]"
)

_log = logging.getLogger(__name__)


class UsageBounds:
    """Enforces the resource limits of one node's workspaces.

    Args:
        root: Directory of the node's workspaces.
        bound: Limits of each workspace.
        disk: Limits the disk use of background jobs; None for no such limit.
    """

    def __init__(self, root: Path, bound: ResourceUsage, disk: DiskBounds | None = None) -> None:
        self._root = root
        self._bound = bound
        self._disk = disk
        self._notices: OrderedDict[str, str] = OrderedDict()

    async def run(self) -> None:
        """Sweep all live workspaces periodically; never returns."""
        loop = asyncio.get_running_loop()
        took = 0.0
        while True:
            await asyncio.sleep(max(SWEEP_SECONDS, PAUSE_FACTOR * took))
            started = loop.time()
            try:
                await self.sweep()
            except OSError as error:
                _log.warning("cannot measure the resources of workspaces: %s", error)
            took = loop.time() - started

    async def sweep(self) -> None:
        """Check all live workspaces once, and kill programs over the limits.

        Raises:
            OSError: The directory of the workspaces cannot be read.
        """
        for conversation_id, notice in (await asyncio.to_thread(self._sweep_all)).items():
            _log.warning("%s: %s", conversation_id, notice, extra=make_extra(conversation_id))
            self._notices[conversation_id] = notice
            while len(self._notices) > REMEMBERED_NOTICES:
                self._notices.popitem(last=False)

    def take_notice(self, conversation_id: str) -> str:
        """Return the notice of killed programs and clear it, or return "" if there is none."""
        return self._notices.pop(conversation_id, "")

    def _sweep_all(self) -> dict[str, str]:
        notices = {}
        names = set()
        entries = [entry.name for entry in self._root.iterdir()] if self._root.is_dir() else []
        for name in self._disk.start_sweep(entries) if self._disk is not None else entries:
            folder = HostFolder(self._root, name)
            with suppress(OSError):  # the workspace is being removed
                if (main_pid := folder.read_main_pid()) is not None and folder.is_alive:
                    names.add(name)
                    found = (
                        self._kill_consumers(main_pid, (folder.directory, folder.home)),
                        self._kill_writers(main_pid, folder),
                    )
                    notices[name] = "\n".join(filter(None, found))
        if self._disk is not None:
            self._disk.forget_others(names)
        return {name: notice for name, notice in notices.items() if notice}

    def _kill_consumers(self, main_pid: int, directories: tuple[Path, ...]) -> str:
        found = measure_usage(main_pid, directories, self._bound.descriptors)
        total = found.total
        count = 0
        while (holder := found.largest_consumer(self._bound)) is not None:
            found.drop(holder)
            count += _kill(holder.pid, holder.start_tick)
        return ENDED.format(held=_describe(total), bound=_describe(self._bound), count=count) if count else ""

    def _kill_writers(self, main_pid: int, folder: HostFolder) -> str:
        if self._disk is None:
            return ""
        writers, notice = self._disk.find_writers(folder, main_pid)
        count = sum(_kill(pid, tick) for pid, tick in writers)
        return notice.format(count=count) if count else ""


def _kill(pid: int, tick: int) -> bool:
    """Kill a process if it is still the same one; its process id may have been reused."""
    with suppress(OSError), ExitStack() as closing:
        process = os.pidfd_open(pid)
        closing.callback(os.close, process)
        if read_start_tick(pid) == tick:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            return True
    return False


def _describe(held: ResourceUsage) -> str:
    deleted = f"{held.unlinked_bytes:,} bytes in deleted files"
    return f"{deleted}, {held.terminals} terminals, {held.watchers} inotify instances, {held.descriptors:,} descriptors"
