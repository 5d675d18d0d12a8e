"""What a job is: an async function that a Celery task runs, with how often, how long and how many times."""

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

LOCK_MS = 15_000
RENEWAL_SECONDS = 4.0
PLACES = 64
PLACES_OF_TENANT = 16
LONGEST_WAIT_SECONDS = 30.0
"""For a place: what has none by then is sent again later, and those that wait are not too many."""
LONGEST_LIMIT_SECONDS = 1_500.0
"""Shorter than the time after which the broker delivers a message again."""


class TenantPlaces:
    """Places of which each tenant has some at most, so that none keeps another one waiting for long."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(PLACES)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place, once there is one.

        Raises:
            TimeoutError: there was none for `LONGEST_WAIT_SECONDS`.
        """
        own = self._of.setdefault(tenant, asyncio.Semaphore(PLACES_OF_TENANT))
        async with asyncio.timeout(LONGEST_WAIT_SECONDS) as limit, own, self._all:
            limit.reschedule(None)
            yield


@dataclass(frozen=True, slots=True)
class JobServices:
    """What every job is given.

    Attributes:
        send: sends another job; None: there is nobody to send it to.
        places: for what waits for others outside of the cluster, a few for each tenant.
    """

    store: Store
    settings: BrokerSettings
    send: Callable[[str, tuple[Any, ...]], None] | None = None
    client: Client = field(init=False)
    places: TenantPlaces = field(init=False, default_factory=TenantPlaces)

    def __post_init__(self) -> None:
        object.__setattr__(self, "client", Client(self.store, self.settings.archive))

    async def ask(self, name: str, *arguments: Any) -> None:
        """Send another job."""
        if self.send is not None:
            await asyncio.to_thread(self.send, name, arguments)


@dataclass(frozen=True, slots=True)
class Job:
    """One kind of job.

    Attributes:
        name: its Celery task is `deckhands.jobs.<name>`.
        run: does it. Idempotent: after a death it is done again, and two may overlap for a moment.
        every_seconds: how often a beat sends it, without arguments; None: only when somebody asks for it.
        limit_seconds: how long it may take.
        retries: how often it is tried again after an error that may pass.
        has_result: whether Celery keeps what it returns.
        is_alone: whether a second one returns at once while one is at work.
        is_awaited: whether its task, and a slot of the worker, lasts as long as it does. One that is not has no result
            and is not tried again: what it leaves is found by those who send it.
    """

    name: str
    run: Callable[Concatenate[JobServices, ...], Awaitable[Any]]
    every_seconds: float | None = None
    limit_seconds: float = 600.0
    retries: int = 3
    is_alone: bool = True
    has_result: bool = True
    is_awaited: bool = True


@asynccontextmanager
async def alone(store: Store, name: str) -> AsyncIterator[bool]:
    """Say whether no other job of this name is at work; hold its place meanwhile.

    What is at stake is doubled work, not correctness: the place of a worker that stands still lapses.
    """
    token = new_key()
    if await _hold(store, name, "take", token) != "held":
        yield False
        return
    renewing = asyncio.create_task(_renew(store, name, token), name=f"renew the place of {name}")
    try:
        yield True
    finally:
        renewing.cancel()
        await _hold(store, name, "give", token)


async def _renew(store: Store, name: str, token: str) -> None:
    """Keep the place until it has lapsed and is another one's."""
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        if await _hold(store, name, "keep", token) != "held":
            return


async def _hold(store: Store, name: str, what: str, token: str) -> str:
    names = ShardKeys(0)
    (outcome,) = await store.function("deck_hold_job", (names.job(name), names.root), what, token, LOCK_MS)
    return str(outcome)
