"""What a model was asked and what it answered, from the call to the events of a turn.

Holds: a call that failed or was given to a batch is an answer too; nothing is appended here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from broker.contract.events import Event, ModelCallDeferred, ModelCallFailed
from controller_worker.agents.agent import Agent
from controller_worker.calls.call_gate import CallGate
from controller_worker.calls.model_call import ask, reply_of
from controller_worker.calls.question import Question
from controller_worker.calls.streaming import shown
from controller_worker.core.effects import CallModel
from controller_worker.core.state import State
from controller_worker.llm.errors import NoResponseError
from controller_worker.llm.llm import Completion
from controller_worker.security.assessment import assessed
from controller_worker.services import Services

WARM = 1.0
"""The temperature after an empty reply, where none is set: the same question would be answered the same (6.3)."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What one call brought."""

    call: CallModel
    question: Question
    result: Completion | ModelCallFailed | ModelCallDeferred

    def events(self, state: State, agent: Agent) -> tuple[Event, ...]:
        """Return what it leads to, with the risk of each action; to be appended behind `state.version`."""
        if isinstance(self.result, ModelCallFailed | ModelCallDeferred):
            return (self.result,)
        reply = reply_of(
            self.result, iteration=self.call.iteration, seen_id=self.question.seen_id, event_id=state.version + 1
        )
        events = self.question.events_of(reply, agent, state)
        return assessed(events, state.setup.agent.confirmation, state.setup.workspace)


async def asked(
    services: Services, gate: CallGate, state: State, call: CallModel, question: Question, *, is_watched: bool
) -> ModelAnswer:
    """Make one call; a failure is an answer too, and so is a wait for a batch.

    Args:
        is_watched: somebody looks on while the model writes.
    """
    config = services.models.settings(question.llm)
    if (
        state.calls.attempt
        and state.lifecycle.error_code == NoResponseError.code
        and config is not None
        and not config.temperature
    ):
        question = replace(question, request=replace(question.request, temperature=WARM))
    batched = gate.batched_call(state, call, question.llm, config, question.request)
    if batched is not None:
        question = replace(question, request=replace(question.request, carry=batched.carry))
    async with shown(
        services.store, services.log, question.request, attempt=call.attempt, is_watched=is_watched
    ) as request:
        result = await ask(
            services.models,
            question.llm,
            request,
            attempt=call.attempt,
            clock=services.store.clock,
            gate=gate,
            admit=partial(services.hooks.admit, state, request.service),
        )
    if batched is not None:
        question = replace(question, seen_id=batched.seen_id)
    return ModelAnswer(call, question, result)
