"""The permit for a conversation's model call: room in the model's quota and in the budgets above the conversation.

`acquire` requests it, `held` wraps the call, and `charge` follows once the log has the reply. In between, the
conversation may be parked, taken over or stopped; see `withdraw`, `catch_up` and `abandon`.

A batched call is added to the queue of its batch, and later fetched from it. For any other call, money is reserved in
the budgets above the conversation.

Holds: a call without a quota and a budget makes no request to the store here. Every reservation is released, however
the call ends. A short wait adds nothing to the log. A step is added to one batch only, even under another owner. An
interactive user never waits for a batch. A budget is charged only for costs in the log. A conversation without a
tenant, an experiment or a parent has no budget above it and makes no request to the store here.
Does not: decide the effect of a wait on the conversation; see `concerns.model_calls`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

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
from broker.limits import BatchCallStatus, Batches, QuotaKey, QuotaPool, list_accounts
from broker.runtime import UsageError
from controller_worker.core import BUDGET, LARGEST_RATIO, Append, CallModel, State, correct_estimate, find_latest_call
from controller_worker.model.permits.permits import Permits
from controller_worker.model.permits.quota_permit import HeldPermit, QuotaPermit
from controller_worker.model.steps.call_task import NotStarted
from controller_worker.providers import (
    CallBatched,
    Completion,
    LLMConfig,
    ModelRequest,
    estimate_max_cost_usd,
    estimate_prompt_tokens,
    load_reply,
    make_lane,
)


class BudgetReservation:
    """The reservation of one conversation.

    Attributes:
        is_held: a reservation is not settled yet.
    """

    def __init__(self, permits: Permits, ownership: Ownership) -> None:
        self.is_held = False
        self._permits = permits
        self._ownership = ownership
        self._accounts: list[str] = []
        self._is_waiting = False

    async def reserve(
        self, state: State, accounts: list[str], worst_usd: float, *, is_batched: bool
    ) -> ModelCallDeferred | None:
        """Reserve the maximum cost of a call. Return the reason to wait; None if the call may be made. Idempotent."""
        self._accounts = accounts
        self._permits.keeps_budgets = True
        exhausted = await self._permits.ledger.reserve(
            self._ownership,
            self._accounts,
            worst_usd=worst_usd,
            total_usd=sum_own_cost_usd(state),
            is_batched=is_batched,
        )
        self.is_held = exhausted is None
        self._is_waiting = exhausted is not None
        if exhausted is None:
            return None
        return ModelCallDeferred(
            code=BUDGET,
            content=f"The budget of {exhausted.account} has no room for the call.",
            waits_for=exhausted.account,
        )

    async def settle(self, state: State, *, is_lost: bool = False) -> None:
        """Charge the costs in the log and release the rest of the reservation.

        Args:
            is_lost: the call may have cost something that the log does not show.
        """
        if self.is_held:
            self.is_held = False
            await self.charge(state, self._accounts, is_lost=is_lost)

    async def charge(self, state: State, accounts: list[str], *, is_lost: bool = False) -> None:
        """Charge the accounts up to the costs in the log. Idempotent."""
        total_usd = sum_own_cost_usd(state)
        await self._permits.ledger.settle(self._ownership, accounts, total_usd=total_usd, is_lost=is_lost)

    async def leave_queue(self) -> None:
        """Stop waiting for a top-up."""
        if self._is_waiting:
            self._is_waiting = False
            await self._permits.ledger.withdraw(self._ownership.conversation_id, self._accounts)


def list_accounts_above(state: State) -> list[str]:
    """Return the accounts that a conversation's calls are charged to; may be empty."""
    tenancy = state.setup.tenancy
    parent = state.setup.parent
    return list_accounts(
        state.setup.conversation_id,
        tenant=tenancy.tenant,
        experiment=tenancy.experiment,
        parent_id=parent.conversation_id if parent is not None else None,
    )


def sum_own_cost_usd(state: State) -> float:
    """Return the cost of the replies in the log. Costs of delegates and of a fork's origin are charged elsewhere."""
    if state.version <= state.setup.forked_at:
        return 0.0
    return state.usage.cost_usd - state.delegation.spent_usd - state.usage.inherited_usd


