"""Events that ask the agent to do something."""

from __future__ import annotations

from broker.contract import AgentState, ChangeAgentStateAction, Event, EventSource, MessageAction


def is_user_message(event: Event) -> bool:
    """Return whether an event is a user's message."""
    return isinstance(event, MessageAction) and event.source is EventSource.USER


def is_run_request(event: Event) -> bool:
    """Return whether the event asks the agent to work: a user's message, or a request for `running`."""
    is_resume = isinstance(event, ChangeAgentStateAction) and event.agent_state is AgentState.RUNNING
    return is_resume or is_user_message(event)
