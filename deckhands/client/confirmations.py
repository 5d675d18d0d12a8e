"""Pending confirmations, read from the index and the end of a conversation's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import AgentState, AgentStateChangedObservation, ChangeAgentStateAction, EventSource
from broker.log import Conversations, find_latest_event
from broker.runtime import UsageError
from broker.store import Store


async def answer_to(
    store: Store, conversation_id: str, answer: AgentState, action_id: int | None, edited: Mapping[str, Any]
) -> ChangeAgentStateAction:
    """Return the event that answers a conversation's pending confirmation.

    Args:
        action_id: the action that was shown to the user; None: the one that is pending now.

    Raises:
        UsageError: no action is pending, or another one is.
    """
    state, asked_id = await asked_about(store, conversation_id)
    if state != AgentState.AWAITING_USER_CONFIRMATION or action_id not in (None, asked_id):
        asked = f"about action {asked_id}" if asked_id else f"nothing: it is {state}"
        raise UsageError(
            f"The conversation {conversation_id} asks {asked}.", remedy="`deckhands show` prints its question."
        )
    return ChangeAgentStateAction(agent_state=answer, action_id=asked_id, edited=dict(edited), source=EventSource.USER)


async def asked_about(store: Store, conversation_id: str) -> tuple[str, int | None]:
    """Return the agent's state and the action that awaits confirmation; None for the action if there is none.

    Raises:
        UnknownConversation: no such conversation.
    """
    state = (await Conversations(store).row(conversation_id)).state
    if state != AgentState.AWAITING_USER_CONFIRMATION:
        return state, None
    announced = await find_latest_event(store, conversation_id, AgentStateChangedObservation)
    return (announced.agent_state, announced.action_id) if announced else (state, None)