def is_batched(config: LLMConfig | None, request: ModelRequest, priority: Priority) -> bool:
    """Return whether a call uses the batch API: a step of a conversation without an interactive user."""
    if config is None or config.batch is None:
        return False
    return request.service == "agent" and priority is Priority.BATCH and request.rollout is None


def name_step(call: CallModel) -> str:
    """Return the key of a call within its conversation."""
    return f"{call.iteration}.{call.attempt}"


class BatchedCall:
    """Implements a request's `carry`; see `batching`.

    Attributes:
        seen_id: the last event in the prompt, which may be older than the current question.
    """

    def __init__(
        self,
        batches: Batches,
        conversation_id: str,
        call: CallModel,
        *,
        spec: LLMSpec,
        config: LLMConfig,
        seen_id: int,
    ) -> None:
        self._batches = batches
        self._cid = conversation_id
        self._step = name_step(call)
        self._spec = spec
        self._lane = make_lane(spec, config)
        self.seen_id = seen_id

    async def carry(self, body: bytes) -> Any:
        """Return the provider's answer.

        Raises:
            CallBatched: there is no answer yet; the conversation is woken when it arrives.
            ModelError: the call failed.
        """
        call = await self._batches.load_call(self._cid, self._step)
        if call.status is BatchCallStatus.DONE:
            self.seen_id = call.seen_id
            return load_reply(call.result)
        if call.status is BatchCallStatus.NONE:
            await self._batches.put(
                self._cid,
                self._step,
                seen_id=self.seen_id,
                lane=self._lane,
                about_lane=self._spec.model_dump_json(),
                body=body,
            )
        raise CallBatched


PREFIX_MESSAGES, PREFIX_CHARS = 2, 20_000
"""How much of a prompt tells that of one group from that of another."""
QUIET_SECONDS = 5.0
"""A shorter expected wait is not logged and keeps the conversation in memory."""
POSSIBLY_BILLED = frozenset({"timeout", "malformed_reply", "no_response", "unexpected"})
"""Codes of failed calls that a provider may still bill."""


