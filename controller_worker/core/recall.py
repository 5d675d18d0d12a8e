"""Recall: the knowledge added to a message: at first the workspace, and skills with a trigger word in it (9.7).

Holds: a function of its arguments, so that a replay recalls the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from broker.contract import (
    NO_SKILLS,
    MicroagentKnowledge,
    Note,
    RecallObservation,
    RecallType,
    Skill,
    SkillFiles,
    find_trigger,
)

if TYPE_CHECKING:
    from controller_worker.core.concerns.inbox import UnansweredMessage
    from controller_worker.core.state import State

MAX_WORDS = 2_000
"""Words searched for in a message. A workspace chooses them, and the search blocks all conversations of a worker."""


def recall(
    state: State,
    message: UnansweredMessage,
    recall_type: RecallType,
    skills: SkillFiles = NO_SKILLS,
    notes: Sequence[Note] = (),
) -> RecallObservation | None:
    """Return the recalled knowledge, or None.

    Args:
        message: the message to recall for; the model sees its date as today.
        skills: the workspace's skills; they replace the agent's own skills of the same name.
        notes: the notes that the message recalls.
    """
    recalled = tuple(notes) or None
    known = _merge_skills(state.setup.agent.skills, skills.skills)
    reported = [skill for skill in known if skill.name not in state.setup.agent.disabled_microagents]
    mentioned = tuple(_find_mentioned(reported, message.content.lower()))
    if recall_type is not RecallType.WORKSPACE_CONTEXT:
        if not mentioned and recalled is None:
            return None
        return RecallObservation(recall_type=recall_type, microagent_knowledge=mentioned, notes=recalled)
    return RecallObservation(
        recall_type=recall_type,
        date=message.sent.date().isoformat() if message.sent else "",
        working_dir=state.setup.workspace.path or "",
        repo_instructions="\n\n".join(skill.content for skill in reported if not skill.triggers),
        microagent_knowledge=mentioned,
        notes=recalled,
        unreadable_skills=skills.unreadable or None,
    )


def _merge_skills(own: Iterable[Skill], workspace: Iterable[Skill]) -> Iterator[Skill]:
    """Yield all skills: the agent's own, with those of the workspace in place of their namesakes, then the others."""
    found = {skill.name: skill for skill in workspace}
    names = set(found)
    for skill in own:
        if skill.name not in names:
            yield skill
        elif skill.name in found:
            yield found.pop(skill.name)
    yield from found.values()


def _find_mentioned(skills: Iterable[Skill], text: str) -> Iterator[MicroagentKnowledge]:
    """Yield the skills with a trigger word in a lower-case text."""
    left = MAX_WORDS
    for skill in skills:
        if word := find_trigger(skill.triggers[:left], text):
            yield MicroagentKnowledge(name=skill.name, trigger=word, content=skill.content)
        left = max(0, left - len(skill.triggers))
