"""Held conversations: their agent reads messages, and takes no step until the conversation is resumed.

Holds: a hold is an event of the log, so every reader sees it, and a killed process loses none.
"""

from __future__ import annotations

from broker.contract import AgentState, ChangeAgentStateAction, Event, EventSource

HELD_REASON = "It waits for a request to run."


def make_hold() -> ChangeAgentStateAction:
    """Return the request that holds a conversation. It is the last event of the append that has the messages."""
    return ChangeAgentStateAction(agent_state=AgentState.PAUSED, reason=HELD_REASON, source=EventSource.USER)


def is_hold(event: Event) -> bool:
    """Return whether an event is a request that holds the conversation."""
    return isinstance(event, ChangeAgentStateAction) and event.reason == HELD_REASON
