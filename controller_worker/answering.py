"""A person's answer to the question about an action, read from the log."""

from __future__ import annotations

from broker.actions import ChangeAgentStateAction, RiskyAction
from broker.event_log import EventLog
from broker.events import Event
from controller_worker.confirmation import carried_out
from controller_worker.effects import Append, CarryOut
from controller_worker.state import State


async def answered(log: EventLog, state: State, wanted: CarryOut) -> Append:
    """Return what a person's answer leads to.

    Raises:
        CorruptEntry: an entry, or a text kept beside the log, is damaged or missing.
    """
    action = await event_of(log, state.conversation_id, wanted.action_id)
    answer = await event_of(log, state.conversation_id, wanted.answer_id)
    assert isinstance(action, RiskyAction)
    assert isinstance(answer, ChangeAgentStateAction)
    return carried_out(state, action, answer)


async def event_of(log: EventLog, conversation_id: str, event_id: int) -> Event:
    """Return one event with the whole of its long texts; raises what `answered` does."""
    (event,) = await log.read(conversation_id, after=event_id - 1, until=event_id)
    return await log.blobs.whole(conversation_id, event)
