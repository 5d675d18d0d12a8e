"""Recall: what is known when a person speaks: the workspace at first, and skills whose words were mentioned (9.7).

Holds: a function of its arguments, so that a replay recalls the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.actions import RecallType
from broker.notes import Note
from broker.observations import MicroagentKnowledge, RecallObservation
from broker.skills import trigger_in
from broker.specs import Skill
from controller_worker.state import State, UnansweredMessage


def recall(
    state: State,
    message: UnansweredMessage,
    recall_type: RecallType,
    skills: Sequence[Skill] = (),
    notes: Sequence[Note] = (),
) -> RecallObservation | None:
    """Return what is known, or None.

    Args:
        message: the message that asks; its day is the day the model is told.
        skills: of the workspace; they take the place of their namesakes among the agent's own.
        notes: those that the message recalls.
    """
    recalled = tuple(notes) or None
    known = {skill.name: skill for skill in (*state.agent.skills, *skills)}
    told = [skill for skill in known.values() if skill.name not in state.agent.disabled_microagents]
    mentioned = tuple(
        MicroagentKnowledge(name=skill.name, trigger=word, content=skill.content)
        for skill in told
        if (word := trigger_in(skill, message.content))
    )
    if recall_type is not RecallType.WORKSPACE_CONTEXT:
        if not mentioned and recalled is None:
            return None
        return RecallObservation(recall_type=recall_type, microagent_knowledge=mentioned, notes=recalled)
    return RecallObservation(
        recall_type=recall_type,
        date=message.sent.date().isoformat() if message.sent else "",
        working_dir=state.workspace.path or "",
        repo_instructions="\n\n".join(skill.content for skill in told if not skill.triggers),
        microagent_knowledge=mentioned,
        notes=recalled,
    )
