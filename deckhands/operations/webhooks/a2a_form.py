"""Webhooks in the form of A2A's push notifications: the same events, signatures and retries with another body.

Source: A2A protocol 1.0, section 4.3.
"""

from __future__ import annotations

import json

from broker.contract import AgentState, AgentStateChangedObservation

TOKEN_HEADER = "X-A2A-Notification-Token"  # noqa: S105  (the name of a header)
A2A_STATES = {
    AgentState.LOADING: "TASK_STATE_SUBMITTED",
    AgentState.RUNNING: "TASK_STATE_WORKING",
    AgentState.RATE_LIMITED: "TASK_STATE_WORKING",
    AgentState.USER_CONFIRMED: "TASK_STATE_WORKING",
    AgentState.USER_REJECTED: "TASK_STATE_WORKING",
    AgentState.AWAITING_USER_INPUT: "TASK_STATE_INPUT_REQUIRED",
    AgentState.AWAITING_USER_CONFIRMATION: "TASK_STATE_INPUT_REQUIRED",
    AgentState.PAUSED: "TASK_STATE_INPUT_REQUIRED",
    AgentState.FINISHED: "TASK_STATE_COMPLETED",
    AgentState.REJECTED: "TASK_STATE_REJECTED",
    AgentState.ERROR: "TASK_STATE_FAILED",
    AgentState.STOPPED: "TASK_STATE_CANCELED",
}


def push_body(conversation_id: str, event: AgentStateChangedObservation) -> str:
    """Return a change of state in the form that A2A's clients read."""
    status: dict[str, object] = {"state": A2A_STATES[event.agent_state]}
    if event.timestamp is not None:
        status["timestamp"] = event.timestamp.isoformat()
    update = {"taskId": conversation_id, "contextId": conversation_id, "status": status}
    return json.dumps({"statusUpdate": update}, ensure_ascii=True)
