"""Tasks that begin later, and tasks that were revoked before they began.

Holds: the secrets of a request that waits are kept as those of a conversation are, not with the request.
Keys: `deck:{0}:later`, `deck:{0}:later:<id>`, `deck:{0}:revoked`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from broker.coordination.unreadable import Unreadable
from broker.runtime.clock import from_millis, to_millis
from broker.runtime.errors import UsageError
from broker.store.connection import Argument, texts_by_name
from broker.store.store import Store

REVOKED_KEPT = timedelta(days=7)
EARLIEST, LATEST = datetime(1970, 1, 2, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
MAX_REVOKED_KEPT = 100_000
"""Any program on the broker may revoke tasks, also those of other applications."""


class Schedule:
    """What a store is to begin later."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names = store.all_shards[0]

    async def park(self, task_id: str, *, request: str, due: datetime, expires: datetime | None) -> None:
        """Keep a request until it is due.  Idempotent.

        Args:
            request: as JSON, without secrets.
        """
        fields = ("request", request, "expires", to_millis(expires) if expires else "")
        await self._call(("HSET", self._key(task_id), *fields), ("ZADD", self._names.later, to_millis(due), task_id))

    async def due(self, *, limit: int) -> list[str]:
        """Return the tasks that are due, and put members aside that name none."""
        now = to_millis(self._store.clock.now())
        (found,) = await self._call(("ZRANGEBYSCORE", self._names.later, "-inf", now, "LIMIT", 0, limit))
        named = []
        for member in found:
            try:
                named.append(member.decode())
            except UnicodeDecodeError as error:
                await Unreadable(self._store).remove(self._names, self._names.later, member, error)
        return named

    async def parked(self, task_id: str) -> tuple[str, datetime | None] | None:
        """Return the request of a task that waits, and when it expires; None: it does not wait."""
        (flat,) = await self._call(("HGETALL", self._key(task_id)))
        fields = texts_by_name(flat)
        if "request" not in fields:
            return None
        return fields["request"], from_millis(int(fields["expires"])) if fields.get("expires") else None

    async def postpone(self, task_id: str, seconds: float) -> None:
        """Have a task that waits begun later, so that it keeps no other from its turn."""
        due = to_millis(self._store.clock.now()) + int(seconds * 1000)
        await self._call(("ZADD", self._names.later, "XX", due, task_id))

    async def drop(self, task_id: str) -> None:
        """Forget a task that waited.  Idempotent."""
        await self._call(("ZREM", self._names.later, task_id), ("DEL", self._key(task_id)))

    async def revoke(self, task_id: str) -> None:
        """Remember that a task was revoked: for a week, and the last `MAX_REVOKED_KEPT` of them.  Idempotent."""
        now = self._store.clock.now()
        await self._call(
            ("ZADD", self._names.revoked, to_millis(now), task_id),
            ("ZREMRANGEBYSCORE", self._names.revoked, "-inf", to_millis(now - REVOKED_KEPT)),
            ("ZREMRANGEBYRANK", self._names.revoked, 0, -MAX_REVOKED_KEPT - 1),
        )

    async def is_revoked(self, task_id: str) -> bool:
        """Say whether a task was revoked within the last week."""
        (score,) = await self._call(("ZSCORE", self._names.revoked, task_id))
        return score is not None

    def is_past(self, moment: datetime | None) -> bool:
        """Say whether a moment has passed; None never does."""
        return moment is not None and moment <= self._store.clock.now()

    def _key(self, task_id: str) -> str:
        return f"{self._names.later}:{task_id}"

    async def _call(self, *commands: tuple[Argument, ...]) -> list[Any]:
        return await self._store.persist(lambda: self._store.connection.call_many(commands))


def moment_in(text: str | None) -> datetime | None:
    """Return the time that a header of Celery means; one without a zone is UTC.

    Raises:
        UsageError: it is no time, or too far away to be one.
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
