"""Limits the size of a workspace, including its home and its temporary files, while actions run in it.

Holds: measuring takes at most a tenth of the time, for any size of workspace. An action that grows a workspace over
its limit is stopped at the next measurement; an action that deletes files is not.
Does not: limit background jobs between two actions (`disk_bounds` does), or directories that users named by path.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tool_worker.errors import HostLost, WorkspaceTooLarge
from tool_worker.worker.steps.action_run import ActionRun, RestOfHostCall
from tool_worker.workspace import MAX_PATH_BYTES, HostFolder, HostResult, TreeLimits, measure

FIRST_CHECK_SECONDS = 5.0
PAUSE_FACTOR = 10.0
REMEMBERED_WORKSPACES = 1_000

OVER = (
    "[This workspace holds {size:,} bytes in {files:,} files, its home and /tmp included; the limit is "
    "{limits.bytes:,} bytes in {limits.files:,} files. Delete what you do not need now: the excess is not saved, and "
    "actions that add more are stopped.]"
)
TOO_DEEP = (
    f"[This workspace has paths longer than {MAX_PATH_BYTES:,} bytes. Delete them now: while they exist, nothing "
    "in the workspace is saved.]"
)

_NO_LIMITS = TreeLimits(files=sys.maxsize, bytes=sys.maxsize)


@dataclass(slots=True)
class _Measurement:
    """A measurement of a workspace, with its time and its duration in seconds."""

    files: int
    size_bytes: int
    is_too_deep: bool
    at: float
    took: float


class WorkspaceQuota:
    """Enforces the size limits of one node's workspaces."""

    def __init__(
        self,
        root: Path,
        limits: TreeLimits | None = None,
        *,
        first_look_seconds: float = FIRST_CHECK_SECONDS,
        pause_factor: float = PAUSE_FACTOR,
    ) -> None:
        self._root = root
        self._limits = limits or TreeLimits()
        self._first_look_seconds = first_look_seconds
        self._pause_factor = pause_factor
        self._measurements: OrderedDict[str, _Measurement] = OrderedDict()

    async def stop_excess(self, run: ActionRun, rest: RestOfHostCall) -> HostResult:
        """Wait for the host's answer, and stop the action if it makes the workspace too large."""
        acting = asyncio.ensure_future(rest(run))
        watching = asyncio.ensure_future(self.wait_until_exceeded(run.host.conversation_id))
        try:
            await asyncio.wait({acting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not acting.done():
                with suppress(HostLost):
                    await run.host.interrupt(run.action.id)
            return await acting
        finally:
            acting.cancel()
            watching.cancel()

    async def make_notice(self, conversation_id: str) -> str:
        """Return the notice for the model after an action that may have written, or "" if within the limits."""
        last = self._measurements.get(conversation_id)
        now = asyncio.get_running_loop().time()
        if last is None or self._is_over(last) or now - last.at >= self._pause_factor * last.took:
            last = await self._measure(conversation_id)
        if last.is_too_deep:
            return TOO_DEEP
        return OVER.format(files=last.files, size=last.size_bytes, limits=self._limits) if self._is_over(last) else ""

    async def wait_until_exceeded(self, conversation_id: str) -> None:
        """Return when a workspace grows over its limit, or keeps growing if it was over the limit before."""
        before = self._measurements.get(conversation_id)
        may_clear_up = before is None or self._is_over(before)
        await asyncio.sleep(self._first_look_seconds)
        first = look = await self._measure(conversation_id)
        while not (
            self._is_over(look)
            and (not may_clear_up or (look.size_bytes > first.size_bytes or look.files > first.files))
        ):
            await asyncio.sleep(max(self._first_look_seconds, self._pause_factor * look.took))
            look = await self._measure(conversation_id)

    def _is_over(self, look: _Measurement) -> bool:
        return look.is_too_deep or look.files > self._limits.files or look.size_bytes > self._limits.bytes

    async def _measure(self, conversation_id: str) -> _Measurement:
        loop = asyncio.get_running_loop()
        started = loop.time()
        files, size, is_too_deep = await asyncio.to_thread(self._measure_folders, conversation_id)
        ended = loop.time()
        look = _Measurement(files, size, is_too_deep, ended, ended - started)
        self._measurements[conversation_id] = look
        self._measurements.move_to_end(conversation_id)
        while len(self._measurements) > REMEMBERED_WORKSPACES:
            self._measurements.popitem(last=False)
        return look

    def _measure_folders(self, conversation_id: str) -> tuple[int, int, bool]:
        folder = HostFolder(self._root, conversation_id)
        files = size = 0
        for directory in (folder.workspace, folder.home, folder.temporary):
            try:
                # Measure everything: a workspace over the limit is watched for growth.
                more_files, more_bytes = measure(directory, _NO_LIMITS)
            except WorkspaceTooLarge:
                return 0, 0, True
            except OSError:
                continue  # the directory does not exist
            files, size = files + more_files, size + more_bytes
        return files, size, False
