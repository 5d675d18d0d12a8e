"""The permit that every model call of a conversation needs: room in its model's quota and in the budgets above it.

`acquire` asks for it, `held` is around the call, `charge` follows once the log has the reply. Between the first and the
last the conversation may be parked, taken over or stopped: `withdraw`, `catch_up` and `abandon`.

Holds: a call without a quota and without a budget costs nothing here; whatever was reserved is given back whatever
becomes of the call; a short wait leaves no trace in the log.
Does not: decide what a wait means for the conversation; see `concerns.model_calls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

from broker.contract import (
    TERMINAL_STATES,
    LLMSpec,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    Ownership,
    Priority,
)
from broker.contract import priority_of as priority_for
from broker.limits import CallStands
from broker.runtime import UsageError
from controller_worker.core import LARGEST_RATIO, Append, CallModel, State, corrected, latest_of
from controller_worker.model.permits.batched_call import BatchedCall, is_batched, step_of
from controller_worker.model.permits.budget_reservation import BudgetReservation, accounts_above
from controller_worker.model.permits.permits import Permits
from controller_worker.model.permits.quota_permit import Held, QuotaPermit
from controller_worker.model.steps.call_task import Wait
from controller_worker.providers import Completion, LLMConfig, ModelRequest, prompt_tokens, worst_cost_usd

QUIET_SECONDS = 5.0
"""A wait that is expected to be shorter leaves no trace in the log and keeps the conversation in memory."""
MAYBE_BILLED = frozenset({"timeout", "malformed_reply", "no_response", "unexpected"})
"""Codes of failed calls that a provider may bill all the same."""


class CallPermit:
    """The permit of one conversation's next model call.

    Attributes:
        is_refused: the call has to wait, and the conversation has not been woken since.
        is_woken: the conversation has been woken since it began to ask for the permit.
        counts_tokens: a quota or a budget counts what the latest call uses.
    """

    def __init__(self, permits: Permits, ownership: Ownership) -> None:
        self.is_refused = self.is_woken = False
        self.counts_tokens = False
        self._permits = permits
        self._ownership = ownership
        self._cid = ownership.conversation_id
        self._quota = QuotaPermit(permits, ownership)
        self._budget = BudgetReservation(permits, ownership)
        self._is_batched = False

    @property
    def key_env(self) -> str | None:
        """The environment variable whose key the call must use; None for the usual one."""
        return self._quota.key_env

    @property
    def tenant(self) -> str:
        """Whose conversation the latest permit was for; empty: it has no tenant."""
        return self._quota.tenant

    async def acquire(
        self,
        state: State,
        config: LLMConfig | None,
        request: ModelRequest,
        prepare: Callable[[], Awaitable[object]],
        *,
        counted_ratio: float | None = None,
    ) -> Append | Wait | None:
        """Ask for the permit.

        Idempotent: asked again, it grants the same.

        Args:
            config: how the model is asked; None where that cannot be known, and the call will fail by itself.
            prepare: makes the model's client; a permit that waited for it would be used later than the quota thinks.
            counted_ratio: how far the estimate of the prompt is off, if it was counted.

        Returns:
            `Append` of the start of a long wait, or of its end; `Wait` during a wait; None: the call may be made.
        """
        self.is_refused = False
        self.counts_tokens = False
        priority = priority_of(state)
        accounts = accounts_above(state)
        self._quota.priority = priority
        self._quota.tenant = state.setup.tenancy.tenant
        self._is_batched = is_batched(config, request, priority)
        pool = self._permits.governor.pool_of(config.model) if config is not None and not self._is_batched else None
        await self._quota.leave_others(pool)
        if config is not None and (pool is not None or accounts):
            with contextlib.suppress(UsageError):
                await prepare()
            self.counts_tokens = True
            ratio = counted_ratio or self.ratio(state, config, request)
            estimate = prompt_tokens(request, self._permits.tokens)
            deferred = await self._quota.acquire(pool, config.model, corrected(estimate, ratio or 1.0))
            if deferred is None and accounts:
                tokens = corrected(estimate, ratio or LARGEST_RATIO)
                deferred = await self._reserve_budget(state, accounts, config, tokens)
            if deferred is not None:
                self.is_refused = True
                self._permits.figures.add("refusals", label=deferred.code)
                return Append((deferred,)) if self._is_news(state, deferred) else Wait()
        if state.calls.deferral is not None and not self._is_batched:
            return Append((ModelCallAdmitted(),))
        return None

    def wake(self) -> None:
        """Let the call be asked for again: what it waits for may be there."""
        self.is_refused, self.is_woken = False, True

    def take_wake(self) -> bool:
        """Return whether the wake overtook the refusal, which is out of date then; it no longer counts."""
        is_overtaken = self.is_refused and self.is_woken
        if is_overtaken:
            self.is_refused = self.is_woken = False
        return is_overtaken

    def held(self, model: str) -> AbstractAsyncContextManager[Held]:
        """Hold the permit while one call is made; see `QuotaPermit.held`."""
        return self._quota.held(model)

    async def counted(self, config: LLMConfig, count: Callable[[str | None], Awaitable[int | None]]) -> int | None:
        """Count a prompt under the quota of its model, if that has room now; None where it has none.

        Args:
            count: asks the provider with the key of an environment variable, None for the usual one.
        """
        pool = self._permits.governor.pool_of(config.model)
        if pool is None:
            return await count(None)
        if self._quota.is_granted or self._quota.is_queued:
            return None
        return await self._quota.counted(pool, config.model, count)

    def ratio(self, state: State, config: LLMConfig, request: ModelRequest) -> float | None:
        """Return how far estimates for the model are off: in this conversation, else in those of this worker."""
        latest = latest_of(state.usage.latest, request.service, config.model)
        return self._permits.ratio(config.model) if latest is None or latest.ratio is None else latest.ratio

    def key_count(self, config: LLMConfig) -> int:
        """Return how many keys the quota of a model has; 1 without a quota."""
        pool = self._permits.governor.pool_of(config.model)
        return 1 if pool is None else len(pool.quotas)

    async def try_other(self, config: LLMConfig, request: ModelRequest) -> bool:
        """Exchange the permit for one to call a fallback, without waiting; say whether it may be called."""
        await self._quota.give_back_unused()
        pool = self._permits.governor.pool_of(config.model)
        if pool is None:
            return True
        estimate = prompt_tokens(request, self._permits.tokens)
        tokens = corrected(estimate, self._permits.ratio(config.model) or 1.0)
        return await self._quota.try_acquire(pool, config.model, tokens)

    async def charge(self, state: State, result: Completion | ModelCallFailed | None) -> None:
        """Charge what the log has come to, once it has the call's outcome; give an unused permit back.

        Args:
            result: what is in the log now; None if the call may have brought a reply that is not.
        """
        is_lost = result is None or (isinstance(result, ModelCallFailed) and result.code in MAYBE_BILLED)
        await self._quota.give_back_unused()
        await self._budget.settle(state, is_lost=is_lost)
        if self._is_batched:
            await self._permits.batches.drop(self._cid)  # last: a batch that is closed has been charged

    async def catch_up(self, state: State) -> None:
        """Charge what a former owner has appended and may not have charged."""
        accounts = accounts_above(state)
        self._permits.keeps_budgets = self._permits.keeps_budgets or bool(accounts)
        if accounts and state.usage.iteration:
            await self._budget.charge(state, accounts)

    async def withdraw(self, state: State, *, is_over: bool = False) -> None:
        """Neither wait nor call: the conversation wants something else.

        Args:
            is_over: nobody will want the reply of a call that is in a batch.
        """
        await self._quota.leave_queue()
        await self._budget.leave_queue()
        self.is_refused = False
        await self._quota.give_back_unused()
        if self._permits.may_batch:
            await self._leave_batch(state, is_over=is_over or state.lifecycle.agent_state in TERMINAL_STATES)
        else:
            await self._budget.settle(state)

    def abandon(self, state: State) -> None:
        """Give back what a call had that was cancelled; its reply may have been paid for and is lost."""
        if self._is_batched:
            return  # the batch is sent all the same, and the conversation's next owner takes the reply
        quota, budget = self._quota, self._budget
        if quota.is_granted or budget.is_held:
            # Taken out at once: whatever the conversation does next must not give it back as unused.
            self._quota = QuotaPermit(self._permits, self._ownership)
            self._budget = BudgetReservation(self._permits, self._ownership)
            self._permits.finish_later(_lose(quota, budget, state))

    async def is_in_batch(self, call: CallModel) -> bool:
        """Return whether a call is in a batch that has not brought its reply."""
        stands = (await self._permits.batches.ask(self._cid, step_of(call))).stands
        return stands in (CallStands.WAITING, CallStands.SENT)

    def batched_call(
        self, state: State, call: CallModel, spec: LLMSpec, config: LLMConfig | None, request: ModelRequest
    ) -> BatchedCall | None:
        """Return how a call travels in a batch; None when it does not."""
        if config is None or not is_batched(config, request, priority_of(state)):
            return None
        return BatchedCall(self._permits.batches, self._cid, call, spec=spec, config=config, seen_id=state.version)

    async def _reserve_budget(
        self, state: State, accounts: list[str], config: LLMConfig, tokens: int
    ) -> ModelCallDeferred | None:
        worst_usd = worst_cost_usd(config, tokens, is_batched=self._is_batched)
        deferred = await self._budget.reserve(state, accounts, worst_usd, is_batched=self._is_batched)
        if deferred is not None:
            await self._quota.give_back_unused()
        return deferred

    def _is_news(self, state: State, deferred: ModelCallDeferred) -> bool:
        """Return whether the log has to name a wait: unless it does already, or the wait is short."""
        if state.calls.deferral is not None and state.calls.deferral.reason == deferred.code:
            return False
        quiet_until = self._permits.clock.now() + timedelta(seconds=QUIET_SECONDS)
        return deferred.expected_at is None or deferred.expected_at > quiet_until

    async def _leave_batch(self, state: State, *, is_over: bool) -> None:
        """Give up a call that is in a batch, if the conversation is over; one that is paused will want its reply."""
        stood = await self._permits.batches.drop(self._cid) if is_over else CallStands.NONE
        accounts = accounts_above(state)
        if accounts and (stood is not CallStands.NONE or (self._budget.is_held and not self._is_batched)):
            self._budget.is_held = False
            await self._budget.charge(state, accounts, is_lost=stood in (CallStands.SENT, CallStands.DONE))


async def _lose(quota: QuotaPermit, budget: BudgetReservation, state: State) -> None:
    await quota.give_back_unused()
    await budget.settle(state, is_lost=True)


def priority_of(state: State) -> Priority:
    """Return who goes first: as asked for, else by whether a person is there."""
    return priority_for(state.setup.tenancy, is_headless=state.setup.headless)
