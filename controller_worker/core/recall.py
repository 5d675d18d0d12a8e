"""Recall: the knowledge added to a message: the workspace for the first one, and skills that it triggers (9.7).

Holds: a function of its arguments, so that a replay recalls the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from broker.contract import (
    NO_SKILLS,
    AvailableAgent,
    AvailableSkill,
    MicroagentKnowledge,
    Note,
    PathRule,
    RecallObservation,
    RecallType,
    Skill,
    SkillFiles,
    find_trigger,
    shorten_text,
    truncate_content,
)

if TYPE_CHECKING:
    from controller_worker.core.concerns.inbox import UnansweredMessage
    from controller_worker.core.concerns.rules import DueRule
    from controller_worker.core.state import State

READ_FILE = "Read {location} first."
MAX_INSTRUCTION_CHARS = 100_000
"""The total limit of texts that are always shown."""
MAX_LISTED_CHARS = 16_000
"""The list of skills that the agent may read. Their descriptions are shortened alike if they need more."""
MIN_DESCRIPTION_CHARS = 20
MAX_LISTED_AGENTS = 100
MAX_RULE_CHARS = 16_000
"""The limit of the text of one rule; the rest is left out."""
MAX_RULES_CHARS = 100_000
"""The limit of all rules of a conversation. Once it is reached, no further rule is recalled."""
MAX_PATTERNS = 200
"""Patterns that the path of a used file is compared with, in all."""
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
        message: the message to recall for. The model sees its date as the current date.
        skills: the workspace's skills; they replace the agent's own skills of the same name.
        notes: the notes that the message recalls.
    """
    recalled = tuple(notes) or None
    known = _merge_skills(state.setup.agent.skills, skills.skills)
    reported = [skill for skill in known if skill.name not in state.setup.agent.disabled_microagents]
    mentioned = tuple(_find_mentioned([skill for skill in reported if not skill.paths], message.content.lower()))
    if recall_type is not RecallType.WORKSPACE_CONTEXT:
        if not mentioned and recalled is None:
            return None
        return RecallObservation(recall_type=recall_type, microagent_knowledge=mentioned, notes=recalled)
    shown, left_out = _fit_instructions(reported)
    listed, unlisted = _list_skills(reported)
    return RecallObservation(
        recall_type=recall_type,
        date=message.sent.date().isoformat() if message.sent else "",
        working_dir=state.setup.workspace.path or "",
        repo_instructions="\n\n".join(shown),
        microagent_knowledge=mentioned,
        notes=recalled,
        available_skills=listed or None,
        available_agents=tuple(_list_agents(state, skills)) or None,
        path_rules=tuple(_find_rules(reported)) or None,
        unreadable_skills=(*skills.unreadable, *left_out, *unlisted) or None,
    )


def recall_rules(due: Iterable[DueRule], skills: SkillFiles, own: Iterable[Skill]) -> RecallObservation:
    """Return the skills whose files were used."""
    known = {skill.name: skill for skill in _merge_skills(own, skills.skills)}
    return RecallObservation(
        recall_type=RecallType.KNOWLEDGE,
        microagent_knowledge=tuple(
            MicroagentKnowledge(
                name=rule.name,
                trigger=rule.pattern,
                content=truncate_content(known[rule.name].content, MAX_RULE_CHARS),
                path=rule.path,
            )
            for rule in due
            if rule.name in known
        ),
    )


def _fit_instructions(skills: Iterable[Skill]) -> tuple[list[str], list[str]]:
    """Return the texts that are always shown, with a sentence in place of each text that no longer fits."""
    shown: list[str] = []
    left_out: list[str] = []
    left = MAX_INSTRUCTION_CHARS
    for skill in skills:
        if skill.triggers or skill.location or skill.paths:
            continue
        if len(skill.content) > left:
            left_out.append(f"{skill.name}: all instructions together exceed {MAX_INSTRUCTION_CHARS:,} characters")
            continue
        left -= len(skill.content)
        shown.append(skill.content)
    return shown, left_out


def _find_rules(skills: Iterable[Skill]) -> Iterator[PathRule]:
    left = MAX_PATTERNS
    for skill in skills:
        if patterns := (skill.paths or ())[:left]:
            left -= len(patterns)
            yield PathRule(name=skill.name, patterns=patterns)


def _list_skills(skills: Iterable[Skill]) -> tuple[tuple[AvailableSkill, ...], tuple[str, ...]]:
    """Return the skills that the agent may read, with descriptions that fit, and a sentence if some do not fit."""
    listed: list[tuple[str, str, str]] = []
    left, left_out = MAX_LISTED_CHARS, 0
    for skill in skills:
        if not skill.location or skill.description is None or skill.paths:
            continue
        needed = len(skill.name) + len(skill.location) + MIN_DESCRIPTION_CHARS
        if needed > left:
            left_out += 1
            continue
        left -= needed
        listed.append((skill.name, skill.location, skill.description))
    share = MIN_DESCRIPTION_CHARS + left // max(1, len(listed))
    found = tuple(
        AvailableSkill(name=name, description=shorten_text(text, share), location=location)
        for name, location, text in listed
    )
    reason = f"the list of skills would exceed {MAX_LISTED_CHARS:,} characters with {left_out} further SKILL.md files"
    return found, (reason,) if left_out else ()


def _list_agents(state: State, files: SkillFiles) -> Iterator[AvailableAgent]:
    """Yield the agents of files that the agent may delegate to, with descriptions that fit."""
    if not state.setup.agent.enable_delegation:
        return
    own = state.setup.agent.delegates
    listed = [agent for agent in files.agents.values() if agent.name not in own][:MAX_LISTED_AGENTS]
    share = MAX_LISTED_CHARS // max(1, len(listed))
    for agent in listed:
        yield AvailableAgent(name=agent.name, description=shorten_text(agent.description, share))


def _merge_skills(own: Iterable[Skill], workspace: Iterable[Skill]) -> Iterator[Skill]:
    """Yield all skills: first the agent's own, or their namesakes in the workspace; then the others."""
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
            content = skill.content if skill.location is None else READ_FILE.format(location=skill.location)
            yield MicroagentKnowledge(name=skill.name, trigger=word, content=content)
        left = max(0, left - len(skill.triggers))
