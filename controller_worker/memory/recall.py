"""Recall: what is known about the workspace when a conversation begins (OpenHands 9.7).

Holds: a function of the state alone, so that a replay recalls the same.
"""

from __future__ import annotations

from broker.actions import RecallType
from broker.observations import RecallObservation
from controller_worker.state import State, UnansweredMessage


def recall(state: State, message: UnansweredMessage, recall_type: RecallType) -> RecallObservation | None:
    """Return what is known, or None.

    Args:
        message: the message that asks; its day is the day the model is told.
    """
    if recall_type is not RecallType.WORKSPACE_CONTEXT:
        return None
    date = message.sent.date().isoformat() if message.sent else ""
    return RecallObservation(recall_type=recall_type, date=date, working_dir=state.workspace.path or "")
