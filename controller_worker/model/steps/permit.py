"""Waits for the reply of a batch and for the permit of a call."""

from __future__ import annotations

from functools import partial

from controller_worker.model.steps.call_task import Wait
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome


async def wait_for_batch(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Wait while the call is in a batch that has no result for it yet."""
    if call.is_paid and await call.permit.is_in_batch(call.wanted):
        call.permit.is_refused = True
        return Wait()
    return await rest(call)


async def note_waiting(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Note that the conversation is inactive: it waits for a client, a permit or the model."""
    await call.before_waiting()
    return await rest(call)


async def acquire_permit(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Continue the call once its permit is granted."""
    llm = call.question.llm
    refusal = await call.permit.acquire(
        call.state, call.config, call.question.request, partial(call.models.of, llm), counted_ratio=call.counted_ratio
    )
    return await rest(call) if refusal is None else refusal
