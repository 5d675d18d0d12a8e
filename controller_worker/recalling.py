"""The recall of a message, as events (OpenHands 1.6): the question, the start of the work, and what was found.

Holds: pure; a recall is answered in the append that asks it, so nobody waits for one (B15).
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.actions import RecallAction, RecallType
from broker.agent_state import AgentState
from broker.events import Event
from broker.notes import Note, recalled_notes
from broker.observations import AgentStateChangedObservation, NullObservation
from broker.specs import Skill
from controller_worker.confirmation import answered_otherwise
from controller_worker.effects import Append
from controller_worker.memory.recall import recall
from controller_worker.state import State, UnansweredMessage


def recalled(state: State, skills: Sequence[Skill] = (), notes: Sequence[Note] = ()) -> Append:
    """Return the recall of the latest message, and what settles the actions that it answers instead of a person.

    Args:
        skills: of the workspace.
        notes: all of the notebook.
    """
    assert state.message is not None
    found = recalled_notes(notes, state.message.content, is_first=state.message.is_first)
    events = _recall_events(state, state.message, skills, found)
    rejected = answered_otherwise(state, first_position=len(events))
    return Append((*events, *rejected.events), rejected.answers)


def _recall_events(
    state: State, message: UnansweredMessage, skills: Sequence[Skill], notes: Sequence[Note]
) -> tuple[Event, ...]:
    """The recall of a message, the start of the work, and what the recall found (OpenHands 1.6)."""
    recall_type = RecallType.WORKSPACE_CONTEXT if message.is_first else RecallType.KNOWLEDGE
    events: list[Event] = [RecallAction(recall_type=recall_type, query=message.content)]
    recall_id = state.version + 1
    if state.requested is AgentState.RUNNING:
        events.append(AgentStateChangedObservation(agent_state=AgentState.RUNNING))
    found = recall(state, message, recall_type, skills, notes) or NullObservation()
    events.append(found.model_copy(update={"cause": recall_id}))
    return tuple(events)
