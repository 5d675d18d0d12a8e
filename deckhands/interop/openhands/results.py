"""Substitutes for missing results: they settle an imported action, so that it does not run here."""

from __future__ import annotations

from datetime import datetime

from broker.contract import ConfirmationStatus, Event, event_from_wire

NO_RESULT = "The recording that this conversation was imported from has no result of this action. It may have run."

NO_RESULTS = frozenset(
    {
        "observation.agent_state_changed",
        "observation.events_lost",
        "observation.finish_refused",
        "observation.finish_verdict",
        "observation.loop_detection",
    }
)
"""Observations that settle no action, whatever they name as their cause."""


def is_result(event: Event) -> bool:
    """Return whether an event settles the action that it names."""
    return event.cause is not None and event.kind.startswith("observation.") and event.kind not in NO_RESULTS


def needs_result(event: Event) -> bool:
    """Return whether an event is an action that must have a result.

    It must, unless the controller runs it or it awaits confirmation.
    """
    is_waiting = getattr(event, "confirmation_state", "") == ConfirmationStatus.AWAITING_CONFIRMATION
    return is_run_elsewhere(event) and not is_waiting


def is_run_elsewhere(event: Event) -> bool:
    """Return whether an event is an action that is not run by the controller."""
    return event.kind == "action.delegate" or (event.kind.startswith("action.") and event.runnable)


def make_missing_result(action: Event, *, event_id: int, timestamp: datetime | str | None) -> Event:
    """Return the observation that an action's result is unknown."""
    wire = {"kind": "observation.outcome_unknown", "content": NO_RESULT, "cause": action.id, "timestamp": timestamp}
    if action.kind == "action.delegate":
        wire |= {"kind": "observation.delegate", "delegate_id": action.id}
    if action.tool_call_metadata is not None:
        wire["tool_call_metadata"] = action.tool_call_metadata.model_dump()
    return event_from_wire({name: value for name, value in wire.items() if value is not None}, event_id)
