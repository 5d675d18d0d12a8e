"""The metrics of a cluster in Prometheus' text format, read from its store on request.

Workers report their figures with their heartbeats, so this endpoint has those of all processes. A server with open
client streams adds its own figures through `own`.

Holds: whatever is in the store, the answer is well formed and has bounded labels; `deckhands_store_up` and
`deckhands_scrape_failures` report missing parts. Simultaneous requests, or those within `FRESH_SECONDS`, share one
answer.
Keys: reads those of `census` and `queues`, and `deck:{k}:workers`, `…:worker:<w>:about`, `parked`, `unread`, `dead`,
`takeovers`, `unreadable`, `refused`, `deck:tools`; in Celery's broker `deckhands`, `deckhands.jobs` and the lock of the
beat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from broker.coordination import LabeledValues
from broker.health import BEAT_LOCK
from broker.runtime import StoreError, StoreRefused
from broker.store import Connection, Store, load_all_server_facts, parse_number, read_tolerantly, to_pairs
from broker.tools import ToolOffers
from deckhands.operations.monitoring import families
from deckhands.operations.monitoring.census import Census, WorkerMetrics, read_workers
from deckhands.operations.monitoring.families import FAMILIES, MAX_LABEL_VALUES, OF_WORKERS, OTHER, Family
from deckhands.operations.monitoring.queues import CeleryWaits, read_depths

CONTENT_TYPE = CONTENT_TYPE_LATEST
FRESH_SECONDS = 1.0
CELERY_QUEUES = {"celery_ingress": "deckhands", "celery_jobs": "deckhands.jobs"}
CELERY_PRIORITIES = ("", "\x06\x163", "\x06\x166", "\x06\x169")
"""The suffixes of the lists that kombu's transport uses for one queue."""
REFUSAL_REASONS = ("open", "pace", "memory")
Samples = dict[Family, dict[tuple[str, ...], float]]

_log = logging.getLogger(__name__)


class QueryResult(Enum):
    """The result of one part of the queries."""

    READ = "read"
    FAILED = "failed"
    NO_STORE = "no store"


