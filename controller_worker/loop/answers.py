"""Effects that need more than the state: a user's answer, a workspace's survey, the agent's notes.

Holds: only actions that are in a log change the notebook, before the log has their observations. A change that is
repeated after a crash has the same result. Notes are masked before they are stored.
Does not: append the returned events; the loop does.
"""

from __future__ import annotations

from broker.contract import (
    MAX_NOTES,
    NO_SKILLS,
    ChangeAgentStateAction,
    Event,
    MCPQuestionObservation,
    Note,
    NoteAction,
    NotebookKey,
    NoteObservation,
    Observation,
    RiskyAction,
    SystemMessageAction,
    note_id_of,
    render_notes,
)
from broker.coordination import Notebooks
from broker.log import EventLog, MaskedEvents
from broker.runtime import UsageError
from controller_worker.agents import Agent
from controller_worker.core import (
    Append,
    CarryOut,
    Recall,
    State,
    TakeNote,
    apply_answer,
    make_recall,
    parse_survey_skills_in_turns,
    to_answer,
)
from controller_worker.loop.hooks import Hooks

NO_MEMORY = "This conversation keeps no notes."


async def answer_effect(
    log: EventLog, notebooks: Notebooks, hooks: Hooks, state: State, wanted: Recall | CarryOut | TakeNote
) -> Append:
    """Return the events that an answer leads to: the answer of a user, a survey or the notebook.

    Raises:
        CorruptEntry: an entry or a blob is damaged or missing.
    """
    if isinstance(wanted, Recall):
        survey = await read_event(log, state.setup.conversation_id, wanted.survey_id) if wanted.survey_id else None
        skills = await parse_survey_skills_in_turns(survey) if isinstance(survey, Observation) else NO_SKILLS
        notebook = find_notebook(state)
        return make_recall(state, skills, () if notebook is None else await notebooks.read(notebook))
    if isinstance(wanted, TakeNote):
        asked = await read_event(log, state.setup.conversation_id, wanted.action_id)
        masker = await log.load_masker(state.setup.conversation_id)
        (masked,) = (await MaskedEvents.mask([asked], masker)).events  # it may contain a newer secret
        assert isinstance(masked, NoteAction)
        return await carry_out_note(notebooks, state, masked)
    action = await read_event(log, state.setup.conversation_id, wanted.action_id)
    answer = await read_event(log, state.setup.conversation_id, wanted.answer_id)
    assert isinstance(action, RiskyAction)
    assert isinstance(answer, ChangeAgentStateAction | MCPQuestionObservation)
    carried = apply_answer(state, action, answer)
    is_another = (
        isinstance(answer, ChangeAgentStateAction) and bool(answer.edited) and not carried.answers
    )  # the hooks were asked about the unedited action
    return await hooks.review(state, carried.events) if is_another else carried


def make_greeting(agent: Agent, state: State) -> Append:
    """Return the system message of an agent."""
    return Append(
        (
            SystemMessageAction(
                content=agent.system_prompt(state.setup.workspace),
                tools=tuple(tool.name for tool in agent.tools),
                agent_class=state.setup.agent.name,
            ),
        )
    )


async def read_event(log: EventLog, conversation_id: str, event_id: int) -> Event:
    """Return one event with its blobs inlined; raises like `answered`."""
    (event,) = await log.read(conversation_id, after=event_id - 1, until=event_id)
    return await log.blobs.restore_event(conversation_id, event)


def find_notebook(state: State) -> NotebookKey | None:
    """Return the notebook of a conversation, or None."""
    memory = state.setup.agent.memory
    return None if memory is None else NotebookKey.of(memory, tenant=state.setup.tenancy.tenant)


async def carry_out_note(notebooks: Notebooks, state: State, action: NoteAction) -> Append:
    """Carry out an action on the notebook and return its observation. Idempotent.

    Args:
        action: the action, as read from the log.
    """
    notebook = find_notebook(state)
    if notebook is None:
        found = NoteObservation(content=NO_MEMORY)
    else:
        found = await _apply_note(notebooks, notebook, state.setup.conversation_id, action)
    return Append((to_answer(action, found),))


async def _apply_note(
    notebooks: Notebooks, notebook: NotebookKey, conversation_id: str, action: NoteAction
) -> NoteObservation:
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
            if await notebooks.remove(notebook, action.note_id):
                return NoteObservation(content=f"The note {action.note_id} is forgotten.", forgotten=action.note_id)
            return NoteObservation(content=f"There is no note {action.note_id} (any more).", forgotten=action.note_id)
    notes = await notebooks.read(notebook)
    count = f"{len(notes)} of at most {MAX_NOTES} notes:\n" if notes else "There are no notes."
    return NoteObservation(content=count + render_notes(notes))
