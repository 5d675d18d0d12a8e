"""Creates the question of a call. A condensation that needs no model call replaces the call."""

from __future__ import annotations

from broker.contract import CondensationAction, ModelNotOffered
from controller_worker.core import Append
from controller_worker.model.model_call import failed_by
from controller_worker.model.question import next_question
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome
from controller_worker.providers import LLMConfigError


async def make_question(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Create the question from the log and choose its model."""
    try:
        question = await next_question(call.state, call.agent, call.recollection, call.models)
    except (ModelNotOffered, LLMConfigError) as error:
        failure = failed_by(error, call.state.setup.conversation_id, attempt=call.wanted.attempt)
        return Append((failure,))
    if isinstance(question, CondensationAction):
        return Append((question,))
    call.question = question
    call.config = call.models.settings(question.llm)
    return await rest(call)
