"""Confirmation: a user's permission before an action runs, and the effects of the answer (OpenHands 1.9).

The whole turn is in the log. Its actions run in order up to the first one that needs a confirmation; then the
conversation asks the user about that action, by its id. A confirmed action is written again under a new id, and that
copy runs. A rejection also settles the later actions of the turn.

Holds: pure. A waiting action is never given to a tool worker. An answer counts only for the action that it names. Every
copy gets exactly one observation.
Differs: every runnable action can wait for a confirmation, and runs once (B1). The copy names the action that it
replaces. A message instead of an answer rejects the action, so that the call has a result. Resuming does not confirm.
After a rejection with a reason, the agent continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConfirmationPolicy,
    ConfirmationReminder,
    ConfirmationStatus,
    Event,
    EventSource,
    MCPQuestionObservation,
    RiskyAction,
    UserRejectObservation,
    asks_for_server,
)
from broker.log import ANSWERS
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, CarryOut, Effect, Park
from controller_worker.core.pending import PendingAction, find_runnable

if TYPE_CHECKING:
    from controller_worker.core.state import State

REJECTED = "Action has been rejected by the user! Waiting for further user input."
REJECTED_WITH_REASON = "Action has been rejected by the user! It was not executed. The reason: {reason}"
NO_ANSWER = "No answer came within {seconds} seconds."
NOT_REACHED = "The action was not executed, because the person rejected an earlier one of the same turn."
ANSWERED_OTHERWISE = "The person sent a message instead of confirming the action. The action was not executed."
FIXED_FIELDS = frozenset({"kind", "id", "timestamp", "source", "cause", "blobs", "tool_call_metadata"}) | {
    "confirmation_state",
    "replaces",
    "thought",
    "asks",
    "questions",
}
"""Fields that an edit must not change."""


@dataclass(frozen=True)
class ConfirmationProgress:
    """The progress of the question about an action.

    Attributes:
        asked_id: the action that the user is asked to confirm.
        answer_id: the event with the user's answer.
        confirmed_id: the copy that runs after the confirmation.
        reason: the reason given with the latest answer.
        asked_at: when the user was asked; None if nothing is asked.
        is_reminded: the user was reminded.
        question_id: the latest call whose MCP server asks the user something. Only a user can answer it.
    """

    asked_id: int | None = None
    answer_id: int = 0
    confirmed_id: int = 0
    reason: str | None = None
    asked_at: datetime | None = None
    is_reminded: bool = False
    question_id: int | None = None


def is_answer(state: State, event: ChangeAgentStateAction) -> bool:
    """Return whether an event is the first answer to the open question about an action."""
    is_asked = (
        state.lifecycle.agent_state is AgentState.AWAITING_USER_CONFIRMATION and state.lifecycle.requested is None
    )
    is_about_it = event.action_id in (None, state.confirmation.asked_id)
    return event.agent_state in ANSWERS and is_asked and is_about_it


def _after_state_change(
    confirmation: ConfirmationProgress, change: AgentStateChangedObservation, state: State
) -> ConfirmationProgress:
    if change.action_id == confirmation.asked_id:
        return confirmation
    asked_at = change.timestamp if change.action_id is not None else None
    return evolve(confirmation, asked_id=change.action_id, asked_at=asked_at, is_reminded=False)


def _after_reminder(
    confirmation: ConfirmationProgress, reminder: ConfirmationReminder, state: State
) -> ConfirmationProgress:
    return evolve(confirmation, is_reminded=True) if reminder.action_id == confirmation.asked_id else confirmation


def _after_request(
    confirmation: ConfirmationProgress, request: ChangeAgentStateAction, state: State
) -> ConfirmationProgress:
    if not is_answer(state, request):
        return confirmation
    return evolve(confirmation, answer_id=request.id, reason=request.reason or None)


def _after_action(confirmation: ConfirmationProgress, action: RiskyAction, state: State) -> ConfirmationProgress:
    if action.replaces is None and action.__dict__.get("asks") is not None:
        return evolve(confirmation, question_id=action.id)
    is_confirmed = action.replaces is not None and action.confirmation_state is not ConfirmationStatus.REJECTED
    return evolve(confirmation, confirmed_id=action.id) if is_confirmed else confirmation


def await_answer(state: State, now: datetime) -> Effect | None:
    """Remind the user of an open question, and answer it by the policy's default at its deadline."""
    asked = state.confirmation
    if state.lifecycle.agent_state is not AgentState.AWAITING_USER_CONFIRMATION or asked.asked_at is None:
        return None
    policy = state.setup.agent.confirmation
    deadline = None if policy.deadline_seconds is None else asked.asked_at + timedelta(seconds=policy.deadline_seconds)
    if deadline is not None and now >= deadline:
        answer = "reject" if asked.asked_id == asked.question_id else policy.default or "reject"
        return Append((_make_default_answer(policy, answer, asked.asked_id),))
    reminder = None
    if policy.reminder_seconds is not None and not asked.is_reminded:
        reminder = asked.asked_at + timedelta(seconds=policy.reminder_seconds)
        if now >= reminder:
            return Append((ConfirmationReminder(action_id=asked.asked_id or 0, deadline=deadline),))
    due = min(filter(None, (reminder, deadline)), default=None)
    return None if due is None else Park(due, "confirmation")


