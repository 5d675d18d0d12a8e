"""A conversation's permit to call a model under its quota: acquired, held during the call, given back.

Holds: a permit is given back however the call ends, with the tokens the call used. An unused permit costs the quota
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from broker.contract import ModelCallDeferred, Ownership, Priority
from broker.limits import CallOutcome, CallQueued, Quota, QuotaKey, QuotaPool
from broker.runtime import StoreRefused
from controller_worker.core import QUOTA
from controller_worker.model.permits.permits import Permits
from controller_worker.providers import Completion, RateLimitError, UnreachableError

MAX_TABLES = 3
"""How often a permit is requested again because the quota table has changed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A permit for one call, under one quota of a pool."""

    pool: QuotaPool
    quota: Quota


@dataclass(slots=True)
class HeldPermit:
    """A permit during its call. The caller stores the reply here."""

    completion: Completion | None = None


class QuotaPermit:
    """A conversation's permit, or its place in the queue. Neither exists without a quota.

    Attributes:
        priority, tenant: determine the order in the queue.
    """

    def __init__(self, permits: Permits, ownership: Ownership) -> None:
        self.priority = Priority.BATCH
        self.tenant = ""
        self._permits = permits
        self._ownership = ownership
        self._grant: Grant | None = None
        self._queue: QuotaPool | None = None
        self._home: QuotaPool | None = None

    @property
    def key(self) -> QuotaKey | None:
        """The key and the address for the call, if they are not those of the model's settings."""
        return None if self._grant is None else self._grant.quota.call_key

    @property
    def is_granted(self) -> bool:
        """Whether a quota has granted the next call."""
        return self._grant is not None

    async def acquire(
        self, pool: QuotaPool | None, model: str, tokens: int, *, prefix: str = ""
    ) -> ModelCallDeferred | None:
        """Request the permit. Return why the call must wait; None if it may be made.

        Idempotent: for a repeated request, the governor grants the same permit.

        Args:
            pool: the quota that the call counts against; None without one. Call `leave_others` first.
            tokens: the estimated size of the prompt.
            prefix: see `Governor.reserve`.
        """
        if pool is None:
            return None
        self._grant = None
        answer = await self._reserve(pool, model, tokens, prefix)
        if isinstance(answer, CallQueued):
            self._queue = pool
            return ModelCallDeferred(
                code=QUOTA,
                content=f"The quota of {pool.title} has no room for the call.",
                waits_for=pool.title,
                expected_at=self._permits.clock.now() + timedelta(seconds=answer.eta_seconds),
            )
        self._grant, self._queue = answer, None
        return None

    async def try_acquire(self, pool: QuotaPool, model: str, tokens: int) -> bool:
        """Request a permit without queueing. Return whether the call may be made."""
        answer = await self._reserve(pool, model, tokens)
        if isinstance(answer, CallQueued):
            await self._withdraw(pool)
            return False
        self._grant = answer
        return True

    @contextlib.asynccontextmanager
    async def hold(self, model: str) -> AsyncIterator[HeldPermit]:
        """Hold the permit during one call, and give it back however the call ends."""
        grant, self._grant = self._grant, None
        held = HeldPermit()
        if grant is None:
            yield held
        else:
            async with self._give_back_on_failure(grant):
                yield held
        assert held.completion is not None
        self._permits.learn_output(model, held.completion.usage.completion_tokens)
        if grant is not None:
            await self._settle(grant, held.completion)

    @property
    def is_queued(self) -> bool:
        """Whether the conversation waits in a quota's queue."""
        return self._queue is not None

    async def count_prompt(
        self, pool: QuotaPool, model: str, count: Callable[[QuotaKey | None], Awaitable[int | None]]
    ) -> int | None:
        """Count a prompt under a permit for one request without tokens. Return None if the quota has no room."""
        if not await self.try_acquire(pool, model, 0):
            return None
        grant, self._grant = self._grant, None
        assert grant is not None
        async with self._give_back_on_failure(grant):
            tokens = await count(grant.quota.call_key)
        await self._give_back(grant, CallOutcome.OK)
        return tokens

    @contextlib.asynccontextmanager
    async def _give_back_on_failure(self, grant: Grant) -> AsyncIterator[None]:
        """Give a permit back if its call fails or is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self._permits.release_later(self._give_back(grant, CallOutcome.FAILED))
            raise
        except RateLimitError as error:
            await self._give_back(grant, CallOutcome.LIMITED, error.retry_after_seconds)
            raise
        except UnreachableError:
            await self._give_back(grant, CallOutcome.FAILED if grant.quota.base_url is None else CallOutcome.DOWN)
            raise
        except Exception:
            await self._give_back(grant, CallOutcome.FAILED)
            raise

    async def leave_others(self, pool: QuotaPool | None) -> None:
        """Leave the queue and give back the permit of any other quota, in case the conversation changed its model."""
        name = None if pool is None else pool.name  # of two tables, if the file has changed
        if self._queue is not None and self._queue.name != name:
            await self.leave_queue()
        if self._grant is not None and self._grant.pool.name != name:
            await self.give_back_unused()
        if self._home is not None and self._home.name != name:
            await self.leave_home()

    async def leave_home(self) -> None:
        """Make room in the cache of the replica that has the conversation's prompt."""
        home, self._home = self._home, None
        if home is not None:
            await self._withdraw(home, is_over=True)

    async def leave_queue(self) -> None:
        """Stop waiting for a permit."""
        queue, self._queue = self._queue, None
        if queue is not None:
            await self._withdraw(queue)

    async def give_back_unused(self) -> None:
        """Give back a permit that was not used for a call."""
        grant, self._grant = self._grant, None
        await self._give_back(grant, CallOutcome.UNSENT)

    async def _reserve(self, pool: QuotaPool, model: str, tokens: int, prefix: str = "") -> Grant | CallQueued:
        for _ in range(MAX_TABLES):
            answer = await self._permits.governor.reserve(
                pool,
                self._ownership.conversation_id,
                self._ownership.worker_id,
                input_tokens=tokens,
                output_tokens=self._permits.estimate_output_tokens(model),
                priority=self.priority,
                tenant=self.tenant,
                fence=self._ownership.token,
                prefix=prefix,
            )
            if isinstance(answer, CallQueued):
                return answer
            quota = pool.find_quota(answer.key)
            if quota is not None:
                if pool.has_replicas:
                    self._home = pool
                return Grant(pool, quota)
            # Another worker has a newer table, or the store's was overwritten. No address is taken from the store.
            await self._permits.read_table_again()
            pool = self._permits.governor.table.find_pool(pool.model, self.tenant) or pool
            await self._permits.governor.settle(
                pool,
                self._ownership.conversation_id,
                self._ownership.worker_id,
                CallOutcome.UNSENT,
                fence=self._ownership.token,
            )
        raise StoreRefused(f"The quota of {pool.title} has a key that the table of this worker does not have.")

    async def _withdraw(self, pool: QuotaPool, *, is_over: bool = False) -> None:
        owner = self._ownership
        await self._permits.governor.withdraw(
            pool, owner.conversation_id, owner.worker_id, fence=owner.token, is_over=is_over
        )

    async def _settle(self, grant: Grant, completion: Completion) -> None:
        usage = completion.usage
        quota = grant.quota
        governor = self._permits.governor
        worker_id = self._ownership.worker_id
        if quota.is_below_burst(completion.quota_left):
            await governor.apply_remaining(grant.pool, quota.key, worker_id, dict(completion.quota_left))
        await governor.settle(
            grant.pool,
            self._ownership.conversation_id,
            worker_id,
            CallOutcome.OK,
            input_tokens=max(0, usage.prompt_tokens - (0 if quota.cached_input_counts else usage.cache_read_tokens)),
            output_tokens=usage.completion_tokens,
            took_seconds=completion.latency_seconds,
            fence=self._ownership.token,
        )

    async def _give_back(
        self, grant: Grant | None, outcome: CallOutcome, retry_after_seconds: float | None = None
    ) -> None:
        if grant is not None:
            await self._permits.governor.settle(
                grant.pool,
                self._ownership.conversation_id,
                self._ownership.worker_id,
                outcome,
                retry_after_seconds=retry_after_seconds,
                fence=self._ownership.token,
            )
