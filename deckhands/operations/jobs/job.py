"""The definition of a job: an async function for a Celery task, with its period, time limit and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate
from weakref import WeakValueDictionary

from broker.runtime import BrokerSettings, new_key
from broker.store import ShardKeys, Store
from deckhands.client import Client
from deckhands.operations.webhooks.sending import WebhookResponse, send_request

BUSY = {"skipped": "another run is in progress"}
LOCK_MS = 15_000
RENEWAL_SECONDS = 4.0
SLOTS = 64
SLOTS_PER_TENANT = 16
LONGEST_WAIT_SECONDS = 30.0
"""How long to wait for a slot. A job without one is sent again later, so that few of them wait."""
LONGEST_LIMIT_SECONDS = 1_500.0
"""Shorter than the time after which the broker redelivers a message."""


class TenantSlots:
    """Slots with a maximum per tenant, so that no tenant keeps another waiting for long."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(SLOTS)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def acquire(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot, waiting until one is free.

        Raises:
            TimeoutError: no slot was free within `LONGEST_WAIT_SECONDS`.
        """
        own = self._of.setdefault(tenant, asyncio.Semaphore(SLOTS_PER_TENANT))
        async with asyncio.timeout(LONGEST_WAIT_SECONDS) as limit, own, self._all:
            limit.reschedule(None)
            yield


@dataclass(frozen=True, slots=True)
class JobServices:
    """The services available to every job.

    Attributes:
        send: sends another job; None if this worker cannot send jobs.
        request: makes a request to a webhook; see `send_request`.
        slots: for calls to systems outside the cluster, a few for each tenant.
    """

    store: Store
    settings: BrokerSettings
    send: Callable[[str, tuple[Any, ...]], None] | None = None
    request: Callable[..., Awaitable[WebhookResponse]] = send_request
    client: Client = field(init=False)
    slots: TenantSlots = field(init=False, default_factory=TenantSlots)

    def __post_init__(self) -> None:
        object.__setattr__(self, "client", Client(self.store, self.settings.archive))

    async def send_job(self, name: str, *arguments: Any) -> None:
        """Send another job."""
        if self.send is not None:
            await asyncio.to_thread(self.send, name, arguments)


@dataclass(frozen=True, slots=True)
class Job:
    """One kind of job.

    Attributes:
        name: its Celery task is `deckhands.jobs.<name>`.
        run: the function. Idempotent: it runs again after a crash, and two runs may overlap for a moment.
        every_seconds: the period at which a beat sends it, without arguments; None if it is sent only on request.
        has_work: asks the store, in one round trip or two, whether a run would find work. If given, every jobs worker
            calls it at each `poll_seconds` and runs the job without a message; the beat's runs are only a safeguard.
        limit_seconds: the time limit of a run.
        retries: how often it is retried after a transient error.
        has_result: whether Celery keeps its result, and monitors get its events.
        is_alone: whether a second run returns at once while one is in progress.
        is_awaited: whether its task occupies a slot of the worker until it ends. If not, it has no result and is not
            retried: its senders find unfinished work.
    """

    name: str
    run: Callable[Concatenate[JobServices, ...], Awaitable[Any]]
    every_seconds: float | None = None
    limit_seconds: float = 600.0
    retries: int = 3
    is_alone: bool = True
    has_result: bool = True
    is_awaited: bool = True
    has_work: Callable[[JobServices], Awaitable[bool]] | None = None
    poll_seconds: float = 0.0

    async def run_within_limits(self, services: JobServices, *arguments: Any, **options: Any) -> Any:
        """Run the job within its time limit and return its result; `BUSY` if an exclusive job is already running."""
        async with asyncio.timeout(self.limit_seconds):
            if not self.is_alone:
                return await self.run(services, *arguments, **options)
            async with hold_lock(services.store, self.name) as is_first:
                return await self.run(services, *arguments, **options) if is_first else BUSY


@asynccontextmanager
async def hold_lock(store: Store, name: str) -> AsyncIterator[bool]:
    """Return whether no other job of this name is running; hold its lock meanwhile.

    The lock of a stalled worker expires. This costs duplicated work, never correctness.
    """
    token = new_key()
    if await _hold(store, name, "take", token) != "held":
        yield False
        return
    renewing = asyncio.create_task(_renew(store, name, token), name=f"renew the lock of {name}")
    try:
        yield True
    finally:
        renewing.cancel()
        await _hold(store, name, "give", token)


async def _renew(store: Store, name: str, token: str) -> None:
    """Renew the lock until it has expired and another worker holds it."""
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        if await _hold(store, name, "keep", token) != "held":
            return


async def _hold(store: Store, name: str, what: str, token: str) -> str:
    names = ShardKeys(0)
    (outcome,) = await store.call_function("deck_hold_job", (names.job_lock(name), names.root), what, token, LOCK_MS)
    return str(outcome)
