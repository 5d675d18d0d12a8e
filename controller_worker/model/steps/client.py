"""Creates the client of a model in the background, because that may take seconds."""

from __future__ import annotations

from functools import partial

from broker.contract import LLMSpec, ModelCallFailed
from controller_worker.core import Append
from controller_worker.model.model_call import failed_by
from controller_worker.model.models import ClientMissing
from controller_worker.model.permits.batched_call import step_of
from controller_worker.model.steps.call_task import Started
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome


async def make_missing_client(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the client that a router needs to choose a model. If that fails, append the failure."""
    failure = call.task.failure
    call.task.failure = None
    if failure is not None and failure[0] == step_of(call.wanted):
        return Append((failure[1],))
    try:
        return await rest(call)
    except ClientMissing as missing:
        await call.before_waiting()
        return _start_making(call, missing.spec)


async def require_client(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the client of the requested model, if it does not exist yet."""
    if not call.models.is_ready(call.question.llm):
        return _start_making(call, call.question.llm)
    return await rest(call)


def _start_making(call: PendingCall, spec: LLMSpec) -> Started:
    def keep(failure: ModelCallFailed | None) -> None:
        call.task.failure = None if failure is None else (step_of(call.wanted), failure)

    return call.task.prepare(partial(_make, call, spec), keep)


async def _make(call: PendingCall, spec: LLMSpec) -> ModelCallFailed | None:
    try:
        await call.models.of(spec)
    except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
        return failed_by(error, call.state.setup.conversation_id, attempt=call.wanted.attempt)
    return None
