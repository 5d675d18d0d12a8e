"""Revoked Celery tasks, possibly revoked before they arrive; and the times in the headers of tasks.

Keys: `deck:{0}:revoked`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker.runtime import UsageError, to_millis
from broker.store import Argument, Store

REVOKED_KEPT = timedelta(days=7)
EARLIEST, LATEST = datetime(1970, 1, 2, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
MAX_REVOKED_KEPT = 100_000
"""Bounded, because any program on the broker may revoke tasks, also those of other applications."""


class Revocations:
    """The recently revoked tasks of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names = store.all_shards[0]

    async def revoke(self, task_id: str) -> None:
        """Store that a task was revoked: for a week, at most the last `MAX_REVOKED_KEPT`. Idempotent."""
        now = self._store.clock.now()
        await self._store.call_many(
            [
                ("ZADD", self._names.revoked, to_millis(now), task_id),
                ("ZREMRANGEBYSCORE", self._names.revoked, "-inf", to_millis(now - REVOKED_KEPT)),
                ("ZREMRANGEBYRANK", self._names.revoked, 0, -MAX_REVOKED_KEPT - 1),
            ]
        )

    async def is_revoked(self, task_id: str) -> bool:
        """Return whether a task was revoked within the last week."""
        return await self._store.call(*self.find_score(task_id)) is not None

    def find_score(self, task_id: str) -> tuple[Argument, ...]:
        """Return the command that asks whether a task was revoked within the last week; its reply is None if not."""
        return ("ZSCORE", self._names.revoked, task_id)


def moment_in(text: str | None) -> datetime | None:
    """Parse the time in a Celery header; UTC without a time zone.

    Raises:
        UsageError: the header is not a time, or is out of range.
    """
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = LATEST
    found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if not EARLIEST < found < LATEST:
        raise UsageError(
            f"The time {ascii(text)[1:-1][:100]} cannot be used.", remedy=f"Use one between {EARLIEST} and {LATEST}."
        )
    return found
