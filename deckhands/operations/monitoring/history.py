"""The recent figures of the cluster, kept in the store: every 5 s for an hour, every minute for a day.

The servers keep them: the one with the lease takes all samples. A sample for a minute has the means of the rates, and
the largest age.
Holds: at most `HOUR.kept` and `DAY.kept` samples of 200 bytes, half a megabyte in all. The id of a sample is its place
in time by the store's clock, so two servers never write the same sample twice.
Does not: fill gaps, in which no server ran or the store was unavailable; keep figures of single tenants. Who may forge
it: servers and the operator. A sample that cannot be read is left out.
Keys: `deck:{0}:history:hour`, `deck:{0}:history:day`, `deck:{0}:history:lease`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import StoreError, StoreRefused, from_millis, new_key
from broker.store import Store, decode_fields
from deckhands.operations.monitoring import families
from deckhands.operations.monitoring.exposition import Exposition, Samples
from deckhands.operations.monitoring.families import Family

RATE_SECONDS = 30.0
"""Rates are means over this time: workers report with their heartbeats, so shorter ones jump."""
LEASE_SECONDS = 15.0
FIELD = "v"
COUNTERS = (families.TAKEOVERS, *(one for one in families.OF_WORKERS if one.figure in ("steps", "cost_usd")))
_log = logging.getLogger(__name__)

Value = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Resolution:
    """One series: its name, the seconds between two samples, and the number of kept samples."""

    name: str
    step_seconds: int
    kept: int


HOUR = Resolution("hour", 5, 720)
DAY = Resolution("day", 60, 1_440)


class ClusterSample(BaseModel):
    """The figures of the cluster at one time.

    Attributes:
        steps: steps of agents per second.
        spend: cost of model calls per hour in USD, as far as prices are known.
        takeovers: since the sample before.
        running: conversations at work.
        waiting: entries of queues that no worker has taken.
        oldest: the longest wait of such an entry, in seconds.
    """

    model_config = ConfigDict(frozen=True)

    steps: Value = 0.0
    spend: Value = 0.0
    takeovers: Value = 0.0
    running: Value = 0.0
    waiting: Value = 0.0
    oldest: Value = 0.0


@dataclass(frozen=True, slots=True)
class _Counted:
    at: float
    values: Mapping[tuple[Family, tuple[str, ...]], float]


class History:
    """The history of one cluster."""

    def __init__(self, store: Store, exposition: Exposition) -> None:
        self._store = store
        self._exposition = exposition
        self._root = store.all_shards[0].history
        self._own = new_key()
        self._counted: deque[_Counted] = deque()
        self._minute: list[ClusterSample] = []

    async def read(
        self, resolution: Resolution, *, after: datetime | None = None
    ) -> list[tuple[datetime, ClusterSample]]:
        """Return the samples after a time, oldest first."""
        start = "-" if after is None else f"({max(0, int(after.timestamp() * 1_000))}-18446744073709551615"
        found = []
        for entry_id, flat in await self._store.call("XRANGE", self._key(resolution), start, "+"):
            try:
                sample = ClusterSample.model_validate_json(decode_fields(flat).get(FIELD, ""))
                found.append((from_millis(int(entry_id.partition(b"-")[0])), sample))
            except (ValidationError, ValueError, OverflowError):
                _log.debug("a sample of the history cannot be read")
        return found

    async def keep(self) -> None:
        """Take samples until it is cancelled. Errors of the store do not end this."""
        while True:
            seconds = float(HOUR.step_seconds)
            try:
                whole, micros = await self._store.call("TIME")
                now = int(whole) + int(micros) / 1e6
                if await self._has_lease():
                    await self.sample(now)
                else:
                    self._counted.clear()
                    self._minute.clear()
                seconds -= now % HOUR.step_seconds
            except StoreError as error:
                _log.debug("no sample of the cluster's figures was taken: %s", error)
            await asyncio.sleep(seconds)

    async def sample(self, now: float) -> None:
        """Take one sample, at a time of the store in seconds. The first one has no rates and is not kept."""
        figures = await self._exposition.samples()
        taken = self._count(figures, now)
        if taken is None:
            return
        await self._add(HOUR, now, taken)
        self._minute.append(taken)
        if int(now) // DAY.step_seconds != (int(now) + HOUR.step_seconds) // DAY.step_seconds:
            await self._add(DAY, now, _summarize(self._minute))
            self._minute.clear()

    def _count(self, figures: Samples, now: float) -> ClusterSample | None:
        values = {(family, labels): value for family in COUNTERS for labels, value in figures.get(family, {}).items()}
        while self._counted and now - self._counted[0].at > RATE_SECONDS:
            self._counted.popleft()
        latest = self._counted[-1] if self._counted else None
        self._counted.append(_Counted(now, values))
        if latest is None:
            return None
        first = self._counted[0]
        takeovers, steps, cost = COUNTERS
        seconds = max(now - first.at, 1.0)
        entries = figures.get(families.QUEUE_ENTRIES, {})
        conversations = figures.get(families.CONVERSATIONS, {})
        return ClusterSample(
            steps=_growth(first.values, values, steps) / seconds,
            spend=_growth(first.values, values, cost) / seconds * 3_600,
            takeovers=_growth(latest.values, values, takeovers),
            running=sum(value for (state, *_), value in conversations.items() if state == "running"),
            waiting=sum(value for (_, status), value in entries.items() if status != "held"),
            oldest=max(figures.get(families.QUEUE_AGE, {}).values(), default=0.0),
        )

    async def _add(self, resolution: Resolution, now: float, sample: ClusterSample) -> None:
        place = int(now) // resolution.step_seconds * resolution.step_seconds * 1_000
        command = ("XADD", self._key(resolution), "MAXLEN", "=", resolution.kept, f"{place}-0", FIELD)
        try:
            await self._store.call(*command, sample.model_dump_json())
        except StoreRefused as error:  # another server has written it, or the store's clock was set back
            _log.debug("a sample of the cluster's figures exists already: %s", error)

    async def _has_lease(self) -> bool:
        """Return whether this server takes the samples; it renews its lease."""
        key, milliseconds = f"{self._root}:lease", int(LEASE_SECONDS * 1_000)
        if await self._store.call("SET", key, self._own, "NX", "PX", milliseconds):
            return True
        if await self._store.call("GET", key) != self._own.encode():
            return False
        return bool(await self._store.call("PEXPIRE", key, milliseconds))

    def _key(self, resolution: Resolution) -> str:
        return f"{self._root}:{resolution.name}"


def _growth(
    before: Mapping[tuple[Family, tuple[str, ...]], float],
    values: Mapping[tuple[Family, tuple[str, ...]], float],
    family: Family,
) -> float:
    """Return the growth of a counter.

    The counter of a worker that started since then counts from the next sample on.
    """
    return sum(max(0.0, value - before[key]) for key, value in values.items() if key[0] is family and key in before)


def _summarize(samples: Iterable[ClusterSample]) -> ClusterSample:
    each = list(samples)

    def mean(name: str) -> float:
        return float(sum(getattr(one, name) for one in each)) / len(each)

    return ClusterSample(
        steps=mean("steps"),
        spend=mean("spend"),
        takeovers=sum(one.takeovers for one in each),
        running=mean("running"),
        waiting=mean("waiting"),
        oldest=max(one.oldest for one in each),
    )
