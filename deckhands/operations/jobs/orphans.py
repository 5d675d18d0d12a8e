"""The `orphans` job: removes keys of conversations that do not exist, and completes interrupted deletions.

A process that dies between two writes leaves such keys, for example a large text whose event was never appended. A
server that dies while it answers a question leaves a fork, which is deleted too.

Holds: a key is removed only if its conversation has no meta hash and the key was not touched for an hour. Keys of a
conversation that is being created are younger.
Does not: touch keys outside of conversations.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from broker.log import EventLog, NotDeleted
from broker.runtime import StoreRefused, UsageError, make_extra
from broker.store import ConversationKeys, ShardKeys, Store
from deckhands.client import delete, delete_left_questions
from deckhands.operations.jobs.job import JobServices

SCANNED_AT_ONCE = 1_000
UNTOUCHED_SECONDS = 3_600
LFU = "LFU maxmemory policy"
LFU_REMEDY = "Set `maxmemory-policy noeviction` on it."

_log = logging.getLogger(__name__)


async def remove_orphans(services: JobServices) -> dict[str, int]:
    """Remove orphaned keys. Returns how many keys were removed, and how many deletions were completed."""
    found = await sweep_store(services.store, UNTOUCHED_SECONDS)
    before = services.store.clock.now() - timedelta(seconds=UNTOUCHED_SECONDS)
    found["completed"] += await delete_left_questions(EventLog(services.store), before=before)
    return found


async def sweep_store(store: Store, untouched_seconds: int) -> dict[str, int]:
    """Remove orphaned keys that are old enough; see `remove_orphans`."""
    removed = completed = 0
    tracks_idle = True
    cursor: bytes = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", "deck:{*}:c:*", "COUNT", SCANNED_AT_ONCE)
        cursor, keys = await store.call(*scan)
        by_conversation: dict[ConversationKeys, list[bytes]] = {}
        for key in keys:
            if names := _parse_conversation(key):
                by_conversation.setdefault(names, []).append(key)
        for names, found in by_conversation.items():
            meta = names.meta
            last_id, deleted = await store.call("HMGET", meta, "last_id", "deleted")
            if last_id is None and tracks_idle:
                try:
                    removed += await _remove_untouched(store, found, untouched_seconds)
                except StoreRefused as error:
                    if LFU not in error.message:
                        raise
                    tracks_idle = False
                    _log.warning("Orphaned keys stay in the store. %s %s", error.message, LFU_REMEDY)
            elif deleted is not None and meta.encode() in found:
                completed += await _complete_deletion(store, names.conversation_id)
        if cursor == b"0":
            return {"removed": removed, "completed": completed}


def _parse_conversation(key: bytes) -> ConversationKeys | None:
    """Return the keys of the conversation that a key belongs to; None: of none."""
    parts = key.decode(errors="replace").split(":")
    shard = parts[1][1:-1] if len(parts) > 4 and parts[2] == "c" and parts[3] else ""
    return ConversationKeys(ShardKeys(int(shard)), parts[3]) if shard.isascii() and shard.isdigit() else None


async def _remove_untouched(store: Store, keys: list[bytes], seconds: int) -> int:
    removed = 0
    for key in keys:
        idle = await store.call("OBJECT", "IDLETIME", key)
        if isinstance(idle, int) and idle >= seconds:
            removed += await store.call("UNLINK", key)
    return removed


async def _complete_deletion(store: Store, conversation_id: str) -> int:
    try:
        await delete(EventLog(store), conversation_id, limit_seconds=0.0)
    except (UsageError, NotDeleted) as error:
        _log.warning(
            "the deletion of %s is not complete: %s", conversation_id, error, extra=make_extra(conversation_id)
        )
        return 0
    return 1
