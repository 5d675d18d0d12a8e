"""The governor: cluster-wide quotas of models, reserved before a call and settled after it.

If a conversation may not call now, it queues for its model and is woken when its turn comes; meanwhile it uses no
resources. Its grant is then kept for some seconds.

Holds: calls in flight never exceed a quota that the provider states. Interactive conversations go first; tenants share
by weight. Reservations of a dead worker are released when its heartbeat expires, not earlier. Each call carries the
fencing token of the conversation's owner; of two owners, only the later one reserves, settles and withdraws.
Does not: add any cost, not even a round trip, to a model without a quota.
Keys: `deck:{k}:quota:<pool>:…` in the shard of the pool's name, see governor.lua.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.contract import Priority
from broker.coordination import wake_conversations
from broker.limits.quotas import QuotaPool, QuotaTable
from broker.runtime import StoreRefused, UsageError
from broker.store import WRONG_TYPE_PREFIX, Argument, Store

PUMP_FUNCTION = "deck_quota_pump"
MAX_ATTEMPTS = 5
"""How often a call is repeated if its quotas are lost or overwritten."""
MAX_SLEEP_SECONDS = 1.0
MIN_SLEEP_SECONDS = 0.005
MAX_RETRY_AFTER_SECONDS = 3_600.0
"""An invalid header must not block a cluster for years."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallGranted:
    """The call may be made with this key of the pool."""

    key: str


@dataclass(frozen=True, slots=True)
class CallQueued:
    """The call must wait. The conversation is woken when its turn comes, in about `seconds` seconds."""

    eta_seconds: float


class CallOutcome(StrEnum):
    """The outcome of a granted call."""

    OK = "ok"
    FAILED = "failed"
    LIMITED = "limited"
    """The provider refused it for its quota."""
    UNSENT = "unsent"
    DOWN = "down"
    """The replica cannot be reached: its other calls go elsewhere until it can."""


