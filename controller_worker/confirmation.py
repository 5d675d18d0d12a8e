"""Asking a person before an action runs, and what the answer leads to (OpenHands 1.9).

The turn stands in the log whole. Its actions run in their order up to the first that waits for a confirmation; then the
conversation asks for that one, by its id. A confirmed action is written again, under a new id, and it is that copy
which runs; a rejection also settles what stands behind it in the turn.

Holds: pure; no action that waits is ever handed to a tool worker; an answer counts only for the action it was given
for; every copy gets exactly one observation.
Differs: every runnable action can wait, and runs once (B1); the copy names what it replaces; a message instead of an
answer rejects, so that the call has a result; to resume is no confirmation.
"""

from __future__ import annotations

from itertools import takewhile

from pydantic import ValidationError

from broker.actions import ChangeAgentStateAction, RiskyAction
from broker.agent_state import AgentState
from broker.events import Action, ConfirmationStatus, Event
from broker.observations import AgentStateChangedObservation, UserRejectObservation
from controller_worker.effects import Append, CarryOut, Effect
from controller_worker.state import PendingAction, State, replace
from controller_worker.stuck_detector import Trace

REJECTED = "Action has been rejected by the user! Waiting for further user input."
NOT_REACHED = "The action was not executed, because the person rejected an earlier one of the same turn."
ANSWERED_OTHERWISE = "The person sent a message instead of confirming the action. The action was not executed."
FIXED_FIELDS = frozenset({"kind", "id", "timestamp", "source", "cause", "blobs", "tool_call_metadata"}) | {
    "confirmation_state",
    "replaces",
    "thought",
}
"""What an edit may not change."""


def may_run(state: State) -> tuple[int, ...]:
    """Return the pending actions that may run, in order: those before the first that waits for a confirmation."""
    return tuple(action.id for action in takewhile(lambda pending: not pending.is_awaiting, state.pending))


def with_runnable(state: State, action: Action, trace: Trace | None) -> State:
    """Take in a runnable action; a copy takes the place of what it replaces, and one that is rejected is not done."""
    status = getattr(action, "confirmation_state", ConfirmationStatus.CONFIRMED)
    replaced = getattr(action, "replaces", None)
    is_rejected = status is ConfirmationStatus.REJECTED
    is_awaiting = is_rejected or status is ConfirmationStatus.AWAITING_CONFIRMATION
    pending = PendingAction(action.id, action.tool_call_metadata, None if is_rejected else trace, is_awaiting)
    if replaced is None:
        return replace(state, pending=(*state.pending, pending))
    copies = tuple(pending if other.id == replaced else other for other in state.pending)
    return replace(state, pending=copies, confirmed_id=state.confirmed_id if is_rejected else pending.id)


def to_carry_out(state: State) -> Effect:
    """Return what a person's answer leads to; what is left of it where a fork begins behind the copy."""
    if any(pending.id == state.asked_id for pending in state.pending):
        return CarryOut(state.asked_id or 0, state.answer_id)
    is_confirmed = state.confirmed_id > state.answer_id  # an edit may have been refused
    answered = AgentState.USER_CONFIRMED if is_confirmed else AgentState.USER_REJECTED
    return Append((AgentStateChangedObservation(agent_state=answered),))


def rest_of_rejection(state: State) -> Append:
    """Return what settles a rejected turn, where a fork begins before that was done."""
    events: list[Event] = [_rejection(pending, REJECTED) for pending in state.pending]
    answers = tuple((n, pending.id) for n, pending in enumerate(state.pending))
    events.append(AgentStateChangedObservation(agent_state=AgentState.AWAITING_USER_INPUT))
    return Append(tuple(events), answers)


def after_answer(state: State, answer: ChangeAgentStateAction) -> State:
    """Take note of a confirmation or rejection, if it is for the action that is asked about and the first."""
    is_asked = state.agent_state is AgentState.AWAITING_USER_CONFIRMATION and state.requested is None
    if not is_asked or answer.action_id not in (None, state.asked_id):
        return state
    return replace(state, requested=answer.agent_state, answer_id=answer.id)


def carried_out(state: State, action: RiskyAction, answer: ChangeAgentStateAction) -> Append:
    """Return what a person's answer leads to."""
    copy = _copy_of(action, answer)
    if answer.agent_state is AgentState.USER_CONFIRMED and copy is not None:
        return Append((copy, AgentStateChangedObservation(agent_state=AgentState.USER_CONFIRMED)))
    rejected = action.model_copy(
        update=_CLEARED | {"confirmation_state": ConfirmationStatus.REJECTED, "replaces": action.id}
    )
    why = REJECTED if answer.agent_state is AgentState.USER_REJECTED else f"{REJECTED} (The edited action is invalid.)"
    first = PendingAction(state.version + 1, action.tool_call_metadata)
    events: list[Event] = [rejected, AgentStateChangedObservation(agent_state=AgentState.USER_REJECTED)]
    events += [_rejection(first, why)]
    rest = [pending for pending in state.pending if pending.id != action.id]
    answers = tuple((len(events) + n, pending.id) for n, pending in enumerate(rest))
    events += [_rejection(pending, NOT_REACHED) for pending in rest]
    events.append(AgentStateChangedObservation(agent_state=AgentState.AWAITING_USER_INPUT))
    return Append(tuple(events), answers=((2, first.id), *answers))


def answered_otherwise(state: State, *, first_position: int) -> Append:
    """Return what settles the actions of a turn when a message comes instead of a confirmation; often nothing.

    Args:
        first_position: how many events are appended before these.
    """
    waiting = state.pending if state.pending and state.pending[0].is_awaiting else ()
    events = tuple(_rejection(pending, ANSWERED_OTHERWISE) for pending in waiting)
    return Append(events, tuple((first_position + n, pending.id) for n, pending in enumerate(waiting)))


_CLEARED = {"id": 0, "timestamp": None, "thought": ""}


def _copy_of(action: RiskyAction, answer: ChangeAgentStateAction) -> RiskyAction | None:
    """Return the action as it was confirmed, None if it was edited into something else."""
    confirmed = {**_CLEARED, "confirmation_state": ConfirmationStatus.CONFIRMED, "replaces": action.id}
    if not answer.edited:
        return action.model_copy(update=confirmed)
    edits = answer.edited
    if edits.keys() & FIXED_FIELDS or not edits.keys() <= type(action).model_fields.keys():
        return None
    try:
        return type(action).model_validate({**dict(action), **confirmed, **edits})
    except ValidationError:
        return None


def _rejection(pending: PendingAction, text: str) -> UserRejectObservation:
    return UserRejectObservation(content=text, cause=pending.id, tool_call_metadata=pending.tool_call_metadata)
