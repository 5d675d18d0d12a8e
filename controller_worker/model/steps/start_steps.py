"""The short steps before a model call: question, client, batch and permit.

A client is created in the background, because that may take seconds.
"""

from __future__ import annotations

from functools import partial

from broker.contract import CondensationAction, LLMSpec, ModelCallFailed, ModelNotOffered
from broker.secrets import SecretsLocked
from controller_worker.core import Append
from controller_worker.model.model_call import to_call_failure
from controller_worker.model.models import ClientMissing
from controller_worker.model.permits.call_permit import name_step
from controller_worker.model.question import next_question
from controller_worker.model.steps.call_task import NotStarted, Started
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome
from controller_worker.providers import LLMConfigError


async def make_missing_client(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the client that a router needs to choose a model. If that fails, append the failure."""
    failure = call.task.failure
    call.task.failure = None
    if failure is not None and failure[0] == name_step(call.wanted):
        return Append((failure[1],))
    try:
        return await rest(call)
    except ClientMissing as missing:
        await call.before_waiting()
        return _start_creation(call, missing.spec)


async def make_question(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the question from the log and choose its model. A condensation may replace the call."""
    try:
        question = await next_question(call.state, call.agent, call.recollection, call.models)
    except (ModelNotOffered, LLMConfigError) as error:
        failure = to_call_failure(error, call.state.setup.conversation_id, attempt=call.wanted.attempt)
        return Append((failure,))
    if isinstance(question, CondensationAction):
        return Append((question,))
    call.question = question
    call.config = call.models.find_settings(question.llm)
    return await rest(call)


async def find_own_endpoint(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Look up the conversation's own endpoint, for each call of a model whose entry allows one."""
    if call.secrets is not None and call.config is not None and call.config.own_endpoints:
        conversation_id = call.state.setup.conversation_id
        try:
            call.endpoint = await call.secrets.find_endpoint(conversation_id)
        except SecretsLocked as error:
            return Append((to_call_failure(error, conversation_id, attempt=call.wanted.attempt),))
    return await rest(call)


async def wait_for_batch(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Wait while the call is in a batch that has no result for it yet."""
    if call.is_paid and await call.permit.is_in_batch(call.wanted):
        call.permit.is_refused = True
        return NotStarted()
    return await rest(call)


async def note_waiting(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Record that the conversation is inactive, because it waits for a client, a permit or the model."""
    await call.before_waiting()
    return await rest(call)


async def require_client(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the client of the requested model, if it does not exist yet."""
    if not call.models.is_ready(call.question.llm):
        return _start_creation(call, call.question.llm)
    return await rest(call)


async def acquire_permit(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Continue the call once its permit is granted."""
    llm = call.question.llm
    refusal = await call.permit.acquire(
        call.state,
        call.config,
        call.question.request,
        partial(call.models.get_client, llm),
        counted_ratio=call.counted_ratio,
        is_elsewhere=call.endpoint is not None,
    )
    return await rest(call) if refusal is None else refusal


def _start_creation(call: PendingCall, spec: LLMSpec) -> Started:
    def keep(failure: ModelCallFailed | None) -> None:
        call.task.failure = None if failure is None else (name_step(call.wanted), failure)

    return call.task.prepare(partial(_create, call, spec), keep)


async def _create(call: PendingCall, spec: LLMSpec) -> ModelCallFailed | None:
    try:
        await call.models.get_client(spec)
    except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
        return to_call_failure(error, call.state.setup.conversation_id, attempt=call.wanted.attempt)
    return None
