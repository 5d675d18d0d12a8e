"""The jobs that remove data without use: checkpoints, orphaned keys, and old entries in the record of operations.

`checkpoints` removes the checkpoints of conversations that are neither in the store nor in the archive, by
`tool_worker.workspace.checkpoints.removal` in a separate process.

`orphans` removes keys of conversations that do not exist, and completes interrupted deletions. A process that dies
between two writes leaves such keys, for example a large text whose event was never appended. A server that dies while
it answers a question leaves a fork, which is deleted too.

`operations` removes entries that are older than DECKHANDS_OPERATIONS_DAYS.

Holds: a checkpoint is kept while its conversation is in the store or in the archive, and while a fork of it is in the
store, unless the key of the fork was deleted. If the archive or the store does not answer, everything is kept. A key is
removed only if its conversation has no meta hash and the key was not touched for an hour. Keys of a conversation that
is being created are younger. Unreadable entries are removed with the entries after them.
Does not: touch keys outside of conversations.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import timedelta
from typing import Any

from broker.contract import ConversationCreated
from broker.log import ConversationQuery, EventLog, NotDeleted, Selection, find_reader, parse_entry
from broker.runtime import (
    CorruptEntry,
    DataForgotten,
    DeckhandsError,
    StoreRefused,
    StoreTooNew,
    UsageError,
    make_extra,
    to_millis,
)
from broker.store import ConversationKeys, ShardKeys, Store
from deckhands.client import delete, delete_left_questions
from deckhands.operations.jobs.job import JobServices


class CheckpointsNotRemoved(DeckhandsError):
    """The process that removes checkpoints has failed."""

    code = "checkpoints_not_removed"
    retryable = True


async def remove_checkpoints(services: JobServices) -> dict[str, int]:
    """Remove unused checkpoints. Returns how many conversations were forgotten, and how many pieces were dropped."""
    url = services.settings.checkpoints
    if not url:
        return {"forgotten": 0, "dropped": 0}
    there = (await _run_removal({"url": url}))["conversations"]
    doomed = [name for name in there if not await _is_known(services, name)]
    if doomed:
        needed = await _find_origins(services.store)
        doomed = [name for name in doomed if name not in needed]
    found = await _run_removal({"url": url, "forget": doomed})
    return {"forgotten": found["forgotten"], "dropped": found["dropped"]}


async def _is_known(services: JobServices, conversation_id: str) -> bool:
    store = services.store
    meta = (await store.locate(conversation_id)).meta
    if await store.call("EXISTS", meta):
        return True
    return await services.client.is_archived(conversation_id)


async def _find_origins(store: Store) -> set[str]:
    """Return the origins of forks in the store: a fork may still start from a checkpoint of its origin."""
    found: set[str] = set()
    async for page in ConversationQuery(store, Selection()).iterate_pages():
        commands = [
            ("XRANGE", names.events, "1-0", "1-0")
            for names in await store.locate_all([row.conversation_id for row in page])
        ]
        for row, entries in zip(page, await store.call_many(commands), strict=True):
            try:
                cipher = await find_reader(store, row.conversation_id, entries)
                created = parse_entry(entries[0][0], entries[0][1], 1, cipher=cipher) if entries else None
            except DataForgotten:  # nothing can start from it again
                continue
            except (CorruptEntry, StoreTooNew) as error:
                raise CheckpointsNotRemoved("A log cannot be read, and it may be the log of a fork.") from error
            if isinstance(created, ConversationCreated) and created.forked_from:
                found.add(created.forked_from.partition("@")[0])
    return found


async def _run_removal(what: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tool_worker.workspace.checkpoints.removal"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, errors = await process.communicate(json.dumps(what).encode())
    except asyncio.CancelledError:  # the job's time is up
        process.kill()
        raise
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise CheckpointsNotRemoved(f"The checkpoints cannot be removed: {last}")
    answer: dict[str, Any] = json.loads(said)
    return answer


async def trim_operations(services: JobServices) -> dict[str, int]:
    """Remove entries that are too old. Returns how many were removed. Idempotent."""
    store = services.store
    days = services.settings.operations_days
    removed = 0
    if days:
        names = store.all_shards[0]
        before = to_millis(store.clock.now() - timedelta(days=days))
        while True:
            _, found = await store.call_function("deck_trim_operations", (names.operations, names.root), before)
            removed += found
            if not found:
                break
    return {"removed": removed}


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
    """Return the keys of the conversation that a key belongs to; None if it belongs to none."""
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
