"""What a model was asked and what it answered, as the events of a turn.

Holds: a call that failed or was given to a batch is an answer too; nothing is appended here.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.contract.events import Event, ModelCallDeferred, ModelCallFailed
from controller_worker.agents.agent import Agent
from controller_worker.calls.model_call import reply_of
from controller_worker.calls.question import Question
from controller_worker.core.effects import CallModel
from controller_worker.core.state import State
from controller_worker.llm.llm import Completion
from controller_worker.security.assessment import assessed


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
