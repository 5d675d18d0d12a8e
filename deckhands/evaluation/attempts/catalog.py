"""The evaluations of a store, and the results of their attempts, for readers on other machines.

Holds: only the driver writes. Any producer with write access to the store could write here, so unreadable entries count
as absent. Everything is kept for a month after a driver's last write.
Does not: replace `results.jsonl`, which has the patches and the full evidence, and from which an evaluation continues.
Keys: `deck:{0}:evaluations`; of `deck:{0}:evaluation:<name>` the field `about`; `deck:{0}:evaluation:<name>:rows`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import from_millis, is_conversation_id
from broker.store import Store, decode_text, parse_number, read_tolerantly, to_pairs
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.status import EvaluationStatus, parse_status
from deckhands.evaluation.attempts.steering import KEPT_SECONDS, AttemptKey

MAX_ROWS = 20_000
"""The limit per evaluation; later rows are only in its directory."""
MAX_EVIDENCE_CHARS, MAX_LEFT_OUT = 4_000, 100
AT_ONCE = 500
FRESH_SECONDS = 10.0
"""A driver that has not reported for this long counts as not running."""
LATEST_MS = 4e13
"""The year 3237; a later time is invalid."""


class EvaluationInfo(BaseModel):
    """The description of an evaluation.

    Attributes:
        tenant: the tenant; empty if there is none.
        instances: their number, 0 if unknown; `attempts` is the number for each instance and model.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    tenant: str = Field(default="", max_length=64)
    dataset: str = Field(default="", max_length=500)
    models: tuple[str, ...] = Field(default=(), max_length=1_000)
    instances: int = Field(default=0, ge=0)
    attempts: int = Field(default=1, ge=1)


@dataclass(frozen=True, slots=True)
class EvaluationListing:
    """An evaluation in a list.

    Attributes:
        status: its progress at the time `at`; None if unreadable.
        is_driven: whether a driver has reported within the last `FRESH_SECONDS`.
    """

    name: str
    about: EvaluationInfo
    status: EvaluationStatus | None
    at: datetime
    is_driven: bool


