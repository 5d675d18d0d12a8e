"""What an effect needs of earlier events, read from the log: a person's answer, and what a workspace said."""

from __future__ import annotations

from broker.actions import ChangeAgentStateAction, RiskyAction
from broker.event_log import EventLog
from broker.events import Event, Observation
from controller_worker.confirmation import carried_out
from controller_worker.effects import Append, CarryOut, Recall
from controller_worker.memory.survey import skills_from
from controller_worker.recalling import recalled
from controller_worker.state import State


async def answered(log: EventLog, state: State, wanted: Recall | CarryOut) -> Append:
    """Return what the answer of a person, or of a workspace that was surveyed, leads to.

    Raises:
        CorruptEntry: an entry, or a text kept beside the log, is damaged or missing.
    """
    if isinstance(wanted, Recall):
        survey = await event_of(log, state.conversation_id, wanted.survey_id)
        assert isinstance(survey, Observation)
        return recalled(state, skills_from(survey))
    action = await event_of(log, state.conversation_id, wanted.action_id)
    answer = await event_of(log, state.conversation_id, wanted.answer_id)
    assert isinstance(action, RiskyAction)
    assert isinstance(answer, ChangeAgentStateAction)
    return carried_out(state, action, answer)


async def event_of(log: EventLog, conversation_id: str, event_id: int) -> Event:
    """Return one event with the whole of its long texts; raises what `answered` does."""
    (event,) = await log.read(conversation_id, after=event_id - 1, until=event_id)
    return await log.blobs.whole(conversation_id, event)
