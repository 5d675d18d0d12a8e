"""The loop of an ingress worker: a cluster member that watches outcomes, reads the inbox, and runs Celery's tasks.

Holds: a swept worker no longer owns anything, because others took over; it restarts under a new name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker.celery import cancel_when
from broker.coordination import Membership, Quarantine
from broker.log import expire
from broker.runtime import BrokerSettings, OwnershipLost, UsageError, failpoint, new_worker_id
from broker.store import ShardKeys, Store, open_store
from deckhands.ingress.commands import ConversationCommands
from deckhands.ingress.context import IngressContext
from deckhands.ingress.evaluations import EvaluationTasks
from deckhands.ingress.inbox import InboxReaders
from deckhands.ingress.ingress_app import QUEUE
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.outcome_watcher import COMPLETERS, OutcomeWatcher
from deckhands.ingress.runs import Runs

_log = logging.getLogger(__name__)


class IngressWorker:
    """An ingress worker; a `LoopService`."""

    def __init__(self, settings: BrokerSettings, results: TaskResults, evaluations: EvaluationTasks) -> None:
        self._settings = settings
        self._results = results
        self._evaluations = evaluations
        self._is_open = asyncio.Event()
        self._session: _WorkerSession | None = None
        self.runs: Runs
        self.commands: ConversationCommands
        self._store: Store

    async def run(self, stop: asyncio.Event) -> None:
        """See `LoopService.run`."""
        settings = self._settings
        store = await open_store(settings.url, shards=settings.shards, patience_seconds=None, opening_seconds=None)
        for warning in store.warnings:
            _log.error("%s", warning)
        try:
            await self.serve(store, stop)
        finally:
            await store.aclose()

    async def serve(self, store: Store, stop: asyncio.Event) -> None:
        """Work with an open store until stopped, under a new name each time that this worker was swept."""
        context = IngressContext(store, self._results, self._settings.broker_name)
        self.runs = Runs(context)
        self.commands = ConversationCommands(context)
        self._store = store
        self._is_open.set()
        while not stop.is_set():
            self._session = life = _WorkerSession(context, self.runs, self._settings, self._evaluations)
            async with life.membership.handing_back():
                await life.run(stop)

    async def wait_until_open(self) -> None:
        """Wait until the store is open."""
        await self._is_open.wait()

    async def note_unusable(self, task_id: str, error: UsageError) -> None:
        """Record an invalid Celery message; `deckhands dead ls` lists it, and a metric counts it."""
        await Quarantine(self._store).quarantine(self._store.all_shards[0], QUEUE, task_id, (), error)

    def report(self) -> Mapping[str, Any]:
        """See `LoopService.report`."""
        life = self._session
        if life is None:
            return {"role": "ingress"}
        return {
            "role": "ingress",
            "worker_id": life.worker_id,
            "looks": life.watcher.looks,
            "entries": life.inbox.entries,
        }


class _WorkerSession:
    """The worker under one name, until it stops or is swept."""

    def __init__(
        self, context: IngressContext, runs: Runs, settings: BrokerSettings, evaluations: EvaluationTasks
    ) -> None:
        self.worker_id = new_worker_id("ingress")
        self.watcher = OutcomeWatcher(context, runs, self.worker_id)
        self.inbox = InboxReaders(context, self.worker_id)
        self._store = context.store
        self._log = context.log
        self._evaluations = evaluations
        self.membership = Membership(
            context.store, self.worker_id, "ingress", ttl_seconds=settings.heartbeat_ttl_seconds, holds_work=False
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped or swept."""
        await self.membership.register()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.watcher.run_maintenance()),
                    group.create_task(self.watcher.report_progress()),
                    group.create_task(self.inbox.run()),
                    group.create_task(self._evaluations.run_maintenance()),
                ]
                tasks += [group.create_task(self.watcher.complete_ended()) for _ in range(COMPLETERS)]

                def read_shards(shards: Sequence[ShardKeys]) -> None:
                    tasks.extend(group.create_task(self.watcher.read_notices(names)) for names in shards)

                read_shards(self.membership.shards)
                tasks.append(group.create_task(self._beat(read_shards)))
                group.create_task(cancel_when(stop, tasks))
        except* OwnershipLost:
            _log.warning("%s was presumed dead; starting over", self.worker_id)
        if stop.is_set():
            await self.membership.leave()
        else:
            await self.membership.leave_soon()

    async def _beat(self, read_shards: Callable[[Sequence[ShardKeys]], None]) -> None:
        while True:
            failpoint("ingress.beat")
            progress = self.watcher.looks + self.inbox.entries
            found = await self.membership.beat(progress)
            if found is None:
                raise OwnershipLost(f"{self.worker_id} was swept.")
            await expire(self._log, found.expired)
            read_shards(await self.membership.join_new_shards())
            self.membership.figures.set(looks=self.watcher.looks, entries=self.inbox.entries)
            await self.membership.wait_for_next_beat()
