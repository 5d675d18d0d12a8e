"""Taking notes: first the action in the log, then the notebook, then the observation with the result.

Holds: the notebook is changed only by actions already in a log, and a change that is repeated after a crash has the
same result. Notes are masked before they are stored.
"""

from __future__ import annotations

from broker.contract import (
    MAX_NOTES,
    EventSource,
    Note,
    NoteAction,
    Notebook,
    NoteObservation,
    Observation,
    listed,
    note_id_of,
)
from broker.coordination import Notebooks
from broker.runtime import UsageError
from controller_worker.core import Append, State

NO_MEMORY = "This conversation keeps no notes."


def notebook_of(state: State) -> Notebook | None:
    """Return the notebook of a conversation, or None."""
    memory = state.setup.agent.memory
    return None if memory is None else Notebook.of(memory, tenant=state.setup.tenancy.tenant)


async def noted(notebooks: Notebooks, state: State, action: NoteAction) -> Append:
    """Carry out an action on the notebook and return its observation. Idempotent.

    Args:
        action: as the log has it.
    """
    notebook = notebook_of(state)
    if notebook is None:
        found = NoteObservation(content=NO_MEMORY)
    else:
        found = await _done(notebooks, notebook, state.setup.conversation_id, action)
    answer: Observation = found.model_copy(
        update={
            "source": EventSource.AGENT,
            "cause": action.id,
            "tool_call_metadata": action.tool_call_metadata,
        }
    )
    return Append((answer,))


async def _done(notebooks: Notebooks, notebook: Notebook, conversation_id: str, action: NoteAction) -> NoteObservation:
    match action.command:
        case "write":
            note = Note(
                id=action.note_id or note_id_of(conversation_id, action.id),
                text=action.text,
                keywords=action.keywords,
                written=action.timestamp,
                conversation_id=conversation_id,
            )
            try:
                await notebooks.write(notebook, note)
            except UsageError as error:
                return NoteObservation(content=f"The note was not written. {error.message} {error.remedy}")
            return NoteObservation(content=f"Noted under the id {note.id}.", written=note)
        case "forget":
            if await notebooks.forget(notebook, action.note_id):
                return NoteObservation(content=f"The note {action.note_id} is forgotten.", forgotten=action.note_id)
            return NoteObservation(content=f"There is no note {action.note_id} (any more).", forgotten=action.note_id)
    notes = await notebooks.notes(notebook)
    count = f"{len(notes)} of at most {MAX_NOTES} notes:\n" if notes else "There are no notes."
    return NoteObservation(content=count + listed(notes))