def _make_default_answer(policy: ConfirmationPolicy, answer: str, action_id: int | None) -> ChangeAgentStateAction:
    states = {"reject": AgentState.USER_REJECTED, "confirm": AgentState.USER_CONFIRMED, "stop": AgentState.STOPPED}
    return ChangeAgentStateAction(
        agent_state=states[answer],
        action_id=None if answer == "stop" else action_id,
        reason=NO_ANSWER.format(seconds=f"{policy.deadline_seconds:g}") if answer == "reject" else None,
        source=EventSource.ENVIRONMENT,
    )


def carry_out_answer(state: State, now: datetime) -> Effect | None:
    """Carry out a user's answer. In a fork that starts after the copy, do only the rest."""
    asked = state.confirmation
    answered = state.lifecycle.requested
    if answered not in ANSWERS or asked.asked_id is None:
        return None
    if any(pending.id == asked.asked_id for pending in state.tools.pending):
        return CarryOut(asked.asked_id, asked.answer_id)
    is_confirmed = asked.confirmed_id > asked.answer_id  # an edit may have been refused
    outcome = AgentState.USER_CONFIRMED if is_confirmed else AgentState.USER_REJECTED
    return Append((AgentStateChangedObservation(agent_state=outcome),))


def end_confirmation(state: State, now: datetime) -> Effect | None:
    """Return to work after the confirmed copy has run. In a fork that starts in a rejected turn, settle its rest."""
    if state.lifecycle.agent_state is AgentState.USER_REJECTED:
        return _finish_rejection(state)
    is_confirmed = state.lifecycle.agent_state is AgentState.USER_CONFIRMED
    if is_confirmed and state.confirmation.confirmed_id not in find_runnable(state):
        return announce(state, AgentState.RUNNING)
    return None


def _finish_rejection(state: State) -> Append:
    reason = state.confirmation.reason
    events: list[Event] = [_make_rejection(pending, _render_reason(reason)) for pending in state.tools.pending]
    answers = tuple((n, pending.id) for n, pending in enumerate(state.tools.pending))
    events.append(_make_state_after_rejection(reason))
    return Append(tuple(events), answers)


def apply_answer(state: State, action: RiskyAction, answer: ChangeAgentStateAction | MCPQuestionObservation) -> Append:
    """Return the events that carry out a user's answer, or that ask the user the questions of an MCP server."""
    if isinstance(answer, MCPQuestionObservation):
        changes: dict[str, Any] = {**_CLEARED, "source": EventSource.ENVIRONMENT, "asks": action.id, "answers": None}
        changes |= {
            "questions": answer.questions,
            "confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION,
            "replaces": None,
        }
        return Append((action.model_copy(update=changes),))
    copy = _make_confirmed_copy(action, answer)
    if answer.agent_state is AgentState.USER_CONFIRMED and copy is not None:
        return Append((copy, AgentStateChangedObservation(agent_state=AgentState.USER_CONFIRMED)))
    rejected = action.model_copy(
        update=_CLEARED | {"confirmation_state": ConfirmationStatus.REJECTED, "replaces": action.id}
    )
    is_rejected = answer.agent_state is AgentState.USER_REJECTED
    reason = answer.reason if is_rejected else None
    why = _render_reason(reason) if is_rejected else f"{REJECTED} (The edited action is invalid.)"
    first = PendingAction(state.version + 1, action.tool_call_metadata)
    events: list[Event] = [rejected, AgentStateChangedObservation(agent_state=AgentState.USER_REJECTED)]
    events += [_make_rejection(first, why)]
    rest = [pending for pending in state.tools.pending if pending.id != action.id]
    answers = tuple((len(events) + n, pending.id) for n, pending in enumerate(rest))
    events += [_make_rejection(pending, NOT_REACHED) for pending in rest]
    events.append(_make_state_after_rejection(reason))
    # The server's task behind a question ends with the question.
    cancels = (first.id,) if asks_for_server(rejected) else ()
    return Append(tuple(events), answers=((2, first.id), *answers), cancels=cancels)


def _render_reason(reason: str | None) -> str:
    return REJECTED_WITH_REASON.format(reason=reason) if reason else REJECTED


def _make_state_after_rejection(reason: str | None) -> AgentStateChangedObservation:
    """Let the agent continue if the rejection has a reason; otherwise wait for the user's message."""
    return AgentStateChangedObservation(agent_state=AgentState.RUNNING if reason else AgentState.AWAITING_USER_INPUT)


def reject_for_message(state: State, *, first_position: int) -> Append:
    """Return the events that settle a turn's actions if a message arrives instead of a confirmation; may be empty.

    Args:
        first_position: number of events appended before these.
    """
    waiting = state.tools.pending if state.tools.pending and state.tools.pending[0].is_awaiting else ()
    events = tuple(_make_rejection(pending, ANSWERED_OTHERWISE) for pending in waiting)
    # If one is a question of an MCP server, the server's task ends with it.
    cancels = tuple(pending.id for pending in waiting)
    return Append(events, tuple((first_position + n, pending.id) for n, pending in enumerate(waiting)), cancels)


_CLEARED = {"id": 0, "timestamp": None, "thought": ""}


def _make_confirmed_copy(action: RiskyAction, answer: ChangeAgentStateAction) -> RiskyAction | None:
    """Return the confirmed action, or None if the edit turned it into a different one."""
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


def _make_rejection(pending: PendingAction, text: str) -> UserRejectObservation:
    return UserRejectObservation(content=text, cause=pending.id, tool_call_metadata=pending.tool_call_metadata)


CONFIRMATION = Concern(
    "confirmation",
    {
        AgentStateChangedObservation: _after_state_change,
        ConfirmationReminder: _after_reminder,
        ChangeAgentStateAction: _after_request,
        RiskyAction: _after_action,
    },
)
