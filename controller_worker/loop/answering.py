"""Effects that need more than the state: a user's answer, a workspace's survey, the agent's notes.

Holds: a note is in its notebook before the log says so.
Does not: append the returned events; the loop does.
"""

from __future__ import annotations

from broker.contract import (
    NO_SKILLS,
    ChangeAgentStateAction,
    Event,
    NoteAction,
    Observation,
    RiskyAction,
    SystemMessageAction,
)
from broker.coordination import Notebooks
from broker.log import EventLog, Masked
from controller_worker.agents import Agent
from controller_worker.core import Append, CarryOut, Recall, State, TakeNote, carried_out, recalled, skills_read
from controller_worker.loop.hooks import Hooks
from controller_worker.loop.note_taking import notebook_of, noted


async def answered(
    log: EventLog, notebooks: Notebooks, hooks: Hooks, state: State, wanted: Recall | CarryOut | TakeNote
) -> Append:
    """Return the events that an answer leads to: the answer of a user, a survey or the notebook.

    Raises:
        CorruptEntry: an entry or a blob is damaged or missing.
    """
    if isinstance(wanted, Recall):
        survey = await event_of(log, state.setup.conversation_id, wanted.survey_id) if wanted.survey_id else None
        skills = await skills_read(survey) if isinstance(survey, Observation) else NO_SKILLS
        notebook = notebook_of(state)
        return recalled(state, skills, () if notebook is None else await notebooks.notes(notebook))
    if isinstance(wanted, TakeNote):
        asked = await event_of(log, state.setup.conversation_id, wanted.action_id)
        masker = await log.masker(state.setup.conversation_id)
        (masked,) = (await Masked.of([asked], masker)).events  # it may contain a newer secret
        assert isinstance(masked, NoteAction)
        return await noted(notebooks, state, masked)
    action = await event_of(log, state.setup.conversation_id, wanted.action_id)
    answer = await event_of(log, state.setup.conversation_id, wanted.answer_id)
    assert isinstance(action, RiskyAction)
    assert isinstance(answer, ChangeAgentStateAction)
    carried = carried_out(state, action, answer)
    is_another = bool(answer.edited) and not carried.answers  # the hooks were asked about the unedited action
    return await hooks.reviewed(state, carried.events) if is_another else carried


def greeting(agent: Agent, state: State) -> Append:
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


async def event_of(log: EventLog, conversation_id: str, event_id: int) -> Event:
    """Return one event with its blobs inlined; raises like `answered`."""
    (event,) = await log.read(conversation_id, after=event_id - 1, until=event_id)
    return await log.blobs.whole(conversation_id, event)
