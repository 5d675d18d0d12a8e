"""What a conversation asks a person, read from the index and the end of its log."""

from __future__ import annotations

from broker.contract.observations import AgentStateChangedObservation
from broker.log.conversations import Conversations
from broker.log.latest_event import latest_event
from broker.specs.agent_state import AgentState
from broker.store.store import Store


async def asked_about(store: Store, conversation_id: str) -> tuple[str, int | None]:
    """Return the agent's state and the action that it asks about; None: it asks nothing.

    Raises:
        UnknownConversation: no such conversation.
    """
    state = (await Conversations(store).row(conversation_id)).state
    if state != AgentState.AWAITING_USER_CONFIRMATION:
        return state, None
    announced = await latest_event(store, conversation_id, AgentStateChangedObservation)
    return (announced.agent_state, announced.action_id) if announced else (state, None)
