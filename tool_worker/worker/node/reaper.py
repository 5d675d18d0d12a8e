"""The reaper removes the files of closed conversations from a node after their time to live.

Leftovers of killed processes are removed at once: processes and temporary files of dead hosts, partly filled
workspaces, and layers that no workspace uses.

Holds:
    - A conversation's files are removed only if its store reports it closed, or if it was deleted from its store. Other
      conversations that the store does not know may belong to another store and stay.
    - Nothing outside the node's own directory is removed, and no directory that another conversation uses.
Does not: remove checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.log import Conversations
from broker.runtime import DeckhandsError, UnknownConversation, is_conversation_id, make_extra
from broker.store import Store
from tool_worker.sandbox import NoSandbox, find_temporary_directory
from tool_worker.workspace import KEEP_SECONDS, HostFolder, Layers, remove_staging, remove_tree

SWEEP_SECONDS = 600.0
REMOVED = ".removed-"

_log = logging.getLogger(__name__)


class Reaper:
    """Removes directories of one node.

    Args:
        root: Directory of the node's workspaces.
        keep_seconds: How long the files of a closed conversation are kept after their last use.
    """

    def __init__(self, store: Store, root: Path, keep_seconds: float) -> None:
        self._conversations = Conversations(store)
        self._clock = store.clock
        self._root = root.absolute()
        self._keep_seconds = keep_seconds
        self._layers = Layers(root)

    async def run(self) -> None:
        """Sweep every `SWEEP_SECONDS`, forever. Failures are logged."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                for conversation_id in await self.sweep():
                    _log.info("removed the workspace of %s", conversation_id, extra=make_extra(conversation_id))
            except (OSError, DeckhandsError) as error:
                _log.warning("cannot remove workspaces: %s", error)

    async def mark_if_deleted(self, conversation_id: str) -> None:
        """Mark a conversation's files as deleted if the store no longer knows the conversation. Idempotent.

        Raises:
            StoreError: The store cannot be read.
        """
        try:
            await self._conversations.load_row(conversation_id)
        except UnknownConversation:
            folder = HostFolder(self._root, conversation_id)
            now = self._clock.now().timestamp()
            await asyncio.to_thread(folder.mark_deleted, now)

    async def sweep(self) -> list[str]:
        """Remove all due workspaces and return their conversations. Idempotent.

        A directory that cannot be removed is logged; the sweep continues with the next one.

        Raises:
            OSError: The directory of the workspaces cannot be read.
            StoreError: The store cannot be read.
        """
        found = await asyncio.to_thread(self._find_folders)
        removed = []
        for conversation_id in found:
            with _log_failed_removal(conversation_id):
                if await self._is_due(conversation_id, found) and await self._remove(conversation_id):
                    removed.append(conversation_id)
                await self._clear_after_kills(conversation_id)
        await asyncio.to_thread(self._remove_doomed)
        now = self._clock.now().timestamp()
        await asyncio.to_thread(self._layers.remove_unused, now - KEEP_SECONDS)
        return removed

    async def _clear_after_kills(self, conversation_id: str) -> None:
        await asyncio.to_thread(remove_staging, self._root / conversation_id)
        folder = HostFolder(self._root, conversation_id)
        host_id = await asyncio.to_thread(_find_dead_host, folder)
        if host_id:
            async with folder.hold_opening_lock():
                if not folder.is_alive:
                    await asyncio.to_thread(NoSandbox().kill_stragglers, host_id)

    async def _is_due(self, conversation_id: str, found: dict[str, Path]) -> bool:
        # Cheap checks first: most workspaces are in use or not closed.
        now = self._clock.now().timestamp()
        if now - HostFolder(self._root, conversation_id).read_last_used() / 1e9 < self._keep_seconds:
            return False
        try:
            row = await self._conversations.load_row(conversation_id)
        except UnknownConversation:
            deleted = HostFolder(self._root, conversation_id).read_deleted_at()
            is_due = deleted is not None and now - deleted >= self._keep_seconds
            return is_due and self._is_alone(conversation_id, found)
        if not row.is_closed or now - row.updated.timestamp() < self._keep_seconds:
            return False
        return self._is_alone(conversation_id, found)

    def _is_alone(self, conversation_id: str, found: dict[str, Path]) -> bool:
        folder = self._root / conversation_id
        return not any(other != conversation_id and path.is_relative_to(folder) for other, path in found.items())

    async def _remove(self, conversation_id: str) -> bool:
        folder = HostFolder(self._root, conversation_id)
        folder.create()
        async with folder.hold_opening_lock():
            if folder.is_alive:
                return False  # the order to close it ends its processes first
            doomed = self._root / f"{REMOVED}{secrets.token_hex(8)}"
            # Atomic: other processes see the whole directory or none.
            (self._root / conversation_id).rename(doomed)
        return True

    def _find_folders(self) -> dict[str, Path]:
        """Return the conversations with files on this node, each with its working directory."""
        found: dict[str, Path] = {}
        if not self._root.is_dir():
            return found
        with os.scandir(self._root) as entries:
            for entry in entries:
                if is_conversation_id(entry.name) and entry.is_dir(follow_symlinks=False):
                    found[entry.name] = HostFolder(self._root, entry.name).directory
        return found

    def _remove_doomed(self) -> None:
        for doomed in self._root.glob(f"{REMOVED}*"):
            with _log_failed_removal(doomed.name):
                remove_tree(doomed)


@contextmanager
def _log_failed_removal(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("cannot remove all files in %s: %s", name, error)


def _find_dead_host(folder: HostFolder) -> str:
    """Return the id of a dead, unsandboxed host that left temporary files, or ""."""
    binding = folder.read_binding()
    if binding is None or binding.sandbox != NoSandbox.name or folder.is_alive:
        return ""
    return binding.host_id if find_temporary_directory(binding.host_id).exists() else ""
