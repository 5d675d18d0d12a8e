"""The governor: the quotas of models for the whole cluster, reserved before a call and settled after it.

A conversation that may not call now gets a place in the queue of its model and is woken when its turn comes; until then
it costs nothing. What it is granted then is kept for it for some seconds.

Holds: what is in flight never exceeds a quota that the provider states; interactive conversations go first,
tenants share by weight; what a dead worker held is free again once its heartbeat has lapsed, by no other clock. Of two
owners of a conversation, only the latter reserves, settles and withdraws: each call has the fencing token of its owner.
Does not: cost a model without a quota anything, not even a round trip.
Keys: `deck:{0}:quota:<pool>:…`, see governor.lua.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.contract import Priority
from broker.coordination import wake
from broker.limits.quotas import Pool, QuotaTable
from broker.runtime import StoreRefused
from broker.store import WRONG_TYPE, Argument, ShardKeys, Store

PUMP = "deck_quota_pump"
ATTEMPTS = 5
"""So often a call is made that finds its quotas lost or overwritten."""
LONGEST_SLEEP_SECONDS = 1.0
SHORTEST_SLEEP_SECONDS = 0.005
LONGEST_REFUSAL_SECONDS = 3_600.0
"""One odd header must not hold up a cluster for years."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Granted:
    """The call may be made, with this key of the pool."""

    key: str


@dataclass(frozen=True, slots=True)
class InQueue:
    """Not now: the conversation is woken when its turn comes, in about this many seconds."""

    eta_seconds: float


class CallOutcome(StrEnum):
    """What became of a call that was granted."""

    OK = "ok"
    FAILED = "failed"
    LIMITED = "limited"
    """The provider refused it for its quota."""
    UNSENT = "unsent"


class Governor:
    """The quotas of a store, as one worker sees them."""

    def __init__(self, store: Store, table: QuotaTable) -> None:
        self._store = store
        self._table = table
        self._shard = ShardKeys(0)
        self._wake_timers: dict[str, _WakeTimer] = {pool.name: _WakeTimer() for pool in table.pools}

    @property
    def is_idle(self) -> bool:
        """Whether there are no quotas at all."""
        return not self._table.pools

    def pool_of(self, model: str) -> Pool | None:
        """Return the pool a model belongs to, or None if it has no quota."""
        return self._table.pool_of(model)

    async def publish(self) -> None:
        """Put this worker's table in force for everybody. Idempotent."""
        for pool in self._table.pools:
            limits = [part for quota in pool.quotas for part in (quota.key, quota.limits())]
            await self._store.function("deck_quota_publish", self._keys(pool), *limits)

    async def reserve(
        self,
        pool: Pool,
        conversation_id: str,
        worker_id: str,
        *,
        input_tokens: int,
        output_tokens: int,
        priority: Priority = Priority.BATCH,
        tenant: str = "",
        fence: str = "0",
    ) -> Granted | InQueue:
        """Ask for one call of a conversation, which has one under way at most.

        Idempotent: a second call by the same worker brings the same grant, or leaves the place in the queue.

        Args:
            worker_id: a member of the cluster; what it holds is freed when it dies.
            input_tokens, output_tokens: what the call will probably use.
            fence: the token of the ownership of the conversation. A former owner is granted nothing.
        """
        arguments: tuple[Argument, ...] = (
            *(conversation_id, worker_id, input_tokens, output_tokens),
            *(priority.rank, *self._table.tenants.share_of(tenant), fence),
        )
        outcome, key, eta_ms = await self._call("deck_quota_reserve", pool, arguments)
        return Granted(key) if outcome == "granted" else InQueue(eta_ms / 1000)

    async def settle(
        self,
        pool: Pool,
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
        """Give the place back and say what was used. Idempotent; what is no longer this owner's stays as it is.

        Args:
            retry_after_seconds: what the provider asked for when it refused the call; everybody waits so long, but
                for an hour at most.
        """
        asked = None if retry_after_seconds is None else min(retry_after_seconds, LONGEST_REFUSAL_SECONDS)
        retry_ms = "" if asked is None else math.ceil(asked * 1000)
        used = (input_tokens, output_tokens, retry_ms, round(took_seconds * 1000), fence)
        await self._call("deck_quota_settle", pool, (conversation_id, worker_id, outcome.value, *used))

    async def obey(self, pool: Pool, key: str, worker_id: str, left: dict[str, int]) -> None:
        """Take note of what a provider's headers say is left: `requests`, `input`, `output` or `tokens` → how many."""
        reported = [part for item in left.items() for part in item]
        await self._call("deck_quota_told", pool, (key, worker_id, *reported))

    async def withdraw(self, pool: Pool, conversation_id: str, worker_id: str, *, fence: str = "0") -> None:
        """Leave the queue. Idempotent; a later owner's place stays."""
        await self._call("deck_quota_withdraw", pool, (conversation_id, worker_id, fence))

    async def pump(self, pool: Pool, worker_id: str) -> None:
        """Wake those whose turn it is."""
        await self._call(PUMP, pool, (worker_id,))

    async def keep_pumping(self, worker_id: str) -> None:
        """Wake conversations when time has made room for them; never ends by itself.

        One of all workers does it at the right moment, the others now and then, in case that one has died.
        """
        async with asyncio.TaskGroup() as group:
            for pool in self._table.pools:
                group.create_task(self._keep_pumping(pool, worker_id))

    async def _keep_pumping(self, pool: Pool, worker_id: str) -> None:
        while True:
            try:
                await self.pump(pool, worker_id)
            except StoreRefused as error:
                _log.error("nobody is woken who waits for %s: %s", pool.name, error)
            await self._wake_timers[pool.name].sleep()

    async def _call(self, function: str, pool: Pool, arguments: tuple[Argument, ...]) -> tuple[str, str, int]:
        for _ in range(ATTEMPTS):
            try:
                reply: list[Any] = await self._store.function(function, self._keys(pool), *arguments)
            except StoreRefused as error:
                if WRONG_TYPE not in error.message or function == PUMP:
                    raise
                await self.pump(pool, "")  # moves away what stands in a key's place
                continue
            if reply[0] != "unknown":
                break
            await self.publish()  # the store has forgotten its quotas, or nobody has published them yet
        else:
            raise StoreRefused(f"The quotas of {pool.name} are lost or overwritten each time they are published.")
        outcome, next_ms, key, eta_ms, *woken = reply
        if next_ms >= 0:
            self._wake_timers[pool.name].end_after(next_ms / 1000)
        if woken:
            await wake(self._store, [cid.decode(errors="backslashreplace") for cid in woken])
        return outcome, key.decode(), eta_ms

    def _keys(self, pool: Pool) -> tuple[str, str]:
        return self._shard.quota(pool.name), self._shard.root


class _WakeTimer:
    """A sleep that can be shortened while it lasts."""

    def __init__(self) -> None:
        self._wanted: float | None = None
        self._shortened = asyncio.Event()

    def end_after(self, seconds: float) -> None:
        """End it after this many seconds, unless it ends earlier."""
        at = asyncio.get_running_loop().time() + max(seconds, SHORTEST_SLEEP_SECONDS)
        if self._wanted is None or at < self._wanted:
            self._wanted = at
            self._shortened.set()

    async def sleep(self) -> None:
        """Sleep until the earliest end that was asked for, a second at most."""
        loop = asyncio.get_running_loop()
        longest = loop.time() + LONGEST_SLEEP_SECONDS
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
