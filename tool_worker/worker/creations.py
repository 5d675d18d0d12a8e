"""Conversations that begin again under the id of a deleted one, told apart on a node.

    <root>/<conversation>/creation     when the conversation was created, in ms, as its store has noted it

Holds: what an earlier conversation of the same id has left, its journal included, is moved aside before an action of
the next one runs; the reaper removes it. A workspace of an earlier version, which has no such file, stays, unless its
conversation is known to be deleted.
Does not: look at checkpoints, which stay under the id of their conversation.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from broker.contract.events import ConversationCreated
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionReclaimed, ClaimOutcome
from broker.log.event_log import EventLog
from tool_worker.errors import WorkspaceUnavailable
from tool_worker.launch.host_folder import HostFolder
from tool_worker.node.reaper import REMOVED
from tool_worker.workspace.workspaces import Workspaces

CREATION = "creation"


class Creations:
    """Keeps the workspaces of one node to the conversations that they were opened for.

    Args:
        root: Directory of the node's workspaces.
    """

    def __init__(self, log: EventLog, root: Path, workspaces: Workspaces) -> None:
        self._log = log
        self._root = root.absolute()
        self._workspaces = workspaces

    async def refusal(self, delivery: ActionDelivery, claim: ClaimOutcome) -> WorkspaceUnavailable | None:
        """Do what `check` does for an action to be run here; return what it has to be answered with instead.

        Raises:
            StoreError: the store does not say.
        """
        if isinstance(claim, ActionClaimed | ActionReclaimed) and not delivery.is_anywhere:
            try:
                await self.check(delivery.conversation_id)
            except WorkspaceUnavailable as error:
                return error
        return None

    async def check(self, conversation_id: str) -> None:
        """See to it that what is here belongs to the conversation that the store has.  Idempotent.

        Raises:
            StoreError: the store does not say.
            WorkspaceUnavailable: what an earlier conversation has left cannot be moved; retryable.
        """
        store = self._log.store
        meta = store.keys(conversation_id).meta
        found = await store.persist(lambda: store.connection.call("HGET", meta, "created_ms"))
        if found is None:
            return
        try:
            if not self._is_of(conversation_id, created := found.decode()):
                await self._workspaces.close(conversation_id)
                await self._move_aside(conversation_id, created)
        except OSError as error:
            raise WorkspaceUnavailable(
                f"What an earlier conversation {conversation_id} has left here cannot be moved: {error}"
            ) from error

    def _is_of(self, conversation_id: str, created: str) -> bool:
        """Say whether what is here is of this creation, and note it where nothing says otherwise."""
        folder, file = HostFolder(self._root, conversation_id), self._root / conversation_id / CREATION
        try:
            return file.read_text() == created
        except FileNotFoundError:
            if folder.deleted_at() is not None:
                return False
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _note(file, created)
        return True

    async def _move_aside(self, conversation_id: str, created: str) -> None:
        folder, place = HostFolder(self._root, conversation_id), self._root / conversation_id
        folder.create()
        async with folder.opening():
            # Another worker of the node may have been faster.
            if await asyncio.to_thread(self._is_of, conversation_id, created):
                return
            if folder.is_alive:
                raise WorkspaceUnavailable(f"An earlier conversation {conversation_id} still runs here.")
            begun = (await self._log.read(conversation_id, until=1))[0]
            place.rename(self._root / f"{REMOVED}{secrets.token_hex(8)}")
            place.mkdir(mode=0o700)
            if isinstance(begun, ConversationCreated) and begun.forked_from is None and begun.workspace.source is None:
                folder.workspace.mkdir(mode=0o700)  # or a checkpoint of the earlier one would be restored
            _note(place / CREATION, created)


def _note(file: Path, created: str) -> None:
    draft = file.with_name(f".{CREATION}.{secrets.token_hex(4)}")
    draft.write_text(created)
    draft.replace(file)
