"""The outcome of a settled conversation, and the errors that only `Conversation` raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from pydantic import BaseModel
from typing_extensions import TypeVar

from broker.runtime import DeckhandsError, UsageError
from deckhands.client.reading.summary import Summary

OutputT = TypeVar("OutputT", bound=BaseModel | None, default=None)
"""The class that was passed as `output`."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[OutputT]):
    """The outcome of a settled conversation.

    Attributes:
        summary: its numbers and a few texts.
        output: the structured output, as an object of the class that was passed as `output`; None: there is none.
    """

    summary: Summary
    output: OutputT | None = None

    @property
    def state(self) -> str:
        """The agent's state, see `AgentState`."""
        return self.summary.state

    @property
    def message(self) -> str:
        """The agent's last message."""
        return self.summary.message

    @property
    def cost_usd(self) -> float:
        """Its cost so far."""
        return self.summary.cost_usd

    @property
    def asked_id(self) -> int | None:
        """The id of the action that awaits confirmation; None: there is none."""
        return self.summary.asked_id


class ConversationFailed(DeckhandsError):
    """A conversation ended in an error.

    Attributes:
        outcome: its outcome.
    """

    code = "conversation_failed"

    def __init__(self, outcome: Outcome[Any]) -> None:
        summary = outcome.summary
        why = summary.last_error or "The agent stopped with an error."
        super().__init__(f"The conversation {summary.conversation_id} has failed: {why}", remedy=summary.remedy)
        self.code = summary.error_code or self.code
        self.outcome = outcome


class NotBegun(UsageError):
    """The conversation has no message yet, so there is nothing to wait for, to read or to stop."""

    code = "not_begun"

    def __init__(self) -> None:
        super().__init__("The conversation has not started.", remedy="Send it a message first.")