class CallPermit:
    """The permit of one conversation's next model call.

    Attributes:
        is_refused: the call must wait, and the conversation has not been woken since the refusal.
        is_woken: the conversation has been woken since it first requested the permit.
        counts_tokens: a quota or a budget counts the tokens of the latest call.
    """

    def __init__(self, permits: Permits, ownership: Ownership) -> None:
        self.is_refused = self.is_woken = False
        self.counts_tokens = False
        self._permits = permits
        self._ownership = ownership
        self._cid = ownership.conversation_id
        self._quota = QuotaPermit(permits, ownership)
        self._budget = BudgetReservation(permits, ownership)
        self._is_batched = self._is_elsewhere = False

    @property
    def key(self) -> QuotaKey | None:
        """The key and the address for the call, if they are not those of the model's settings."""
        return self._quota.key

    @property
    def tenant(self) -> str:
        """The tenant of the latest permit's conversation; empty if it has none."""
        return self._quota.tenant

    async def acquire(
        self,
        state: State,
        config: LLMConfig | None,
        request: ModelRequest,
        prepare: Callable[[], Awaitable[object]],
        *,
        counted_ratio: float | None = None,
        is_elsewhere: bool = False,
    ) -> Append | NotStarted | None:
        """Request the permit.

        Idempotent: a repeated request gets the same permit.

        Args:
            config: the model's settings; None if they are unknown, in which case the call itself fails.
            prepare: creates the model's client before the request. A permit that waited for the client would be used
                later than the quota assumes.
            counted_ratio: exact prompt size divided by the estimate, if the prompt was counted.
            is_elsewhere: the call goes to the conversation's own endpoint. It uses no quota, so that nothing that
                this endpoint answers affects the calls of other tenants.

        Returns:
            `Append` at the start and the end of a long wait; `Wait` during a wait; None if the call may be made.
        """
        self.is_refused = False
        self.counts_tokens = False
        priority = find_priority(state)
        accounts = list_accounts_above(state)
        self._quota.priority = priority
        self._quota.tenant = state.setup.tenancy.tenant
        self._is_elsewhere = is_elsewhere
        self._is_batched = not is_elsewhere and is_batched(config, request, priority)
        pool = None
        if config is not None and not self._is_batched and not is_elsewhere:
            pool = self._permits.governor.find_pool(config.model, self.tenant)
        await self._quota.leave_others(pool)
        if config is not None and (pool is not None or accounts):
            with contextlib.suppress(UsageError):
                await prepare()
            self.counts_tokens = True
            ratio = counted_ratio or self.ratio(state, config, request)
            estimate = estimate_prompt_tokens(request, self._permits.tokens)
            prefix = hash_first_prompt(request) if pool is not None and pool.has_replicas else ""
            tokens = correct_estimate(estimate, ratio or 1.0)
            deferred = await self._quota.acquire(pool, config.model, tokens, prefix=prefix)
            if deferred is None and accounts:
                tokens = correct_estimate(estimate, ratio or LARGEST_RATIO)
                deferred = await self._reserve_budget(state, accounts, config, tokens)
            if deferred is not None:
                self.is_refused = True
                self._permits.figures.add("refusals", label=deferred.code)
                return Append((deferred,)) if self._must_log(state, deferred) else NotStarted()
        if state.calls.deferral is not None and not self._is_batched:
            return Append((ModelCallAdmitted(),))
        return None

    def wake(self) -> None:
        """Allow the next request for the permit: its quota or budget may have room now."""
        self.is_refused = False
        self.is_woken = True

    def take_wake(self) -> bool:
        """Return whether a wake-up arrived before the refusal, which is then outdated. True only once for each."""
        is_overtaken = self.is_refused and self.is_woken
        if is_overtaken:
            self.is_refused = self.is_woken = False
        return is_overtaken

    def hold(self, model: str) -> AbstractAsyncContextManager[HeldPermit]:
        """Hold the permit during one call; see `QuotaPermit.hold`."""
        return contextlib.nullcontext(HeldPermit()) if self._is_elsewhere else self._quota.hold(model)

    async def count_prompt(
        self, config: LLMConfig, count: Callable[[QuotaKey | None], Awaitable[int | None]]
    ) -> int | None:
        """Count a prompt under the quota of its model. Return None if the quota has no room now.

        Args:
            count: asks the provider, with another key or address than those of the model's settings, if not None.
        """
        pool = self._permits.governor.find_pool(config.model, self.tenant)
        if pool is None:
            return await count(None)
        if self._quota.is_granted or self._quota.is_queued:
            return None
        return await self._quota.count_prompt(pool, config.model, count)

    def ratio(self, state: State, config: LLMConfig, request: ModelRequest) -> float | None:
        """Return the ratio of exact to estimated prompt size, of this conversation or else of this worker."""
        latest = find_latest_call(state.usage.latest, request.service, config.model)
        return self._permits.ratio(config.model) if latest is None or latest.ratio is None else latest.ratio

    def find_pool(self, config: LLMConfig) -> QuotaPool | None:
        """Return the keys of the model's quota, or its replicas; None without a quota."""
        return self._permits.governor.find_pool(config.model, self.tenant)

    async def try_alternative(self, config: LLMConfig, request: ModelRequest) -> bool:
        """Exchange the permit for a permit of a fallback, without waiting.

        Return whether the fallback may be called.
        """
        await self._quota.give_back_unused()
        pool = self._permits.governor.find_pool(config.model, self.tenant)
        if pool is None:
            return True
        estimate = estimate_prompt_tokens(request, self._permits.tokens)
        tokens = correct_estimate(estimate, self._permits.ratio(config.model) or 1.0)
        return await self._quota.try_acquire(pool, config.model, tokens)

    async def charge(self, state: State, result: Completion | ModelCallFailed | None) -> None:
        """Charge the costs in the log after the call's outcome was appended, and give back an unused permit.

        Args:
            result: the outcome in the log; None if a reply may have been produced and lost.
        """
        is_lost = result is None or (isinstance(result, ModelCallFailed) and result.code in POSSIBLY_BILLED)
        await self._quota.give_back_unused()
        await self._budget.settle(state, is_lost=is_lost)
        if self._is_batched:
            await self._permits.batches.drop(self._cid)  # last, because a closed batch counts as charged

    async def charge_unsettled(self, state: State) -> None:
        """Charge replies that a previous owner appended but may not have charged."""
        accounts = list_accounts_above(state)
        self._permits.keeps_budgets = self._permits.keeps_budgets or bool(accounts)
        if accounts and state.usage.iteration:
            await self._budget.charge(state, accounts)

    async def withdraw(self, state: State, *, is_over: bool = False) -> None:
        """Cancel the wait and give back the permit, because the conversation no longer needs the call.

        Args:
            is_over: the reply of a batched call is no longer needed.
        """
        await self._quota.leave_queue()
        await self._budget.leave_queue()
        self.is_refused = False
        await self._quota.give_back_unused()
        if state.lifecycle.agent_state in TERMINAL_STATES:
            await self._quota.leave_home()
        if self._permits.may_batch:
            await self._leave_batch(state, is_over=is_over or state.lifecycle.agent_state in TERMINAL_STATES)
        else:
            await self._budget.settle(state)

    def abandon(self, state: State) -> None:
        """Give back the permit of a cancelled call. Its reply is lost but may have been billed."""
        if self._is_batched:
            return  # the batch is sent anyway, and the conversation's next owner takes the reply
        quota = self._quota
        budget = self._budget
        if quota.is_granted or budget.is_held:
            # Detach both now, so that the conversation's next action does not give them back as unused.
            self._quota = QuotaPermit(self._permits, self._ownership)
            self._budget = BudgetReservation(self._permits, self._ownership)
            self._permits.release_later(_settle_lost_call(quota, budget, state))

    async def is_in_batch(self, call: CallModel) -> bool:
        """Return whether a call is in a batch that has no result for it yet."""
        stands = (await self._permits.batches.load_call(self._cid, name_step(call))).status
        return stands in (BatchCallStatus.WAITING, BatchCallStatus.SENT)

    def make_batched_call(
        self, state: State, call: CallModel, spec: LLMSpec, config: LLMConfig | None, request: ModelRequest
    ) -> BatchedCall | None:
        """Return the call as a batched call; None if it is not batched."""
        if config is None or self._is_elsewhere or not is_batched(config, request, find_priority(state)):
            return None
        return BatchedCall(self._permits.batches, self._cid, call, spec=spec, config=config, seen_id=state.version)

    async def _reserve_budget(
        self, state: State, accounts: list[str], config: LLMConfig, tokens: int
    ) -> ModelCallDeferred | None:
        worst_usd = estimate_max_cost_usd(config, tokens, is_batched=self._is_batched)
        deferred = await self._budget.reserve(state, accounts, worst_usd, is_batched=self._is_batched)
        if deferred is not None:
            await self._quota.give_back_unused()
        return deferred

    def _must_log(self, state: State, deferred: ModelCallDeferred) -> bool:
        """Return whether the log must record a wait: it is long and not recorded yet."""
        if state.calls.deferral is not None and state.calls.deferral.reason == deferred.code:
            return False
        quiet_until = self._permits.clock.now() + timedelta(seconds=QUIET_SECONDS)
        return deferred.expected_at is None or deferred.expected_at > quiet_until

    async def _leave_batch(self, state: State, *, is_over: bool) -> None:
        """Drop a batched call if the conversation is over. A paused conversation still needs the reply."""
        stood = await self._permits.batches.drop(self._cid) if is_over else BatchCallStatus.NONE
        accounts = list_accounts_above(state)
        if accounts and (stood is not BatchCallStatus.NONE or (self._budget.is_held and not self._is_batched)):
            self._budget.is_held = False
            await self._budget.charge(state, accounts, is_lost=stood in (BatchCallStatus.SENT, BatchCallStatus.DONE))


async def _settle_lost_call(quota: QuotaPermit, budget: BudgetReservation, state: State) -> None:
    await quota.give_back_unused()
    await budget.settle(state, is_lost=True)


def hash_first_prompt(request: ModelRequest) -> str:
    """Return the same text for requests that begin with the same messages, such as those of a group of rollouts."""
    found = hashlib.blake2b(digest_size=12)
    for message in request.messages[:PREFIX_MESSAGES]:
        found.update(repr(message)[:PREFIX_CHARS].encode(errors="replace"))
    return found.hexdigest()


def find_priority(state: State) -> Priority:
    """Return the conversation's priority: the requested one, else by whether a user is interactive."""
    return priority_for(state.setup.tenancy, is_headless=state.setup.headless)