class Catalog:
    """The evaluations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shard = store.all_shards[0]

    async def begin(self, name: str, about: EvaluationInfo) -> None:
        """Record an evaluation. Idempotent."""
        key = self._shard.evaluation(name)
        await self._store.call_many([("HSET", key, "about", about.model_dump_json()), ("EXPIRE", key, KEPT_SECONDS)])
        await self.put(name, ())

    async def put(self, name: str, rows: Iterable[AttemptRow]) -> None:
        """Record results, and that a driver is running. Patches and long evidence are left out. Idempotent."""
        now_ms = round(self._store.clock.now().timestamp() * 1000)
        index, key = self._shard.evaluations, self._shard.evaluation_rows(name)
        fields = [part for row in rows for part in (json.dumps(row.key), _shorten(row).model_dump_json())]
        for start in range(0, len(fields), 2 * AT_ONCE):
            (kept,) = await self._ask([("HLEN", key)])
            if parse_number(kept) >= MAX_ROWS:
                break
            some = fields[start : start + 2 * AT_ONCE]
            await self._store.call_many([("HSET", key, *some), ("EXPIRE", key, KEPT_SECONDS)])
        long_ago = now_ms - 1000 * KEPT_SECONDS
        await self._store.call_many(
            [
                ("ZADD", index, now_ms, name),
                ("ZREMRANGEBYSCORE", index, "-inf", long_ago),
                ("EXPIRE", key, KEPT_SECONDS),
            ]
        )

    async def latest(self, *, tenant: str | None, limit: int) -> list[EvaluationListing]:
        """Return evaluations, most recently driven first.

        Args:
            tenant: returns only this tenant's evaluations; None for all.
            limit: the maximum number; up to 1,000 are examined.
        """
        index = self._shard.evaluations
        (flat,) = await self._ask([("ZREVRANGE", index, 0, 999, "WITHSCORES")])
        scored = [(name, parse_number(at)) for name, at in to_pairs(flat).items() if is_conversation_id(name)]
        found: list[EvaluationListing] = []
        for start in range(0, len(scored), 50):
            some = scored[start : start + 50]
            keys = [self._shard.evaluation(name) for name, _ in some]
            replies = await self._ask([("HMGET", key, "about", "status") for key in keys])
            listed = [self._read_listing(name, at, reply) for (name, at), reply in zip(some, replies, strict=True)]
            found += [one for one in listed if one is not None and tenant in (None, one.about.tenant)]
            if len(found) >= limit:
                break
        return found[:limit]

    async def find(self, name: str) -> EvaluationListing | None:
        """Return an evaluation; None if there is none with this name."""
        if not is_conversation_id(name):
            return None
        key = self._shard.evaluation(name)
        at, reply = await self._ask([("ZSCORE", self._shard.evaluations, name), ("HMGET", key, "about", "status")])
        return None if at is None else self._read_listing(name, parse_number(at), reply)

    async def rows(self, name: str) -> list[AttemptRow]:
        """Return the results so far, by model, instance and attempt."""
        key, cursor = self._shard.evaluation_rows(name), b"0"
        found: dict[str, AttemptRow] = {}
        while len(found) < MAX_ROWS + AT_ONCE:
            (reply,) = await self._ask([("HSCAN", key, cursor, "COUNT", AT_ONCE)])
            cursor, flat = reply or (b"0", [])
            found |= await asyncio.to_thread(_rows, to_pairs(flat))  # parsing in the loop would block it meanwhile
            if cursor == b"0":
                break
        return sorted(found.values(), key=lambda row: row.key)

    async def some_rows(self, name: str, keys: Sequence[AttemptKey]) -> list[AttemptRow]:
        """Return the results with these keys that still exist, in the same order.

        Args:
            keys: up to 500.
        """
        if not keys:
            return []
        fields = list(map(json.dumps, keys))
        (reply,) = await self._ask([("HMGET", self._shard.evaluation_rows(name), *fields)])
        found = _rows({field: value for field, value in zip(fields, reply or (), strict=False) if value is not None})
        return [found[field] for field in fields if field in found]

    def _read_listing(self, name: str, at_ms: float, reply: Sequence[bytes | None] | None) -> EvaluationListing | None:
        about, status = map(decode_text, reply or (None, None))
        if not about or not 0 <= at_ms <= LATEST_MS:
            return None
        try:
            known = EvaluationInfo.model_validate_json(about)
        except ValidationError:
            return None
        at = from_millis(round(at_ms))
        age = (self._store.clock.now() - at).total_seconds()
        return EvaluationListing(name, known, _parse_status(status), at, is_driven=age < FRESH_SECONDS)

    async def _ask(self, commands: Sequence[Sequence[str | int | bytes]]) -> list[Any]:
        return await self._store.retry(lambda: read_tolerantly(self._store.connection, commands))


def _shorten(row: AttemptRow) -> AttemptRow:
    shortened = {"evidence": row.evidence[:MAX_EVIDENCE_CHARS], "left_out": row.left_out[:MAX_LEFT_OUT]}
    return row.model_copy(update={"patch": "", **shortened})


def _rows(values: Mapping[str, Any]) -> dict[str, AttemptRow]:
    """Return the readable rows that are stored under their own key."""
    rows = {field: _row(decode_text(value)) for field, value in values.items()}
    return {field: row for field, row in rows.items() if row is not None and json.dumps(row.key) == field}


def _row(content: str) -> AttemptRow | None:
    try:
        row = AttemptRow.model_validate_json(content)
    except ValidationError:
        return None
    numbers = (
        row.cost_usd,
        row.critic_cost_usd,
        row.lost_cost_usd,
        row.score or 0.0,
        row.seconds,
        row.working_seconds,
        row.scoring_seconds,
        *row.waiting_seconds.values(),
        row.reward or 0.0,
        *row.metrics.values(),
        *row.step_rewards,
    )
    return row if all(map(math.isfinite, numbers)) else None


def _parse_status(content: str) -> EvaluationStatus | None:
    try:
        fields = json.loads(content)
    except ValueError:
        return None
    return parse_status(fields) if isinstance(fields, Mapping) else None
