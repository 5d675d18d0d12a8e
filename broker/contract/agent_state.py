"""The states of an agent, and which of them need no worker (OpenHands section 1.1: same names, same values).

Does not: define the allowed transitions; see `controller_worker.core.controller`.
"""

from __future__ import annotations

from enum import StrEnum


class AgentState(StrEnum):
    """The state of an agent. Source: OpenHands V0; the values are its wire strings."""

    LOADING = "loading"
    RUNNING = "running"
    AWAITING_USER_INPUT = "awaiting_user_input"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"
    REJECTED = "rejected"
    ERROR = "error"
    AWAITING_USER_CONFIRMATION = "awaiting_user_confirmation"
    USER_CONFIRMED = "user_confirmed"
    USER_REJECTED = "user_rejected"
    RATE_LIMITED = "rate_limited"


TERMINAL_STATES = frozenset({AgentState.FINISHED, AgentState.REJECTED, AgentState.ERROR, AgentState.STOPPED})
"""States that only a user's message can leave."""

WAITING_FOR_USER_STATES = frozenset(
    {AgentState.AWAITING_USER_INPUT, AgentState.AWAITING_USER_CONFIRMATION, AgentState.PAUSED}
)
"""States that wait for a user to answer, confirm or resume."""


def is_settled(state: AgentState) -> bool:
    """Return whether the conversation needs no worker until it gets a message or a request."""
    return state in TERMINAL_STATES or state in WAITING_FOR_USER_STATES
