"""Greeting: an agent's system message, its first event."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import ConversationChanged, PlanAcceptedObservation, SystemMessageAction
from controller_worker.core.concern import Concern
from controller_worker.core.concerns.planning import is_handed_over
from controller_worker.core.concerns.setup import apply_agent_change
from controller_worker.core.effects import Effect, Greet, Rest

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class Greeting:
    """Whether the current agent has its system message."""

    is_said: bool = False


def _after_message(greeting: Greeting, event: SystemMessageAction, state: State) -> Greeting:
    return Greeting(is_said=True)


def _after_plan(greeting: Greeting, event: PlanAcceptedObservation, state: State) -> Greeting:
    """Request a new system message when another agent takes over."""
    return Greeting() if is_handed_over(state, event) else greeting


def _after_change(greeting: Greeting, change: ConversationChanged, state: State) -> Greeting:
    """Ask for another system message when a user changes the agent or the loop."""
    now = state.setup.agent
    return Greeting() if apply_agent_change(change, now).name != now.name else greeting


def greet(state: State, now: datetime) -> Effect | None:
    """Append the system message; do nothing for an empty log."""
    if state.greeting.is_said:
        return None
    return Greet() if state.version else Rest()


GREETING = Concern(
    "greeting",
    {
        SystemMessageAction: _after_message,
        PlanAcceptedObservation: _after_plan,
        ConversationChanged: _after_change,
    },
)
