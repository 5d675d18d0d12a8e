"""Limits how many hosts of a node start at once, in all its tool workers together.

    <root>/.node/start-<n>.lock     held while one of `STARTS_AT_ONCE` hosts starts

A start takes some tens of milliseconds of CPU. Without a limit, hundreds of starts would share the node's processors
with commands that run already.

Holds: locks are kernel locks on open files, so a worker that dies gives its slots back.
Does not: grant slots in order among workers; within one worker, they are granted in order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tool_worker.workspace.launch.host_folder import try_lock
from tool_worker.workspace.layers import NODE_FOLDER

STARTS_AT_ONCE = max(4, os.cpu_count() or 1)
POLL_SECONDS = 0.02


class StartSlots:
    """The slots of one node for starts, as one of its tool workers uses them.

    Args:
        root: Directory of the node's workspaces, which its tool workers share.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / NODE_FOLDER
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it for the time of the block."""
        async with self._queue:
            slot = await self._wait()
        try:
            yield
        finally:
            os.close(slot)

    async def _wait(self) -> int:
        while True:
            slot = self._take()
            if slot is not None:
                return slot
            await asyncio.sleep(POLL_SECONDS)

    def _take(self) -> int | None:
        """Return the descriptor of a slot; None if all of them are held."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(STARTS_AT_ONCE):
            slot = try_lock(self._folder / f"start-{number}.lock")
            if slot is not None:
                return slot
        return None
