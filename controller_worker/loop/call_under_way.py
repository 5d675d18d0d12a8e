"""The model call of one conversation while it is under way: its permit, its task and its answer.

Holds: one call at a time; an answer waits here until the log has it; a call that was cancelled leaves no answer.
Does not: append anything; `begin` and `events` return what the loop appends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from broker.contract.actions import CondensationAction
from broker.contract.agent_state import AgentState
from broker.contract.events import Event, LLMSpec, ModelCallDeferred, ModelCallFailed
from broker.contract.fencing import Ownership
from broker.contract.offered_models import ModelNotOffered
from broker.runtime.failpoints import failpoint
from controller_worker.agents.agent import Agent
from controller_worker.core.concerns.model_calls import BATCH
from controller_worker.core.effects import Append, CallModel
from controller_worker.core.state import State
from controller_worker.loop.services import Services
from controller_worker.model.model_call import ask, failed_by, reply_of
from controller_worker.model.models import ClientMissing
from controller_worker.model.permits.batched_call import step_of
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.model.permits.own_budget import estimate_usd, has_room, refused, will_have_room
from controller_worker.model.prompt_count import PromptCount, count, is_worth_counting, overflow
from controller_worker.model.question import Question, next_question
from controller_worker.model.recollection import Recollection
from controller_worker.model.streaming import shown
from controller_worker.model.traced import call_span, describe, led_to_by
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError, NoResponseError
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.request_size import prompt_tokens
from controller_worker.security.assessment import assessed

WARM = 1.0
"""The temperature after an empty reply, where none is set: the same question would be answered the same (6.3)."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What one call brought.

    Attributes:
        estimated_tokens: of its prompt; None where nobody counts them.
        traceparent: the span of the call; None: nobody traces.
    """

    call: CallModel
    question: Question
    result: Completion | ModelCallFailed | ModelCallDeferred
    estimated_tokens: int | None = None
    traceparent: str | None = None

    def events(self, state: State, agent: Agent) -> tuple[Event, ...]:
        """Return what it leads to, with the risk of each action; to be appended behind `state.version`."""
        if isinstance(self.result, ModelCallFailed | ModelCallDeferred):
            return (self.result,)
        reply = reply_of(
            self.result,
            iteration=self.call.iteration,
            seen_id=self.question.seen_id,
            event_id=state.version + 1,
            estimated_tokens=self.estimated_tokens,
        )
        events = self.question.events_of(reply, agent, state)
        events = assessed(events, state.setup.agent.confirmation, state.setup.workspace)
        return led_to_by(self.traceparent, events)


class CallUnderWay:
    """The model call of one conversation, or none.

    Args:
        on_answer: called when the answer is there.

    Attributes:
        answer: what the latest call brought, until the log has it.
    """

    def __init__(self, services: Services, ownership: Ownership, on_answer: Callable[[], None]) -> None:
        self.permit = CallPermit(services.permits, ownership)
        self._cid = ownership.conversation_id
        self.answer: ModelAnswer | None = None
        self._services = services
        self._name = f"model {ownership.conversation_id}"
        self._on_answer = on_answer
        self._task: asyncio.Task[None] | None = None
        self._counted = PromptCount()
        self._is_counted = False
        self._unmade: tuple[str, ModelCallFailed] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a model is being asked."""
        return self._task is not None

    async def begin(
        self,
        wanted: CallModel,
        state: State,
        agent: Agent,
        recollection: Recollection,
        *,
        is_watched: bool,
        before_waiting: Callable[[], Awaitable[None]],
        traceparent: str | None = None,
    ) -> Append | None:
        """Begin the call, or return what has to be appended before it. None: there is only to wait.

        Args:
            is_watched: a client follows the reply while the model writes it.
            before_waiting: called once the question is made: what follows waits for others.
            traceparent: the span that the call belongs to.
        """
        if self._task is not None or self.permit.is_refused:
            return None
        self.permit.is_woken = False
        if await self.permit.check_batch(state, wanted):
            self.permit.is_refused = True
            return None
        models = self._services.models
        if self._unmade is not None:
            (step, failure), self._unmade = self._unmade, None
            if step == step_of(wanted):
                return Append((failure,))
        try:
            question = await next_question(state, agent, recollection, models)
        except (ModelNotOffered, LLMConfigError) as error:
            return Append((failed_by(error, self._cid, attempt=wanted.attempt),))
        except ClientMissing as missing:
            await before_waiting()
            self._task = asyncio.create_task(self._make(wanted, missing.spec), name=self._name)
            return None
        if isinstance(question, CondensationAction):
            return Append((question,))
        llm, request, config = question.llm, question.request, models.settings(question.llm)
        is_paid = state.calls.deferral is not None and state.calls.deferral.reason == BATCH
        if config is not None and not is_paid:
            if self._wants_count(wanted, state, config, request):
                await before_waiting()
                self._task = asyncio.create_task(self._count(wanted, question), name=self._name)
                return None
            too_large = overflow(self._count_of(wanted), config, request, attempt=wanted.attempt)
            if too_large is not None:
                return Append((too_large,))
        ratio = self._count_of(wanted).ratio
        if state.usage.max_budget_usd is not None and not is_paid:
            cost_usd = estimate_usd(state, config, request, self._services.permits.tokens, counted_ratio=ratio)
            if not will_have_room(state, cost_usd):
                return Append((refused(state, cost_usd),))
            if not has_room(state, cost_usd):
                return None  # until a delegate has ended, and what it has not spent is free
        await before_waiting()  # for a permit, the model
        if not models.is_ready(llm):
            self._task = asyncio.create_task(self._make(wanted, llm), name=self._name)
            return None
        notice = await self.permit.acquire(state, config, request, lambda: models.of(llm), counted_ratio=ratio)
        if notice is not None:
            return Append((notice,))
        if not self.permit.is_refused:
            failpoint("controller.model_thinking")
            asking = self._run(wanted, state, question, is_watched, traceparent)
            self._task = asyncio.create_task(asking, name=self._name)
        return None

    def take_news(self) -> bool:
        """Return whether the loop has to look again: for an answer, a count, a client, or a permit after all."""
        is_counted, self._is_counted = self._is_counted, False
        is_woken = self.permit.take_wake()
        return is_counted or is_woken or self.answer is not None

    async def events(self, answer: ModelAnswer, state: State, agent: Agent) -> Append | None:
        """Return what the answer leads to. None: the conversation was stopped meanwhile, and the answer is dropped."""
        if state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR):
            self.answer = None
            await self.permit.charge(state, None)
            return None
        return await self._services.hooks.reviewed(state, answer.events(state, agent))

    async def end(self, answer: ModelAnswer, state: State) -> None:
        """Settle the call, now that the log has its answer."""
        self.answer = None
        if isinstance(answer.result, ModelCallDeferred):
            self.permit.is_refused, self.permit.is_woken = True, False
        else:
            await self.permit.charge(state, answer.result)

    def cancel(self, state: State) -> None:
        """End a call whose answer is no longer wanted."""
        if self._task is not None:
            self._task.cancel()
            self._task = self.answer = None
            self.permit.abandon(state)

    async def give_up(self, state: State) -> None:
        """End a call whose answer is no longer wanted, and the wait for one: another question takes its place."""
        self.cancel(state)
        await self.permit.withdraw(state, is_over=True)

    def abandon(self, state: State) -> None:
        """End the call, and give back what it has or would have had: the conversation is gone."""
        if self._task is not None:
            self._task.cancel()
        self.permit.abandon(state)

    def _count_of(self, wanted: CallModel) -> PromptCount:
        """Return what counting the prompt of a step has brought; nothing if it was not counted."""
        return self._counted if self._counted.step == step_of(wanted) else PromptCount()

    def _wants_count(self, wanted: CallModel, state: State, config: LLMConfig, request: ModelRequest) -> bool:
        is_new = self._counted.step != step_of(wanted)
        return is_new and is_worth_counting(state, config, request, self.permit, self._services.permits)

    async def _count(self, wanted: CallModel, question: Question) -> None:
        """Count the prompt, then let the loop want the call again."""
        services = self._services
        counted = await count(
            step_of(wanted),
            services.models,
            question.llm,
            question.request,
            permit=self.permit,
            permits=services.permits,
        )
        if self._task is not asyncio.current_task():
            return
        self._task, self._counted, self._is_counted = None, counted, True
        self._on_answer()

    async def _make(self, wanted: CallModel, spec: LLMSpec) -> None:
        """Make the client of a model, beside the loop that a person may stop, then let it want the call again."""
        failure: ModelCallFailed | None = None
        try:
            await self._services.models.of(spec)
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
            failure = failed_by(error, self._cid, attempt=wanted.attempt)
        if self._task is not asyncio.current_task():
            return
        self._task, self._is_counted = None, True
        self._unmade = (step_of(wanted), failure) if failure is not None else None
        self._on_answer()

    async def _run(
        self, wanted: CallModel, state: State, question: Question, is_watched: bool, traceparent: str | None
    ) -> None:
        try:
            with call_span(self._services.tracing, traceparent, wanted, question) as span:
                answer = await self._answer(wanted, state, question, is_watched)
                describe(span, answer.result)
            answer = replace(answer, traceparent=span.traceparent)
        except Exception as error:  # noqa: BLE001  (the outer edge: without an answer, the conversation would wait for ever)
            answer = ModelAnswer(
                wanted, question, failed_by(error, question.request.conversation_id, attempt=wanted.attempt)
            )
        if self._task is not asyncio.current_task():
            return  # cancelled too late to notice; the answer is no longer wanted
        self._task, self.answer = None, answer
        self._on_answer()

    async def _answer(self, wanted: CallModel, state: State, question: Question, is_watched: bool) -> ModelAnswer:
        """Ask once; a failure is an answer too, and so is a wait for a batch."""
        services = self._services
        config = services.models.settings(question.llm)
        is_empty = state.calls.attempt > 0 and state.lifecycle.error_code == NoResponseError.code
        if is_empty and config is not None and not config.temperature:
            question = replace(question, request=replace(question.request, temperature=WARM))
        batched = self.permit.batched_call(state, wanted, question.llm, config, question.request)
        if batched is not None:
            question = replace(question, request=replace(question.request, carry=batched.carry))
        async with shown(
            services.store, services.log, question.request, attempt=wanted.attempt, is_watched=is_watched
        ) as request:
            result = await ask(
                services.models,
                question.llm,
                request,
                attempt=wanted.attempt,
                clock=services.store.clock,
                permit=self.permit,
                admit=partial(services.hooks.admit, state, request.service),
            )
        if batched is not None:
            question = replace(question, seen_id=batched.seen_id)
        return ModelAnswer(wanted, question, result, self._estimate(state, question, result))

    def _estimate(
        self, state: State, question: Question, result: Completion | ModelCallFailed | ModelCallDeferred
    ) -> int | None:
        """Return what was estimated of the prompt, and let later estimates learn from what it was."""
        if not isinstance(result, Completion):
            return None
        if state.usage.max_budget_usd is None and not self.permit.counts_tokens:
            return None
        permits = self._services.permits
        estimated = prompt_tokens(question.request, permits.tokens)
        permits.learn_prompt(result.asked, estimated_tokens=estimated, prompt_tokens=result.usage.prompt_tokens)
        return estimated
