"""Rules: skills for certain files, such as an AGENTS.md in a folder. The agent reads them once it uses such a file.

The first recall names the patterns of their files; see `RecallObservation.path_rules`. A file counts as used when one
of the agent's file tools has read or changed it; shell commands do not count, as in the original.

Holds: pure. A rule is recalled once, and again only after a condensation. Patterns come from the workspace, so they are
untrusted: their number, their total length and the cost of a match are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    CondensationAction,
    EventSource,
    FileEditObservation,
    FileReadObservation,
    FileWriteObservation,
    RecallAction,
    RecallObservation,
    RecallType,
    SkillFiles,
    matches_pattern,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, Effect, Recall
from controller_worker.core.recall import MAX_RULES_CHARS, recall_rules

if TYPE_CHECKING:
    from controller_worker.core.state import State

ROOT = "/workspace"
"""Where a workspace of a conversation's own is mounted."""
MAX_DUE = 5
"""Rules of one recall. The others wait for the next use of their files."""
MAX_PATH_CHARS = 1_000

FileObservation = FileReadObservation | FileWriteObservation | FileEditObservation


@dataclass(frozen=True, slots=True)
class DueRule:
    """A rule to recall, the pattern that matches, and the used file."""

    name: str
    pattern: str
    path: str


@dataclass(frozen=True)
class Rules:
    """The rules of a workspace.

    Attributes:
        known: the name and the patterns of each.
        shown: names of those that the model has read.
        due: those to recall before the next call of the model.
        shown_chars: characters of all texts that were recalled, also before a condensation.
    """

    known: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shown: tuple[str, ...] = ()
    due: tuple[DueRule, ...] = ()
    shown_chars: int = 0


def recall_due_rules(state: State, now: datetime) -> Effect | None:
    """Recall the rules of files that were used. The loop reads the survey."""
    return Recall(state.survey.answer_id) if state.rules.due else None


def make_rules_recall(state: State, skills: SkillFiles) -> Append:
    """Return the recall of the due rules.

    Args:
        skills: the workspace's skills.
    """
    due = state.rules.due
    action = RecallAction(recall_type=RecallType.KNOWLEDGE, query=due[0].path, source=EventSource.ENVIRONMENT)
    found = recall_rules(due, skills, state.setup.agent.skills)
    return Append((action, found.model_copy(update={"cause": state.version + 1})))


def _after_recall(rules: Rules, recall: RecallObservation, state: State) -> Rules:
    """Take the rules from the first recall, and count the text of later recalls."""
    if not recall.path_rules:
        chars = sum(len(item.content) for item in recall.microagent_knowledge if item.path is not None)
        return evolve(rules, shown_chars=rules.shown_chars + chars) if chars else rules
    return Rules(tuple((rule.name, rule.patterns) for rule in recall.path_rules))


def _after_question(rules: Rules, recall: RecallAction, state: State) -> Rules:
    if not rules.due or recall.source is not EventSource.ENVIRONMENT:
        return rules
    return evolve(rules, shown=(*rules.shown, *(rule.name for rule in rules.due)), due=())


def _after_use(rules: Rules, used: FileObservation, state: State) -> Rules:
    is_used_up = rules.shown_chars >= MAX_RULES_CHARS
    if not rules.known or is_used_up or not used.path or used.tool_call_metadata is None:
        return rules
    found = tuple(_find_due(rules, _make_relative(used.path[:MAX_PATH_CHARS], state)))
    return evolve(rules, due=(*rules.due, *found)[:MAX_DUE]) if found else rules


def _after_condensation(rules: Rules, condensation: CondensationAction, state: State) -> Rules:
    return evolve(rules, shown=()) if rules.shown else rules


def _make_relative(path: str, state: State) -> str:
    roots = filter(None, (state.setup.workspace.path, ROOT))
    root = next((root for root in roots if path.startswith(f"{root.rstrip('/')}/")), "")
    return path[len(root.rstrip("/")) :].lstrip("/") if root else path.removeprefix("./")


def _find_due(rules: Rules, path: str) -> Iterator[DueRule]:
    waiting = {rule.name for rule in rules.due}
    for name, patterns in rules.known:
        if name in rules.shown or name in waiting:
            continue
        if pattern := next((pattern for pattern in patterns if matches_pattern(path, pattern)), None):
            yield DueRule(name, pattern, path)


RULES = Concern(
    "rules",
    {
        RecallObservation: _after_recall,
        RecallAction: _after_question,
        FileReadObservation: _after_use,
        FileWriteObservation: _after_use,
        FileEditObservation: _after_use,
        CondensationAction: _after_condensation,
    },
)
