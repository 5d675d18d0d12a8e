"""Recalls for messages, as events (OpenHands 1.6): the recall action, the start of the work, and the result.

Holds: pure. A recall is answered in the same append, so nothing waits for it (B15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    NO_SKILLS,
    AgentState,
    AgentStateChangedObservation,
    Event,
    MessageAction,
    ModelReply,
    Note,
    NullObservation,
    RecallAction,
    RecallType,
    SkillFiles,
    recall_notes,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns import survey
from controller_worker.core.concerns.confirmation import reject_for_message
from controller_worker.core.concerns.rules import make_rules_recall
from controller_worker.core.effects import Append, Effect, Recall, Rest
from controller_worker.core.pending import is_user_message
from controller_worker.core.recall import recall

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True, slots=True)
class UnansweredMessage:
    """A user's message without a recall yet."""

    id: int
    content: str
    sent: datetime | None
    is_first: bool


@dataclass(frozen=True)
class MessageInbox:
    """The messages of users.

    Attributes:
        message: the latest message, if it still needs a recall.
        last_message_id: the latest message, recalled or not.
        is_reply_outdated: a user's message arrived after the prompt of the latest reply was made, so that reply cannot
            end the turn.
    """

    message: UnansweredMessage | None = None
    last_message_id: int = 0
    is_reply_outdated: bool = False


def _after_message(inbox: MessageInbox, message: MessageAction, state: State) -> MessageInbox:
    """Record a user's message.

    Differs: only the latest of several waiting messages has a recall, because one reply answers them all.
    """
    if not is_user_message(message):
        return inbox
    is_first = inbox.last_message_id == 0 or (inbox.message is not None and inbox.message.is_first)
    unanswered = UnansweredMessage(message.id, message.content, message.timestamp, is_first)
    return evolve(inbox, message=unanswered, last_message_id=message.id)


def _after_recall(inbox: MessageInbox, recall: RecallAction, state: State) -> MessageInbox:
    return evolve(inbox, message=None)


def _after_reply(inbox: MessageInbox, reply: ModelReply, state: State) -> MessageInbox:
    is_outdated = inbox.last_message_id > reply.seen_id
    if reply.service != "agent" or is_outdated == inbox.is_reply_outdated:
        return inbox
    return evolve(inbox, is_reply_outdated=is_outdated)


def recall_message(state: State, now: datetime) -> Effect | None:
    """Recall the latest message. The loop reads the survey and the notebook, if there are any."""
    if state.inbox.message is None or survey.lacks_skills(state):
        return None
    needs_reading = state.survey.answer_id or state.setup.agent.memory is not None
    return Recall(state.survey.answer_id) if needs_reading else make_recall(state)


def rest_until_message(state: State, now: datetime) -> Effect | None:
    """Do nothing before the first message."""
    return Rest() if state.inbox.last_message_id == 0 else None


def make_recall(state: State, skills: SkillFiles = NO_SKILLS, notes: Sequence[Note] = ()) -> Append:
    """Return the recall of the latest message, and the events that settle actions whose answer it replaces.

    Without a message, return the recall of rules.

    Args:
        skills: the workspace's skills.
        notes: all of the notebook.
    """
    if state.inbox.message is None:
        return make_rules_recall(state, skills)
    found = recall_notes(notes, state.inbox.message.content, is_first=state.inbox.message.is_first)
    events = _make_recall_events(state, state.inbox.message, skills, found)
    rejected = reject_for_message(state, first_position=len(events))
    return Append((*events, *rejected.events), rejected.answers, rejected.cancels)


def _make_recall_events(
    state: State, message: UnansweredMessage, skills: SkillFiles, notes: Sequence[Note]
) -> tuple[Event, ...]:
    """Return the recall action, the start of the work, and the recalled knowledge (OpenHands 1.6)."""
    recall_type = RecallType.WORKSPACE_CONTEXT if message.is_first else RecallType.KNOWLEDGE
    events: list[Event] = [RecallAction(recall_type=recall_type, query=message.content)]
    recall_id = state.version + 1
    if state.lifecycle.requested is AgentState.RUNNING:
        events.append(AgentStateChangedObservation(agent_state=AgentState.RUNNING))
    found = recall(state, message, recall_type, skills, notes) or NullObservation()
    events.append(found.model_copy(update={"cause": recall_id}))
    return tuple(events)


INBOX = Concern("inbox", {MessageAction: _after_message, RecallAction: _after_recall, ModelReply: _after_reply})
