"""The service of a job worker: a member of the cluster on whose event loop jobs run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from broker.celery import cancel_when
from broker.coordination import Figures, Membership
from broker.runtime import BrokerSettings, OwnershipLost, StoreRefused, new_worker_id, wait_for_tick
from broker.store import open_store
from deckhands.operations.jobs.job import Job, JobServices

ROLE = "jobs"
THREADS = 256
"""More than the number of simultaneous deliveries; a thread is created when it is needed."""

_log = logging.getLogger(__name__)


class JobsService:
    """A job worker's duties beside its jobs; a `LoopService`.

    Args:
        send: sends another job.
        jobs: all jobs; those with `has_work` run here when they have work.
    """

    def __init__(
        self, settings: BrokerSettings, send: Callable[[str, tuple[Any, ...]], None], jobs: Sequence[Job]
    ) -> None:
        self._settings = settings
        self._send = send
        self._polled = [job for job in jobs if job.has_work is not None]
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
        try:
            await self.serve(JobServices(store, settings, self._send), stop)
        finally:
            for job in self._at_work:
                job.cancel()
            await asyncio.gather(*self._at_work, return_exceptions=True)
            await store.aclose()

    async def serve(self, services: JobServices, stop: asyncio.Event) -> None:
        """Run jobs with an open store until stopped, under a new name each time that this worker was swept."""
        self._services = services
        self._is_open.set()
        while not stop.is_set():
            self._worker_id = new_worker_id(ROLE)
            membership = Membership(
                services.store,
                self._worker_id,
                ROLE,
                ttl_seconds=self._settings.heartbeat_ttl_seconds,
                figures=self._figures,
                holds_work=False,
            )
            async with membership.handing_back():
                await self._live(membership, stop)

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

    async def _live(self, membership: Membership, stop: asyncio.Event) -> None:
        await membership.register()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._beat(membership))]
                tasks += [group.create_task(self._poll(job)) for job in self._polled]
                group.create_task(cancel_when(stop, tasks))
        except* OwnershipLost:
            _log.warning("%s was presumed dead; starting over", self._worker_id)
        if stop.is_set():
            await membership.leave()
        else:
            await membership.leave_soon()

    async def _poll(self, job: Job) -> None:
        """Run a job whenever it has work, forever. Several workers may see the work; the job's lock lets one run."""
        assert job.has_work is not None
        while True:
            await wait_for_tick(job.poll_seconds)
            try:
                if await self._has_work(job):
                    await self.run_job(job.name, job.run_within_limits)
            except Exception as error:  # noqa: BLE001  (the outer edge: the next poll tries again)
                _log.warning("the job %s failed: %s: %s", job.name, type(error).__name__, error)

    async def _has_work(self, job: Job) -> bool:
        assert job.has_work is not None
        try:
            return await job.has_work(self._services)
        except StoreRefused:  # a key of another type, which the job moves away
            return True

    async def _beat(self, membership: Membership) -> None:
        while True:
            if await membership.beat(self._started) is None:
                raise OwnershipLost(f"{self._worker_id} was swept.")
            await membership.join_new_shards()
            membership.figures.set(running=len(self._at_work))
            await membership.wait_for_next_beat()
