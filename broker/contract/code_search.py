"""A question about the workspace's code, and its answer (OpenHands 9.3)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import JsonObject, Observation


class CodeSearchAction(RiskyAction):
    """Ask about the workspace's code: what it consists of, and what depends on what. It changes nothing.

    Attributes:
        question: `search_code_snippets`, `get_entity_contents` or `explore_tree_structure`.
    """

    kind: Literal["action.search_code"] = "action.search_code"
    question: str
    arguments: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Looking through the code ({self.question}): {', '.join(map(str, self.arguments.values()))}"


class CodeSearchObservation(Observation):
    """What was found in the workspace's code."""

    kind: Literal["observation.search_code"] = "observation.search_code"
    question: str
