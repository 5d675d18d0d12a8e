"""Notes: the agent's actions on its notebook: write, forget, list."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import NoteAction, Observation
from controller_worker.core.concern import Concern
from controller_worker.core.effects import Effect, TakeNote
from controller_worker.core.pending import PendingAction

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class Notes:
    """The notebook actions without an observation, in the order of the log."""

    pending: tuple[PendingAction, ...] = ()


def _after_action(notes: Notes, action: NoteAction, state: State) -> Notes:
    return Notes((*notes.pending, PendingAction(action.id, action.tool_call_metadata)))


def _after_observation(notes: Notes, observation: Observation, state: State) -> Notes:
    if not notes.pending or not any(asked.id == observation.cause for asked in notes.pending):
        return notes
    return Notes(tuple(asked for asked in notes.pending if asked.id != observation.cause))


def take_note(state: State, now: datetime) -> Effect | None:
    """Carry out the oldest action."""
    return TakeNote(state.notes.pending[0].id) if state.notes.pending else None


NOTES = Concern("notes", {NoteAction: _after_action, Observation: _after_observation})
