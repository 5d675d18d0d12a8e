"""The `operations` job: removes old entries from the record of operations.

Holds: an entry is removed only when it is older than DECKHANDS_OPERATIONS_DAYS. Entries that cannot be read are removed
with the entries after them.
Does not: change an entry.
"""

from __future__ import annotations

from datetime import timedelta

from broker.runtime import to_millis
from deckhands.operations.jobs.job import JobServices


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
