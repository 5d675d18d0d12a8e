"""The `checkpoints` job: removes the checkpoints of conversations that are neither in the store nor in the archive.

`tool_worker.workspace.checkpoints.removal` selects and removes them; it runs as a separate process.

Holds: a checkpoint is kept while its conversation is in the store or in the archive, and while a fork of it is in the
store, unless the key of the fork was deleted. If the archive or the store does not answer, everything is kept.

The `operations` job: removes old entries from the record of operations.

Holds: an entry is removed only when it is older than DECKHANDS_OPERATIONS_DAYS. Entries that cannot be read are removed
with the entries after them.
Does not: change an entry.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from typing import Any

from broker.contract import ConversationCreated
from broker.log import ConversationQuery, Selection, find_reader, parse_entry
from broker.runtime import CorruptEntry, DataForgotten, DeckhandsError, StoreTooNew, to_millis
from broker.store import Store
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
                raise CheckpointsNotRemoved("A log cannot be read, which may be that of a fork.") from error
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
