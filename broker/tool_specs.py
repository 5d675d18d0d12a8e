"""What both sides of the queue know of a tool: the prompt side offers it, the executing side runs it.

Holds: a tool's name, JSON Schema and outcome policy are the same in the prompt and in the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class OutcomePolicy(StrEnum):
    """What to do with an action whose worker died and whose outcome nobody recorded."""

    IDEMPOTENT = "idempotent"
    """Run it again."""
    AT_MOST_ONCE = "at_most_once"
    """Never run it again; report the outcome as unknown."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it.

    Attributes:
        name: as in the model's tool calls.
        description: for the model.
        parameters: JSON Schema of the arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]


ACTION_OUTCOMES: dict[str, OutcomePolicy] = {
    "action.read": OutcomePolicy.IDEMPOTENT,
    "action.run": OutcomePolicy.AT_MOST_ONCE,
    "action.edit": OutcomePolicy.AT_MOST_ONCE,
    "action.write": OutcomePolicy.AT_MOST_ONCE,
}
"""Outcome policy per runnable action kind; kinds not named here are `at_most_once`."""


def outcome_policy(kind: str) -> OutcomePolicy:
    """Return the policy of a runnable action kind."""
    return ACTION_OUTCOMES.get(kind, OutcomePolicy.AT_MOST_ONCE)
