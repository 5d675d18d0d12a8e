"""The service of a job worker: a member of the cluster on whose event loop jobs run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from broker.celery import cancel_when
from broker.coordination import Figures, HeartbeatThread, Membership
from broker.runtime import BrokerSettings, OwnershipLost, new_worker_id
from broker.store import Store, open_store
from deckhands.operations.jobs.job import JobServices

ROLE = "jobs"
THREADS = 256
"""More than the number of simultaneous deliveries; a thread is created when it is needed."""

_log = logging.getLogger(__name__)


class JobsService:
    """A job worker's duties beside its jobs; a `LoopService`.

    Args:
        send: sends another job.
    """

    def __init__(self, settings: BrokerSettings, send: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._settings, self._send = settings, send
        self._is_open = asyncio.Event()
        self._services: JobServices
        self._worker_id = ""
        self._figures = Figures()
        self._at_work: set[asyncio.Task[Any]] = set()
        self._started = 0

    async def run(self, stop: asyncio.Event) -> None:
        """See `LoopService.run`."""
        settings = self._settings
        # Receivers' names are resolved in threads, which may be slow; other jobs need threads too.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="jobs"))
        store = await open_store(settings.url, shards=settings.shards, patience_seconds=None, opening_seconds=None)
        self._services = JobServices(store, settings, self._send)
        self._is_open.set()
        try:
            while not stop.is_set():
                self._worker_id = new_worker_id(ROLE)
                ttl_seconds, figures = settings.heartbeat_ttl_seconds, self._figures
                membership = Membership(store, self._worker_id, ROLE, ttl_seconds=ttl_seconds, figures=figures)
                with HeartbeatThread(settings.url, membership) as heartbeat_thread:
                    async with membership.handing_back():
                        await self._live(store, membership, stop, heartbeat_thread.record_turn)
        finally:
            for job in self._at_work:
                job.cancel()
            await asyncio.gather(*self._at_work, return_exceptions=True)
            await store.aclose()

    async def wait_for_services(self) -> JobServices:
        """Wait until the store is open, and return the services for jobs."""
        await self._is_open.wait()
        return self._services

    async def run_job(self, name: str, job: Callable[[JobServices], Coroutine[Any, Any, Any]]) -> Any:
        """Run a job and return its result; it is cancelled when this worker is asked to stop."""
        services = await self.wait_for_services()
        task = asyncio.create_task(job(services))
        self._at_work.add(task)
        self._started += 1
        task.add_done_callback(self._at_work.discard)
        try:
            result = await task
        except BaseException:
            self._figures.add("failed_jobs", label=name)
            raise
        self._figures.add("jobs", label=name)
        return result

    def report(self) -> Mapping[str, Any]:
        """See `LoopService.report`."""
        return {"role": ROLE, "worker_id": self._worker_id}

    async def _live(
        self, _store: Store, membership: Membership, stop: asyncio.Event, on_beat: Callable[[int], None]
    ) -> None:
        await membership.register()
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat(membership, on_beat))
                group.create_task(cancel_when(stop, [beating]))
        except* OwnershipLost:
            _log.warning("%s was presumed dead; starting over", self._worker_id)
        if stop.is_set():
            await membership.leave()

    async def _beat(self, membership: Membership, on_beat: Callable[[int], None]) -> None:
        while True:
            progress = self._started
            on_beat(progress)
            if await membership.beat(progress) is None:
                raise OwnershipLost(f"{self._worker_id} was swept.")
            membership.figures.set(running=len(self._at_work))
            await membership.wait_for_next_beat()
