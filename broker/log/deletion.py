"""Deletes a conversation: its log and everything stored with it.

`expire` ends conversations that did not start in time. The first worker that notices one appends its end.

Holds: a conversation is complete, or gone, or closed and listed until its deletion is repeated. A kill between two
steps leaves no orphaned key. A log is deleted only if it still ends at the event where the caller found it settled, and
if no worker owns the conversation. A conversation that has started is left alone, because the store checks this in the
append. Idempotent.
Does not: find a blob whose event was never appended; delete delegates, checkpoints, or keys that expire within ten
minutes. A new conversation may use the id of a deleted one.
Keys: those of a conversation, see `broker.store.keys`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from broker.contract import AgentState, AgentStateChangedObservation, codec
from broker.limits import Ledger
from broker.log.entries import find_reader
from broker.log.event_log import EventLog
from broker.log.status import EXPIRED_CODE, NOT_STARTED
from broker.runtime import (
    ConversationBusy,
    CorruptEntry,
    DataLocked,
    DeckhandsError,
    StoreTooNew,
    UnknownConversation,
    failpoint,
    make_extra,
)
from broker.store import Cipher, ConversationKeys, Store

READ_BATCH = 500
KEYS_PER_CALL = 200
POLL_SECONDS = 0.05
RELEASE_LIMIT_SECONDS = 45.0
"""How long an owner may keep a settled conversation; it releases an idle one after 30 s."""


class NotDeleted(DeckhandsError):
    """A conversation is in use and was not deleted."""

    code = "not_deleted"
    retryable = True


class Deletion:
    """Deletes conversations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def delete(self, conversation_id: str, *, last_id: int, limit_seconds: float = RELEASE_LIMIT_SECONDS) -> None:
        """Delete a settled conversation and its keys. Idempotent: repeat the call to complete an interrupted deletion.

        Ends the processes of its workspace. The node removes the files, as for a closed conversation.

        Args:
            last_id: the event at which it settled.
            limit_seconds: how long to wait until its owner releases it.

        Raises:
            UnknownConversation: no such conversation; an earlier call may have deleted it.
            NotDeleted: its log has grown, or a worker still owns it. Nothing was changed.
        """
        await self.close_for_deletion(conversation_id, last_id=last_id, limit_seconds=limit_seconds)
        names = await self._store.locate(conversation_id)
        after = 0
        while True:
            batch = await self._store.call("XRANGE", names.events, f"{after + 1}-0", "+", "COUNT", READ_BATCH)
            if not batch:
                break
            after += len(batch)
            try:
                cipher = await find_reader(self._store, conversation_id, batch)
            except DataLocked:  # the job `orphans` finds the texts of a conversation whose key was deleted
                cipher = None
            doomed = sorted(
                {
                    key
                    for entry_id, fields in batch
                    for key in self._find_referenced_keys(names, entry_id, fields[-1], cipher)
                }
            )
            for at in range(0, len(doomed), KEYS_PER_CALL):
                commands = [("UNLINK", key) for key in doomed[at : at + KEYS_PER_CALL]]
                await self._store.call_many(commands)
                failpoint("deletion.texts_gone")
        await Ledger(self._store).delete_account(conversation_id)
        failpoint("deletion.before_end")
        await self._call("deck_end_deletion", conversation_id)
        self._store.layout.forget(conversation_id)

    async def close_for_deletion(
        self, conversation_id: str, *, last_id: int, limit_seconds: float = RELEASE_LIMIT_SECONDS
    ) -> None:
        """Close a conversation for its deletion, which `delete` completes. Same arguments and errors as `delete`."""
        clock = self._store.clock
        deadline = clock.monotonic() + limit_seconds
        while True:
            outcome = await self._call("deck_begin_deletion", conversation_id, last_id)
            if outcome[0] == "news":
                raise NotDeleted(f"The conversation {conversation_id} has new events.", remedy="Cancel it first.")
            if outcome[0] != "owned":
                return
            if clock.monotonic() > deadline:
                raise NotDeleted(
                    f"The conversation {conversation_id} is still owned by {outcome[1].decode()}.",
                    remedy="Delete it again in a minute.",
                )
            await asyncio.sleep(POLL_SECONDS)

    def _find_referenced_keys(
        self, names: ConversationKeys, entry_id: bytes, entry: bytes, cipher: Cipher | None
    ) -> list[str]:
        """Return the keys that an event refers to: its large texts, and the file that its workspace is filled from."""
        try:
            wire = codec.decode_wire(codec.decrypt_entry(entry, cipher, int(entry_id.partition(b"-")[0])))
        except (CorruptEntry, StoreTooNew):  # the references of an unreadable event are unknown; delete the rest
            return []
        blobs, workspace = wire.get("blobs"), wire.get("workspace")
        source = workspace.get("source") if isinstance(workspace, dict) else None
        refs = blobs.values() if isinstance(blobs, dict) else ()
        keys = [names.blob(str(ref.get("sha256"))) for ref in refs if isinstance(ref, dict)]
        parcel = source.get("parcel") if isinstance(source, dict) else None
        return [*keys, names.stored_file(str(parcel))] if parcel else keys

    async def _call(self, function: str, conversation_id: str, *arguments: int) -> list[Any]:
        names = await self._store.locate(conversation_id)
        reply = await self._store.call_function(function, (names.root, names.shard.root), conversation_id, *arguments)
        if reply[0] == "missing" and function == "deck_begin_deletion":
            raise UnknownConversation(conversation_id)
        return reply


_log = logging.getLogger(__name__)


async def expire(log: EventLog, conversation_ids: Iterable[str]) -> None:
    """End scheduled conversations whose time limit has passed. Idempotent; raises nothing."""
    for conversation_id in conversation_ids:
        try:
            with suppress(ConversationBusy, UnknownConversation):  # it has started, or is gone
                await _expire(log, conversation_id)
        except (DeckhandsError, ValueError):  # damaged keys of one conversation must not affect others
            _log.exception("cannot end the expired conversation %s", conversation_id, extra=make_extra(conversation_id))


async def _expire(log: EventLog, conversation_id: str) -> None:
    end = AgentStateChangedObservation(agent_state=AgentState.ERROR, reason=NOT_STARTED, code=EXPIRED_CODE)
    fields = {
        "state": AgentState.ERROR.value,
        "planned": "over",
        "wait_reason": "",
        "last_error": NOT_STARTED,
        "error_code": EXPIRED_CODE,
    }
    await log.append(conversation_id, [end], key=EXPIRED_CODE, condition="expire", fields=fields)