class Exposition:
    """The metrics of one cluster.

    Args:
        celery: a connection to Celery's broker; None to leave out its metrics.
        own: returns the figures of this server, such as the open streams of a server.
        sees_inbox: this process has the right to read the inbox.
    """

    def __init__(
        self,
        store: Store,
        celery: Connection | None = None,
        *,
        own: Callable[[], Mapping[str, LabeledValues]] | None = None,
        sees_inbox: bool = True,
    ) -> None:
        self._store = store
        self._celery = celery
        self._own = own
        self._sees_inbox = sees_inbox
        self._census = Census(store)
        self._celery_waits = CeleryWaits()
        self._turn = asyncio.Lock()
        self._latest: tuple[float, Samples] | None = None
        self._rendered: tuple[Samples, bytes] | None = None

    async def text(self) -> bytes:
        """Return the metrics; raises no error that the store can cause."""
        found = await self.samples()
        if self._rendered is None or self._rendered[0] is not found:
            self._rendered = (found, render(found))
        return self._rendered[1]

    async def samples(self) -> Samples:
        """Return the metrics as values; raises no error that the store can cause."""
        async with self._turn:
            now = self._store.clock.monotonic()
            if self._latest is None or now - self._latest[0] >= FRESH_SECONDS:
                self._latest = (now, await self._read(now))
            return self._latest[1]

    async def _read(self, began: float) -> Samples:
        found: Samples = {}
        failures, is_up = 0, True
        for part in (self._read_store, self._read_workers, self._read_conversations):
            # Wait for a hanging store only once, or the answer would be too late for Prometheus.
            outcome = await self._read_part(part, found) if is_up else QueryResult.NO_STORE
            is_up = outcome is not QueryResult.NO_STORE
            failures += outcome is not QueryResult.READ
        if self._celery is not None:
            failures += await self._read_part(self._read_celery, found) is not QueryResult.READ
        if self._own is not None:
            add_figures(found, [WorkerMetrics("server", "server", 0.0, self._own(), frozenset())])
        found[families.UP] = {(): float(is_up)}
        found[families.FAILURES] = {(): float(failures)}
        found[families.SECONDS] = {(): self._store.clock.monotonic() - began}
        return found

    async def _read_part(self, part: Callable[[Samples], Awaitable[None]], found: Samples) -> QueryResult:
        try:
            await part(found)
        except StoreError as error:
            _log.debug("metrics are incomplete: %s", error)
            return QueryResult.FAILED if isinstance(error, StoreRefused) else QueryResult.NO_STORE
        except Exception:  # noqa: BLE001  (the outer edge: what is wrong with one part hides no other)
            _log.exception("metrics are incomplete")
            return QueryResult.FAILED
        return QueryResult.READ

    async def _read_store(self, found: Samples) -> None:
        shards = await self._store.load_shards()
        commands = [
            command
            for names in shards
            for command in (
                ("ZCARD", names.parked),
                ("ZCARD", names.dead),
                ("ZCARD", f"{names.root}:unread"),
                ("ZRANGE", f"{names.root}:unread", 0, 0, "WITHSCORES"),
                ("XINFO", "STREAM", names.takeovers),
                ("XINFO", "STREAM", names.quarantine),
                ("HMGET", names.refused, *REFUSAL_REASONS),
            )
        ]
        *replies, server_time = await read_tolerantly(self._store.connection, [*commands, ("TIME",)])
        size = len(commands) // len(shards)
        each = list(zip(*(replies[at : at + size] for at in range(0, len(replies), size)), strict=True))
        counted = (families.PARKED, families.DEAD, families.UNCLAIMED)
        for family, values in zip(counted, each, strict=False):
            found[family] = {(): sum(map(parse_number, values))}
        now_ms = parse_number(server_time[0]) * 1000 if server_time else 0.0
        ages = [max(0.0, now_ms - parse_number(first[1])) / 1000 for first in each[3] if first]
        found[families.UNCLAIMED_AGE] = {(): max(ages, default=0.0)}
        for family, values in zip((families.TAKEOVERS, families.UNREADABLE), each[4:6], strict=True):
            found[family] = {(): sum(parse_number(to_pairs(value).get("entries-added")) for value in values)}
        found[families.REFUSED_STARTS] = {
            (reason,): sum(parse_number(counts[at]) for counts in each[6] if counts)
            for at, reason in enumerate(REFUSAL_REASONS)
        }
        memory = await load_all_server_facts(self._store.connection, "memory")
        found[families.MEMORY] = {(): sum(parse_number(facts.get("used_memory")) for facts in memory)}
        found[families.MEMORY_LIMIT] = {(): sum(parse_number(facts.get("maxmemory")) for facts in memory)}

    async def _read_workers(self, found: Samples) -> None:
        present = await read_workers(self._store)
        for family, is_alive in ((families.WORKERS, True), (families.LAPSED, False)):
            values = found.setdefault(family, {})
            for worker in present:
                if (worker.left_seconds > 0) is is_alive:
                    values[worker.role,] = values.get((worker.role,), 0.0) + 1
        add_figures(found, present)
        offers = (await ToolOffers(self._store).load_all()).values()
        routes = {"pool:bash", *(f"pool:{offer.pool}" for offer in offers if offer.pool)}
        routes = routes.union(*(worker.routes for worker in present))
        for queue, depth in (await read_depths(self._store, routes, sees_inbox=self._sees_inbox)).items():
            entries = found.setdefault(families.QUEUE_ENTRIES, {})
            for status in ("waiting", "in_line", "held"):
                entries[queue, status] = getattr(depth, status)
            found.setdefault(families.QUEUE_AGE, {})[queue,] = depth.oldest_seconds

    async def _read_conversations(self, found: Samples) -> None:
        count = await self._census.count()
        found[families.CONVERSATIONS] = {key: float(value) for key, value in count.by_state.items()}
        found[families.COUNTED_AGE] = {(): self._store.clock.monotonic() - count.at}
        found[families.UNCOUNTED] = {(): float(count.uncounted)}

    async def _read_celery(self, found: Samples) -> None:
        assert self._celery is not None
        keys = [f"{queue}{rank}" for queue in CELERY_QUEUES.values() for rank in CELERY_PRIORITIES]
        lock, *lengths = await read_tolerantly(self._celery, [("EXISTS", BEAT_LOCK), *(("LLEN", key) for key in keys)])
        found[families.BEAT_UP] = {(): float(bool(lock))}
        entries = found.setdefault(families.QUEUE_ENTRIES, {})
        ranks, now = len(CELERY_PRIORITIES), self._store.clock.monotonic()
        for position, name in enumerate(CELERY_QUEUES):
            lists = slice(position * ranks, (position + 1) * ranks)
            waiting = list(map(parse_number, lengths[lists]))
            entries[name, "waiting"] = sum(waiting)
            ages = [
                await self._celery_waits.oldest_seconds(self._celery, key, length, now)
                for key, length in zip(keys[lists], waiting, strict=True)
            ]
            found.setdefault(families.QUEUE_AGE, {})[name,] = max(ages)


def add_figures(found: Samples, present: list[WorkerMetrics]) -> None:
    """Add the figures that workers report; label values beyond `MAX_LABEL_VALUES` count as `other`."""
    for family in OF_WORKERS:
        values = found.setdefault(family, {})
        known: set[str] = set()
        for worker in present:
            for label, value in worker.figures.get(family.figure, {}).items():
                if len(family.labels) == 2:
                    key: tuple[str, ...] = (worker.role, worker.name)
                else:
                    if label not in known and len(known) >= MAX_LABEL_VALUES:
                        label = OTHER  # noqa: PLW2901
                    known.add(label)
                    more = len(family.labels) - 2
                    parts = label.split(" ", more - 1)
                    key = (worker.role, worker.name, *parts, *[""] * (more - len(parts)))
                values[key] = values.get(key, 0.0) + max(value, 0.0)


class _Collection(Collector):
    """The result of one collection, as a prometheus_client collector."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> list[Metric]:
        """Return every family; a family without known values has no samples."""
        metrics: list[Metric] = []
        for family in FAMILIES:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in self._samples.get(family, {}).items():
                metric.add_metric([label.encode(errors="replace").decode() for label in labels], value)
            metrics.append(metric)
        return metrics


def render(samples: Samples) -> bytes:
    """Return samples in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collection(samples))
    return generate_latest(registry)
