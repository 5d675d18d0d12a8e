"""The model call of one conversation in flight: the chain of steps to its start, its task and its answer.

Holds: one call at a time. An answer stays here until the log has it. A cancelled call leaves no answer.
Does not: append; `start` and `events` return the events for the loop to append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from broker.contract import (
    AgentState,
    BlobRef,
    Event,
    ModelCallDeferred,
    ModelCallFailed,
    Ownership,
    SegmentStarted,
)
from broker.runtime import DeckhandsError, OpenSpan, failpoint, make_chain
from controller_worker.agents import Agent
from controller_worker.core import Append, CallModel, State
from controller_worker.loop.services import Services
from controller_worker.model import (
    CallPermit,
    CallTask,
    PendingCall,
    PromptHistory,
    Question,
    Started,
    StartOutcome,
    acquire_permit,
    add_traceparent,
    ask_model,
    call_span,
    check_own_budget,
    count_prompt,
    describe_content,
    describe_result,
    find_own_endpoint,
    make_missing_client,
    make_question,
    note_waiting,
    require_client,
    stream_reply,
    to_call_failure,
    to_model_reply,
    wait_for_batch,
)
from controller_worker.providers import Completion, NoResponseError, estimate_prompt_tokens
from controller_worker.security import assess

WARM_TEMPERATURE = 1.0
"""The temperature after an empty reply, if none is set: the same question would get the same answer (6.3)."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The outcome of one call.

    Attributes:
        estimated_tokens: our estimate for its prompt; None if not needed.
        traceparent: the span of the call; None without tracing.
        recorded: the stored record of the reply's tokens; None if it has none.
    """

    call: CallModel
    question: Question
    result: Completion | ModelCallFailed | ModelCallDeferred
    estimated_tokens: int | None = None
    traceparent: str | None = None
    recorded: BlobRef | None = None

    def to_events(self, state: State, agent: Agent) -> tuple[Event, ...]:
        """Return the events of the answer, with the risk of each action, to append after `state.version`."""
        if isinstance(self.result, ModelCallFailed | ModelCallDeferred):
            return (self.result,)
        reply = to_model_reply(
            self.result,
            iteration=self.call.iteration,
            seen_id=self.question.seen_id,
            event_id=state.version + 1,
            estimated_tokens=self.estimated_tokens,
            recorded=self.recorded,
        )
        events = self.question.events_of(reply, agent, state)
        if self.result.tokens is not None and self.result.tokens.reason:
            events = (*events, SegmentStarted(reply_id=reply.id, reason=self.result.tokens.reason))
        events = assess(events, state.setup.agent.confirmation, state.setup.workspace)
        return add_traceparent(self.traceparent, events)


class CallInFlight:
    """The model call of one conversation, if any.

    Args:
        on_answer: awaited, in the task of the call, when the answer is available.

    Attributes:
        answer: the answer of the latest call, until the log has it.
    """

    def __init__(self, services: Services, ownership: Ownership, on_answer: Callable[[], Awaitable[None]]) -> None:
        self.permit = CallPermit(services.permits, ownership)
        self.answer: ModelAnswer | None = None
        self._services = services
        self._task = CallTask(f"model {ownership.conversation_id}", on_answer)

    @property
    def is_running(self) -> bool:
        """Whether a call is in flight or being prepared."""
        return self._task.is_running

    async def start(
        self,
        wanted: CallModel,
        state: State,
        agent: Agent,
        recollection: PromptHistory,
        *,
        is_watched: bool,
        before_waiting: Callable[[], Awaitable[None]],
        traceparent: str | None = None,
    ) -> StartOutcome:
        """Start the call, unless one is running or its permit is refused.

        Args:
            is_watched: a client follows the reply while the model writes it.
            before_waiting: called before a step waits for anything outside this conversation; idempotent.
            traceparent: the parent span of the call.

        Returns:
            `Append` with events that the log needs before or instead of the call; `Wait` to wait for the next wake-up;
            or `Started`.
        """
        self.permit.is_woken = False
        return await START_CHAIN(
            PendingCall(
                wanted,
                state,
                agent,
                recollection,
                models=self._services.models,
                permits=self._services.permits,
                permit=self.permit,
                task=self._task,
                is_watched=is_watched,
                before_waiting=before_waiting,
                make=self._start_task,
                secrets=self._services.log.secrets,
                traceparent=traceparent,
            )
        )

    def take_news(self) -> bool:
        """Return whether the loop must continue: because of an answer, a finished preparation, or a permit."""
        is_prepared = self._task.take_prepared()
        is_woken = self.permit.take_wake()
        return is_prepared or is_woken or self.answer is not None

    async def make_events(self, answer: ModelAnswer, state: State, agent: Agent) -> Append | None:
        """Return the events of the answer. None: the conversation was stopped meanwhile; the answer is dropped."""
        if state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR):
            self.answer = None
            await self.permit.charge(state, None)
            return None
        return await self._services.hooks.review(state, answer.to_events(state, agent))

    async def end(self, answer: ModelAnswer, state: State) -> None:
        """Settle the call after its answer was appended."""
        self.answer = None
        if isinstance(answer.result, ModelCallDeferred):
            self.permit.is_refused = True
            self.permit.is_woken = False
        else:
            await self.permit.charge(state, answer.result)

    def cancel(self, state: State) -> asyncio.Task[None] | None:
        """Cancel a call whose answer is no longer needed, and return its task, which may take a while to end.

        None if no call was in flight.
        """
        is_running, task = self._task.is_running, self._task.cancel()
        if is_running:
            self.answer = None
            self.permit.abandon(state)
        return task

    async def give_up(self, state: State) -> asyncio.Task[None] | None:
        """Cancel the call and its wait for a permit, because another question replaces it.

        Returns what `cancel` returns.
        """
        task = self.cancel(state)
        await self.permit.withdraw(state, is_over=True)
        return task

    def abandon(self, state: State) -> None:
        """Cancel the call and release its permit or its place in the queue: the conversation has left this worker."""
        self._task.cancel()
        self.permit.abandon(state)

    def _start_task(self, call: PendingCall) -> Started:
        failpoint("controller.model_thinking")

        def keep(answer: ModelAnswer) -> None:
            self.answer = answer

        return self._task.start(partial(self._run, call), keep)

    async def _run(self, call: PendingCall) -> ModelAnswer:
        try:
            services, question = self._services, call.question
            config = services.models.find_settings(question.llm) if services.tracing.is_on else None
            with call_span(services.tracing, call.traceparent, call.wanted, question, config) as span:
                answer = await self._answer(call)
                describe_result(span, answer.result)
                if span.captures_content:
                    await self._describe_content(span, question, answer)
            return answer if span.traceparent is None else replace(answer, traceparent=span.traceparent)
        except Exception as error:  # noqa: BLE001  (the outer edge: without an answer, the conversation would wait for ever)
            conversation_id = call.question.request.conversation_id
            failure = to_call_failure(error, conversation_id, attempt=call.wanted.attempt)
            return ModelAnswer(call.wanted, call.question, failure)

    async def _describe_content(self, span: OpenSpan, question: Question, answer: ModelAnswer) -> None:
        """Record what the model has read and written, if its secrets can be masked."""
        with suppress(DeckhandsError, RecursionError):  # a model chooses how deep its arguments are
            masker = await self._services.log.load_masker(question.request.conversation_id)
            await describe_content(span, masker, question, answer.result)

    async def _answer(self, call: PendingCall) -> ModelAnswer:
        """Make the call once. A failure and a wait for a batch are answers too."""
        services = self._services
        wanted = call.wanted
        state = call.state
        question = call.question
        config = services.models.find_settings(question.llm)
        is_empty = state.calls.attempt > 0 and state.lifecycle.error_code == NoResponseError.code
        if is_empty and config is not None and not config.temperature:
            question = replace(question, request=replace(question.request, temperature=WARM_TEMPERATURE))
        batched = self.permit.make_batched_call(state, wanted, question.llm, config, question.request)
        if batched is not None:
            question = replace(question, request=replace(question.request, carry=batched.carry))
        async with stream_reply(
            services.store, services.log, question.request, attempt=wanted.attempt, is_watched=call.is_watched
        ) as request:
            result = await ask_model(
                services.models,
                question.llm,
                request,
                attempt=wanted.attempt,
                clock=services.store.clock,
                permit=self.permit,
                endpoint=call.endpoint,
                admit=partial(services.hooks.admit, state, request.service),
            )
        if batched is not None:
            question = replace(question, seen_id=batched.seen_id)
        recorded = None
        if isinstance(result, Completion) and result.tokens is not None:
            content = await asyncio.to_thread(result.tokens.to_bytes)
            recorded = await services.log.blobs.add(request.conversation_id, content)
        return ModelAnswer(wanted, question, result, self._estimate(call, question, result), recorded=recorded)

    def _estimate(
        self, call: PendingCall, question: Question, result: Completion | ModelCallFailed | ModelCallDeferred
    ) -> int | None:
        """Return the estimated tokens of the prompt, and correct later estimates with the actual count.

        The count of a conversation's own endpoint may be false, and corrects those of this conversation alone.
        """
        if not isinstance(result, Completion):
            return None
        if call.state.usage.max_budget_usd is None and not self.permit.counts_tokens:
            return None
        permits = self._services.permits
        estimated = estimate_prompt_tokens(question.request, permits.tokens)
        if call.endpoint is None:
            permits.learn_prompt(result.asked, estimated_tokens=estimated, prompt_tokens=result.usage.prompt_tokens)
        return estimated


async def _start_call(call: PendingCall) -> StartOutcome:
    return call.make(call)


START_CHAIN = make_chain(
    [
        # First: a call in a batch needs no question.
        wait_for_batch,
        # Around the question: a router needs a client to choose a model, and that client may be missing.
        make_missing_client,
        # Before all steps that depend on the model and on the size of the prompt.
        make_question,
        # Before the permit: a call elsewhere uses no quota.
        find_own_endpoint,
        # Before the budget: its estimate is based on the size of the prompt.
        count_prompt,
        # Before the permit: a call that the budget refuses takes no place in the queue of a quota.
        check_own_budget,
        # Before the steps with external waits: from here on, a death of this worker does not count against the
        # conversation.
        note_waiting,
        # Before the permit, which must not wait for a client: the quota counts it as used at once.
        require_client,
        # Last: a call with a permit starts.
        acquire_permit,
    ],
    last=_start_call,
)
"""The steps to the start of a call. A step ends it with `Append`, `Wait` or `Started`, or passes the call on."""
