"""How a conversation is forgotten: the log, and everything that is kept with it.

Holds: a conversation is there as a whole, or closed and listed until its deletion is repeated, or gone; a kill between
two steps leaves no key that nothing names. Only a log that ends where its reader has found it settled is deleted, and
none that a worker has in hand.
Does not: find a blob whose event was never appended; delete delegates or checkpoints, nor keys that expire by
themselves within ten minutes. Under the id of a deleted conversation, another can begin.
Keys: those of a conversation, see `broker.store.keys`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker.contract import codec
from broker.limits import Ledger
from broker.runtime import CorruptEntry, DeckhandsError, StoreTooNew, UnknownConversation, failpoint
from broker.store import Store

READ_BATCH = 500
KEYS_AT_ONCE = 200
POLL_SECONDS = 0.05
RELEASE_LIMIT_SECONDS = 45.0
"""How long an owner may have a settled conversation in hand; it gives up one that rests after 30 s."""


class NotDeleted(DeckhandsError):
    """A conversation is in use, and was not deleted."""

    code = "not_deleted"
    retryable = True


class Deletion:
    """Deletes conversations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def delete(self, conversation_id: str, *, last_id: int, limit_seconds: float = RELEASE_LIMIT_SECONDS) -> None:
        """Delete a settled conversation and its keys. Idempotent: one that is half deleted is deleted by a repetition.

        Its workspace's processes are ended, and its files are removed by the node as those of a closed one.

        Args:
            last_id: the event at which it was settled.
            limit_seconds: how long to wait for its owner to give it up.

        Raises:
            UnknownConversation: no such conversation; it may have been deleted by an earlier call.
            NotDeleted: its log has grown, or a worker still has it in hand. Nothing was changed.
        """
        await self.begin(conversation_id, last_id=last_id, limit_seconds=limit_seconds)
        names = self._store.keys(conversation_id)
        after = 0
        while batch := await self._entries(names.events, after):
            after += len(batch)
            doomed = sorted({key for entry in batch for key in self._kept_with(conversation_id, entry)})
            for at in range(0, len(doomed), KEYS_AT_ONCE):
                commands = [("UNLINK", key) for key in doomed[at : at + KEYS_AT_ONCE]]
                await self._store.call_many(commands)
                failpoint("deletion.texts_gone")
        await Ledger(self._store).forget(conversation_id)
        failpoint("deletion.before_end")
        await self._call("deck_end_deletion", conversation_id)

    async def begin(self, conversation_id: str, *, last_id: int, limit_seconds: float = RELEASE_LIMIT_SECONDS) -> None:
        """Let a conversation take no more events until `delete` forgets it; takes and raises what that does."""
        clock = self._store.clock
        deadline = clock.monotonic() + limit_seconds
        while True:
            outcome = await self._call("deck_begin_deletion", conversation_id, last_id)
            if outcome[0] == "news":
                raise NotDeleted(
                    f"The conversation {conversation_id} has continued meanwhile.", remedy="Cancel it first."
                )
            if outcome[0] != "owned":
                return
            if clock.monotonic() > deadline:
                raise NotDeleted(
                    f"The conversation {conversation_id} is still in the hands of {outcome[1].decode()}.",
                    remedy="Delete it again in a minute.",
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _entries(self, events: str, after: int) -> Sequence[bytes]:
        command = ("XRANGE", events, f"{after + 1}-0", "+", "COUNT", READ_BATCH)
        found = await self._store.call(*command)
        return [fields[-1] for _, fields in found]

    def _kept_with(self, conversation_id: str, entry: bytes) -> list[str]:
        """Return the keys that an event names: of its large texts, and of the file that the workspace begins with."""
        names = self._store.keys(conversation_id)
        try:
            wire = codec.decode_wire(entry)
        except (CorruptEntry, StoreTooNew):  # what it named cannot be known, and must not keep the rest
            return []
        blobs, workspace = wire.get("blobs"), wire.get("workspace")
        source = workspace.get("source") if isinstance(workspace, dict) else None
        refs = blobs.values() if isinstance(blobs, dict) else ()
        keys = [names.blob(str(ref.get("sha256"))) for ref in refs if isinstance(ref, dict)]
        parcel = source.get("parcel") if isinstance(source, dict) else None
        return [*keys, names.stored_file(str(parcel))] if parcel else keys

    async def _call(self, function: str, conversation_id: str, *arguments: int) -> list[Any]:
        names = self._store.keys(conversation_id)
        reply = await self._store.function(function, (names.root, names.shard.root), conversation_id, *arguments)
        if reply[0] == "missing" and function == "deck_begin_deletion":
            raise UnknownConversation(conversation_id)
        return reply
