"""The gate before every model call: the quota of its model, the budget of whoever pays, and the settling after it.

Holds: a call without a quota and without a budget costs nothing here; what was reserved is given back whatever becomes
of the call; the budget is charged only with what is in the log; a short wait leaves no trace in the log.
Does not: decide what a wait means for the conversation; see `gate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from broker.contract.agent_state import TERMINAL_STATES
from broker.contract.events import LLMSpec, ModelCallAdmitted, ModelCallDeferred, ModelCallFailed
from broker.limits.batches import Batches, CallStands
from broker.limits.governor import CallOutcome, Governor, Granted, InQueue, Priority
from broker.limits.ledger import Ledger, accounts_of
from broker.limits.quotas import OWN_KEY, Pool, QuotaTable
from broker.log.fencing import Ownership
from broker.runtime.errors import StoreRefused
from broker.store.store import Store
from controller_worker.calls.batched_call import BatchedCall, is_batched, step_of
from controller_worker.concerns.model_calls import BATCH, BUDGET, QUOTA
from controller_worker.core.effects import CallModel
from controller_worker.core.state import State
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError, RateLimitError
from controller_worker.llm.llm import LLM, Completion, ModelRequest
from controller_worker.llm.request_size import prompt_tokens, worst_cost_usd
from controller_worker.messages.written_messages import MessageMemo

QUIET_SECONDS = 5.0
"""A wait that is expected to be shorter leaves no trace in the log and keeps the conversation in memory."""
SWEEP_SECONDS = 1.0
FIRST_GUESS_TOKENS = 500
MAYBE_BILLED = frozenset({"timeout", "malformed_reply", "no_response", "unexpected"})
"""Codes of failed calls that a provider may bill all the same."""

_log = logging.getLogger(__name__)


class Gates:
    """What the gates of a worker's conversations share."""

    def __init__(self, store: Store, table: QuotaTable, *, may_batch: bool = False) -> None:
        self.governor = Governor(store, table)
        self.ledger = Ledger(store)
        self.batches = Batches(store)
        self.may_batch = may_batch
        self.clock = store.clock
        self.keeps_budgets = False
        self.tokens: MessageMemo[int] = MessageMemo()
        self._typical_output: dict[str, float] = {}
        self._unfinished: set[asyncio.Task[None]] = set()

    def expected_output(self, model: str) -> int:
        """Return how many tokens a reply of a model has had lately."""
        return round(self._typical_output.get(model, FIRST_GUESS_TOKENS))

    def learn_output(self, model: str, tokens: int) -> None:
        """Take note of a reply's length."""
        before = self._typical_output.get(model, FIRST_GUESS_TOKENS)
        self._typical_output[model] = before + (tokens - before) / 8

    def finish_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something for a conversation that is gone already."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._note_end)

    async def keep_up(self, worker_id: str) -> None:
        """Wake those for whom time or a death makes room; never ends by itself."""
        try:
            await self.governor.publish()
        except StoreRefused as error:
            _log.error("quotas are not in force: %s", error)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.governor.keep_pumping(worker_id))
            group.create_task(self._keep_sweeping())

    async def aclose(self) -> None:
        """Wait for what is unfinished."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                if self.keeps_budgets:
                    await self.ledger.sweep()
            except StoreRefused as error:
                _log.error("budgets are not looked after: %s", error)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("what a call had reserved could not be given back: %s", task.exception())


@dataclass(frozen=True, slots=True)
class Seat:
    """The right to make one call.

    Attributes:
        pool: whose quota it counts against; None for no quota.
        key_env: the environment variable whose key the call must use; None for the usual one.
    """

    pool: Pool | None = None
    key_env: str | None = None


class CallGate:
    """The gate of one conversation.

    Attributes:
        is_shut: it said no, and the conversation has not been woken since.
        seat: what the next call was granted.
    """

    def __init__(self, gates: Gates, ownership: Ownership) -> None:
        self.is_shut = False
        self.seat = Seat()
        self._gates = gates
        self._ownership = ownership
        self._cid = ownership.conversation_id
        self._accounts: list[str] = []
        self._queue: Pool | None = None
        self._priority = Priority.BATCH
        self._tenant = ""
        self._waits_for_budget = False
        self._is_reserved = False
        self._is_batched = False

    async def knock(
        self, state: State, config: LLMConfig | None, request: ModelRequest, prepare: Callable[[], Awaitable[object]]
    ) -> ModelCallDeferred | ModelCallAdmitted | None:
        """Ask for a call. Afterwards `is_shut` says whether to wait for a wake; else the call may be made.

        Idempotent: asked again, it grants the same seat.

        Args:
            config: how the model is asked; None where that cannot be known, and the call will fail by itself.
            prepare: makes the model's client; a seat that waited for it would be used later than the quota thinks.

        Returns:
            What the log is to be told: that a long wait begins, or that it is over.
        """
        self.is_shut, self.seat = False, Seat()
        self._accounts = accounts_above(state)
        self._priority, self._tenant = priority_of(state), state.setup.tenancy.tenant
        self._is_batched = is_batched(config, request, self._priority)
        pool = self._gates.governor.pool_of(config.model) if config is not None and not self._is_batched else None
        if config is not None and (pool is not None or self._accounts):
            with contextlib.suppress(LLMConfigError):
                await prepare()
            tokens = prompt_tokens(request, self._gates.tokens)
            waits = await self._queue_up(pool, config, tokens) or await self._reserve(state, config, tokens)
            if waits is not None:
                self.is_shut = True
                return waits if self._is_news(state, waits) else None
        return ModelCallAdmitted() if state.calls.gate is not None and not self._is_batched else None

    async def is_in_batch(self, state: State, call: CallModel) -> bool:
        """Say whether a call is in a batch that has not brought its reply."""
        if state.calls.gate is None or state.calls.gate.reason != BATCH:
            return False
        stands = (await self._gates.batches.ask(self._cid, step_of(call))).stands
        return stands in (CallStands.WAITING, CallStands.SENT)

    def batched_call(
        self, state: State, call: CallModel, spec: LLMSpec, config: LLMConfig | None, request: ModelRequest
    ) -> BatchedCall | None:
        """Return how a call goes by a batch; None when it does not."""
        if config is None or not is_batched(config, request, priority_of(state)):
            return None
        return BatchedCall(self._gates.batches, self._cid, call, spec=spec, config=config, seen_id=state.version)

    async def _queue_up(self, pool: Pool | None, config: LLMConfig, tokens: int) -> ModelCallDeferred | None:
        if self._queue is not None and self._queue is not pool:  # the conversation goes on with another model
            await self._gates.governor.withdraw(self._queue, self._cid, self._ownership.worker_id)
            self._queue = None
        if pool is None:
            return None
        answer = await self._ask_for_seat(pool, config, tokens)
        if isinstance(answer, Granted):
            self.seat = Seat(pool, None if answer.key == OWN_KEY else answer.key)
            self._queue = None
            return None
        self._queue = pool
        return ModelCallDeferred(
            code=QUOTA,
            content=f"The quota of {pool.model} has no room for the call.",
            expected_at=self._gates.clock.now() + timedelta(seconds=answer.eta_seconds),
        )

    async def _ask_for_seat(self, pool: Pool, config: LLMConfig, tokens: int) -> Granted | InQueue:
        return await self._gates.governor.reserve(
            pool,
            self._cid,
            self._ownership.worker_id,
            input_tokens=tokens,
            output_tokens=self._gates.expected_output(config.model),
            priority=self._priority,
            tenant=self._tenant,
        )

    async def _reserve(self, state: State, config: LLMConfig, tokens: int) -> ModelCallDeferred | None:
        if not self._accounts:
            return None
        self._gates.keeps_budgets = True
        exhausted = await self._gates.ledger.reserve(
            self._ownership,
            self._accounts,
            worst_usd=worst_cost_usd(config, tokens, is_batched=self._is_batched),
            total_usd=own_cost_usd(state),
            is_batched=self._is_batched,
        )
        self._is_reserved = exhausted is None
        self._waits_for_budget = exhausted is not None
        if exhausted is None:
            return None
        await self._vacate()
        return ModelCallDeferred(code=BUDGET, content=f"The budget of {exhausted.account} has no room for the call.")

    def _is_news(self, state: State, waits: ModelCallDeferred) -> bool:
        """Say whether the log is to be told: unless it knows, or the wait is short."""
        if state.calls.gate is not None and state.calls.gate.reason == waits.code:
            return False
        quiet_until = self._gates.clock.now() + timedelta(seconds=QUIET_SECONDS)
        return waits.expected_at is None or waits.expected_at > quiet_until

    def key_count(self, config: LLMConfig) -> int:
        """Return how many keys the quota of a model has; 1 without a quota."""
        pool = self._gates.governor.pool_of(config.model)
        return 1 if pool is None else len(pool.quotas)

    async def has_other_seat(self, config: LLMConfig, request: ModelRequest) -> bool:
        """Ask for a seat for a fallback, which is not waited for; give back what the fallback before it left."""
        await self._vacate()
        pool = self._gates.governor.pool_of(config.model)
        if pool is None:
            return True
        answer = await self._ask_for_seat(pool, config, prompt_tokens(request, self._gates.tokens))
        if isinstance(answer, InQueue):
            await self._gates.governor.withdraw(pool, self._cid, self._ownership.worker_id)
            return False
        self.seat = Seat(pool, None if answer.key == OWN_KEY else answer.key)
        return True

    async def complete(self, llm: LLM, config: LLMConfig, request: ModelRequest) -> Completion:
        """Make the call that was granted and give its seat back, however it ends; raises what `LLM.complete` does."""
        seat, self.seat = self.seat, Seat()
        try:
            completion = await llm.complete(request)
        except asyncio.CancelledError:
            self._gates.finish_later(self._give_back(seat, CallOutcome.FAILED))
            raise
        except RateLimitError as error:
            await self._give_back(seat, CallOutcome.LIMITED, error.retry_after_seconds)
            raise
        except Exception:
            await self._give_back(seat, CallOutcome.FAILED)
            raise
        self._gates.learn_output(config.model, completion.usage.completion_tokens)
        await self._settle(seat, completion)
        return completion

    async def charge(self, state: State, result: Completion | ModelCallFailed | None) -> None:
        """Charge what the log has come to, once what the call brought is in it; give an unused seat back.

        Args:
            result: what is in the log now; None if the call may have brought a reply that is not.
        """
        await self._vacate()
        if self._is_reserved:
            self._is_reserved = False
            is_lost = result is None or (isinstance(result, ModelCallFailed) and result.code in MAYBE_BILLED)
            total_usd = own_cost_usd(state)
            await self._gates.ledger.settle(self._ownership, self._accounts, total_usd=total_usd, is_lost=is_lost)
        if self._is_batched:
            await self._gates.batches.drop(self._cid)  # last: a batch that is closed has been charged

    async def catch_up(self, state: State) -> None:
        """Charge what a former owner has appended and may not have charged."""
        accounts = accounts_above(state)
        self._gates.keeps_budgets = self._gates.keeps_budgets or bool(accounts)
        if accounts and state.usage.iteration:
            await self._gates.ledger.settle(self._ownership, accounts, total_usd=own_cost_usd(state))

    async def withdraw(self, state: State) -> None:
        """Neither wait nor call: the conversation wants something else."""
        if self._queue is not None:
            await self._gates.governor.withdraw(self._queue, self._cid, self._ownership.worker_id)
        if self._waits_for_budget:
            await self._gates.ledger.withdraw(self._cid, self._accounts)
        self._queue, self._waits_for_budget, self.is_shut = None, False, False
        await self._vacate()
        if self._gates.may_batch:
            await self._leave_batch(state)
        elif self._is_reserved:
            self._is_reserved = False
            await self._gates.ledger.settle(self._ownership, self._accounts, total_usd=own_cost_usd(state))

    async def _leave_batch(self, state: State) -> None:
        """Give up a call that is in a batch, if the conversation is over; one that is paused will want its reply."""
        is_over = state.lifecycle.agent_state in TERMINAL_STATES
        stood = await self._gates.batches.drop(self._cid) if is_over else CallStands.NONE
        accounts = accounts_above(state)
        if accounts and (stood is not CallStands.NONE or (self._is_reserved and not self._is_batched)):
            self._is_reserved = False
            is_lost = stood in (CallStands.SENT, CallStands.DONE)
            await self._gates.ledger.settle(self._ownership, accounts, total_usd=own_cost_usd(state), is_lost=is_lost)

    def abandon(self, state: State) -> None:
        """Note that the call under way was cancelled."""
        if self._is_batched:
            return  # the batch goes on; whoever owns the conversation then takes the reply
        if self._is_reserved or self.seat.pool is not None:
            # What it had is taken out at once: whatever the conversation does next must not give it back as unused.
            left = CallGate(self._gates, self._ownership)
            left.seat, left._accounts, left._is_reserved = self.seat, self._accounts, self._is_reserved
            self.seat, self._is_reserved = Seat(), False
            self._gates.finish_later(left.charge(state, None))

    async def _vacate(self) -> None:
        """Give a seat back that no call was made with."""
        seat, self.seat = self.seat, Seat()
        await self._give_back(seat, CallOutcome.UNSENT)

    async def _settle(self, seat: Seat, completion: Completion) -> None:
        if seat.pool is None:
            return
        usage, quota = completion.usage, seat.pool.quota(seat.key_env or OWN_KEY)
        if quota.is_short(completion.quota_left):
            await self._gates.governor.obey(
                seat.pool, quota.key, self._ownership.worker_id, dict(completion.quota_left)
            )
        await self._gates.governor.settle(
            seat.pool,
            self._cid,
            self._ownership.worker_id,
            CallOutcome.OK,
            input_tokens=max(0, usage.prompt_tokens - (0 if quota.cached_input_counts else usage.cache_read_tokens)),
            output_tokens=usage.completion_tokens,
            took_seconds=completion.latency_seconds,
        )

    async def _give_back(self, seat: Seat, outcome: CallOutcome, retry_after_seconds: float | None = None) -> None:
        if seat.pool is not None:
            await self._gates.governor.settle(
                seat.pool, self._cid, self._ownership.worker_id, outcome, retry_after_seconds=retry_after_seconds
            )


def accounts_above(state: State) -> list[str]:
    """Return the accounts that a conversation's calls are charged to; empty for none."""
    tenancy, parent = state.setup.tenancy, state.setup.parent
    return accounts_of(
        state.setup.conversation_id,
        tenant=tenancy.tenant,
        experiment=tenancy.experiment,
        parent_id=parent.conversation_id if parent is not None else None,
    )


def own_cost_usd(state: State) -> float:
    """Return what the replies of the log have cost; delegates, and what a fork began with, are charged elsewhere."""
    if state.version <= state.setup.forked_at:
        return 0.0
    return state.usage.cost_usd - state.delegation.spent_usd - state.usage.inherited_usd


def priority_of(state: State) -> Priority:
    """Return who goes first: as asked for, else by whether a person is there."""
    if state.setup.tenancy.priority is not None:
        return Priority(state.setup.tenancy.priority)
    return Priority.BATCH if state.setup.headless else Priority.INTERACTIVE