class Governor:
    """The quotas of a store, for one worker."""

    def __init__(
        self,
        store: Store,
        table: QuotaTable,
        wake: Callable[[Store, list[str]], Awaitable[object]] = wake_conversations,
    ) -> None:
        self._store = store
        self._table = table
        self._wake_timers: dict[str, _InterruptibleTimer] = defaultdict(_InterruptibleTimer)
        self._wake = wake
        self._changed = asyncio.Event()

    @property
    def table(self) -> QuotaTable:
        """The quotas in force for this worker."""
        return self._table

    @property
    def is_idle(self) -> bool:
        """Whether there are no quotas."""
        return not self._table.pools

    def find_pool(self, model: str, tenant: str) -> QuotaPool | None:
        """Return the pool of a tenant's calls of a model; None if they have no quota."""
        return self._table.find_pool(model, tenant)

    async def use(self, table: QuotaTable) -> None:
        """Put another table into force, for this worker and all others."""
        self._table = table
        self._changed.set()
        await self.publish()

    async def publish(self) -> None:
        """Put this worker's table into force for all workers. Idempotent."""
        for pool in self._table.pools:
            limits = [part for quota in pool.quotas for part in (quota.key, quota.render_limits())]
            await self._store.call_function("deck_quota_publish", self._keys(pool), *limits)

    async def reserve(
        self,
        pool: QuotaPool,
        conversation_id: str,
        worker_id: str,
        *,
        input_tokens: int,
        output_tokens: int,
        priority: Priority = Priority.BATCH,
        tenant: str = "",
        fence: str = "0",
        prefix: str = "",
    ) -> CallGranted | CallQueued:
        """Reserve one call for a conversation. A conversation has at most one call in flight.

        Idempotent: a second call by the same worker returns the same grant, or keeps the position in the queue.

        Args:
            worker_id: a member of the cluster. Its reservations are released if it dies.
            input_tokens, output_tokens: estimated usage of the call.
            fence: fencing token of the conversation's owner. A former owner is granted nothing.
            prefix: hash of the conversation's first prompt. A new conversation prefers the replica that has it.
        """
        arguments: tuple[Argument, ...] = (
            *(conversation_id, worker_id, input_tokens, output_tokens),
            *(priority.rank, *self._table.tenants.find_share(tenant), fence),
            *((prefix,) if prefix else ()),
        )
        outcome, key, eta_ms = await self._call_for_key("deck_quota_reserve", pool, arguments)
        return CallGranted(key) if outcome == "granted" else CallQueued(eta_ms / 1000)

    async def settle(
        self,
        pool: QuotaPool,
        conversation_id: str,
        worker_id: str,
        outcome: CallOutcome,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        retry_after_seconds: float | None = None,
        took_seconds: float = 0.0,
        fence: str = "0",
    ) -> None:
        """Release the reservation and record the usage. Idempotent; does nothing to a reservation of a later owner.

        Args:
            retry_after_seconds: the provider's demand when it refused the call. All calls wait that long, at most an
                hour.
        """
        asked = None if retry_after_seconds is None else min(retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
        retry_ms = "" if asked is None else math.ceil(asked * 1000)
        used = (input_tokens, output_tokens, retry_ms, round(took_seconds * 1000), fence)
        await self._call("deck_quota_settle", pool, (conversation_id, worker_id, outcome.value, *used))

    async def apply_remaining(self, pool: QuotaPool, key: str, worker_id: str, left: dict[str, int]) -> None:
        """Apply the remaining amounts in a provider's headers: `requests`, `input`, `output` or `tokens` → amount."""
        reported = [part for item in left.items() for part in item]
        await self._call("deck_quota_told", pool, (key, worker_id, *reported))

    async def withdraw(
        self, pool: QuotaPool, conversation_id: str, worker_id: str, *, fence: str = "0", is_over: bool = False
    ) -> None:
        """Leave the queue. Idempotent; a later owner keeps its position.

        Args:
            is_over: the conversation has ended, so that its replica's cache has room for another one.
        """
        await self._call(
            "deck_quota_withdraw", pool, (conversation_id, worker_id, fence, *(["over"] if is_over else []))
        )

    async def claim_report(self, pool: QuotaPool, key: str, worker_id: str, every_seconds: float) -> bool:
        """Return whether this worker should ask a replica for its health now, and not another one."""
        every_ms = round(every_seconds * 1000)
        return await self._call("deck_quota_told_engine", pool, (key, worker_id, "claim", every_ms)) == "claimed"

    async def report_engine(
        self, pool: QuotaPool, key: str, worker_id: str, *, is_up: bool, cache_tokens: int | None, use: float | None
    ) -> None:
        """Record the health of a replica.

        Args:
            cache_tokens: what its prefix cache holds; None if it does not report that.
            use: the part of its cache that replies in flight use; None if it does not report that.
        """
        reported = ["" if value is None else str(value) for value in (cache_tokens, use)]
        await self._call("deck_quota_told_engine", pool, (key, worker_id, "up" if is_up else "down", *reported))

    async def wake_next(self, pool: QuotaPool, worker_id: str) -> None:
        """Wake the conversations whose turn it is."""
        await self._call(PUMP_FUNCTION, pool, (worker_id,))

    async def run_wakeups(self, worker_id: str) -> None:
        """Wake conversations as time frees capacity. Never ends by itself.

        One worker does it at the right moment; the others do it occasionally, in case that worker has died.
        """
        async with asyncio.TaskGroup() as group:
            tasks: dict[str, asyncio.Task[None]] = {}
            while True:
                for pool in self._table.pools:
                    if pool.name not in tasks or tasks[pool.name].done():
                        tasks[pool.name] = group.create_task(self._run_wakeups_of(pool, worker_id))
                self._changed.clear()
                await self._changed.wait()

    async def _run_wakeups_of(self, pool: QuotaPool, worker_id: str) -> None:
        while any(pool.name == other.name for other in self._table.pools):
            try:
                await self.wake_next(pool, worker_id)
            except StoreRefused as error:
                _log.error("cannot wake conversations waiting for quota %s: %s", pool.name, error)
            await self._wake_timers[pool.name].sleep()

    async def _call(self, function: str, pool: QuotaPool, arguments: tuple[Argument, ...]) -> str:
        return (await self._call_for_key(function, pool, arguments))[0]

    async def _call_for_key(
        self, function: str, pool: QuotaPool, arguments: tuple[Argument, ...]
    ) -> tuple[str, str, int]:
        for _ in range(MAX_ATTEMPTS):
            try:
                reply: list[Any] = await self._store.call_function(function, self._keys(pool), *arguments)
            except StoreRefused as error:
                if WRONG_TYPE_PREFIX not in error.message or function == PUMP_FUNCTION:
                    raise
                await self.wake_next(pool, "")  # moves a key of another type away
                continue
            if reply[0] != "unknown":
                break
            await self.publish()  # the store has lost the quotas, or no worker has published them yet
        else:
            raise StoreRefused(f"The quotas of {pool.name} are lost or overwritten each time they are published.")
        outcome, next_ms, key, eta_ms, *woken = reply
        if next_ms >= 0:
            self._wake_timers[pool.name].end_after(next_ms / 1000)
        if woken:
            await self._wake(self._store, [cid.decode(errors="backslashreplace") for cid in woken])
        return outcome, key.decode(), eta_ms

    def _keys(self, pool: QuotaPool) -> tuple[str, str]:
        home = self._store.find_home(pool.name)
        return home.quota(pool.name), home.root


SETTABLE = ("requests", "input", "output", "tokens", "concurrency", "day_requests", "day_tokens")
"""The limits that can be set, by their names in the store."""
MAX_LIMIT = 10**12


async def set_limits(store: Store, pool: str, key: str, known: str, wanted: Mapping[str, int]) -> str | None:
    """Set limits of a key instead of those that controllers publish, which keep them when they start again.

    They take effect with the next call of the pool, at the latest after a second.

    Args:
        pool: the base name of its keys in the store, see `QuotaPool.name`.
        known: the set limits as the caller knows them, see `render_set_limits`.
        wanted: limit → amount; empty to use the published ones again.

    Returns:
        None, or the set limits if they are others than `known`; nothing is changed then.

    Raises:
        UsageError: there is no such key, or a limit cannot be set. Those of a key that is gone can be removed.
    """
    check_limits(wanted)
    home = store.find_home(pool)
    keys = (home.quota(pool), home.root)
    reply = await store.call_function("deck_quota_set", keys, key, known, render_set_limits(wanted))
    if reply[0] == "unknown":
        raise UsageError(f"The quota has no key {key}.", remedy="Take one that `GET /quotas` lists.")
    return reply[1].decode() if reply[0] == "changed" else None


def check_limits(limits: Mapping[str, int]) -> None:
    """Check limits that shall be set; raises UsageError."""
    for name, amount in limits.items():
        if name not in SETTABLE or not 1 <= amount <= MAX_LIMIT:
            raise UsageError(
                f"The limit {name}={amount} cannot be set.",
                remedy=f"Name one of {', '.join(SETTABLE)}, with an amount from 1 to {MAX_LIMIT:,}.",
            )


def render_set_limits(limits: Mapping[str, int]) -> str:
    """Return limits in the format of the store's functions."""
    return " ".join(f"{name}={limits[name]}" for name in SETTABLE if name in limits)


class _InterruptibleTimer:
    """A sleep that can be shortened from outside."""

    def __init__(self) -> None:
        self._wanted: float | None = None
        self._shortened = asyncio.Event()

    def end_after(self, seconds: float) -> None:
        """End the sleep after this many seconds, unless it ends earlier."""
        at = asyncio.get_running_loop().time() + max(seconds, MIN_SLEEP_SECONDS)
        if self._wanted is None or at < self._wanted:
            self._wanted = at
            self._shortened.set()

    async def sleep(self) -> None:
        """Sleep until the earliest requested end, at most one second."""
        loop = asyncio.get_running_loop()
        longest = loop.time() + MAX_SLEEP_SECONDS
        while True:
            self._shortened.clear()
            end = longest if self._wanted is None else min(longest, self._wanted)
            if end <= loop.time():
                self._wanted = None
                return
            try:
                async with asyncio.timeout_at(end):
                    await self._shortened.wait()
            except TimeoutError:
                self._wanted = None
                return
