"""The status of a conversation, derived from its log alone.

Holds: a status is a value, and the same events give the same status on every machine. A request to the agent counts
until the agent has acknowledged it, so a log that a worker is about to continue never looks settled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.contract import (
    STUCK_CODE,
    TERMINAL_STATES,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationChanged,
    ConversationCreated,
    DelegateEnded,
    Event,
    EventSource,
    LoopDetectionObservation,
    LoopRecoveryAction,
    MessageAction,
    ModelReply,
    RecallAction,
    WorkspaceUse,
    is_settled,
    priority_of,
)

REQUESTABLE_STATES = frozenset({AgentState.RUNNING, AgentState.PAUSED, AgentState.STOPPED})
"""The states that a user may request; other requests change nothing."""

ANSWERS = frozenset({AgentState.USER_CONFIRMED, AgentState.USER_REJECTED})
"""The answers that a user may give while the agent asks for a confirmation."""

RECOVERY_STATES = {1: AgentState.AWAITING_USER_INPUT, 2: AgentState.RUNNING, 3: AgentState.STOPPED}
"""The state that each option of a loop recovery leads to."""

NOT_STARTED = "ConversationExpired: The conversation was not started before it expired"
EXPIRED_CODE = "expired"
"""The error of a conversation that has not started in time, and its code."""

COPIED_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Status:
    """The agent's status as a reader of the log sees it.

    Attributes:
        state: its state after the last event.
        reason: why it is in that state, or empty.
        requested: a requested state that it has not announced yet.
        has_unread_message: a user's message has had no effect yet.
        asked_id: the action that waits for a confirmation.
        is_in_loop: the agent repeated itself, and the user may choose a recovery until the next message.
        is_recovering: a recovery was chosen and has not been performed yet.
    """

    state: AgentState = AgentState.LOADING
    reason: str = ""
    requested: AgentState | None = None
    has_unread_message: bool = False
    confirmation_id: int | None = None
    is_in_loop: bool = False
    is_recovering: bool = False

    def apply(self, event: Event) -> Status:
        """Return the status after one more event."""
        match event:
            case AgentStateChangedObservation(agent_state=state):
                # An error answers any request; another state answers only the request for it.
                is_answer = state in (self.requested, AgentState.ERROR)
                is_answer = is_answer or (state in ANSWERS and self.requested in ANSWERS)  # an edit may be refused
                is_stop = state is AgentState.STOPPED
                return Status(
                    state,
                    event.reason,
                    None if is_answer else self.requested,
                    confirmation_id=event.action_id,
                    is_in_loop=event.code == STUCK_CODE or (self.is_in_loop and not is_stop),
                    is_recovering=self.is_recovering and not is_stop,
                )
            case LoopDetectionObservation(is_over=is_over):
                return replace(self, is_in_loop=not is_over, is_recovering=self.is_recovering and not is_over)
            case LoopRecoveryAction(option=option) if self.is_in_loop and option in RECOVERY_STATES:
                return replace(self._request(RECOVERY_STATES[option]), is_recovering=True)
            case MessageAction(source=EventSource.USER):
                is_in_loop = self.is_in_loop and self.is_recovering
                return replace(self._request(AgentState.RUNNING), has_unread_message=True, is_in_loop=is_in_loop)
            case RecallAction():
                return replace(self, has_unread_message=False)
            case ChangeAgentStateAction(agent_state=state) if state in REQUESTABLE_STATES:
                return self._request(state)
            case ChangeAgentStateAction(agent_state=state) if self._is_answer(event):
                return replace(self, requested=state)
        return self

    def _is_answer(self, request: ChangeAgentStateAction) -> bool:
        is_asked = self.state is AgentState.AWAITING_USER_CONFIRMATION and self.requested is None
        return is_asked and request.agent_state in ANSWERS and request.action_id in (None, self.confirmation_id)

    def _request(self, state: AgentState) -> Status:
        # A request for the current state is never acknowledged; it only withdraws the previous request.
        return replace(self, requested=None if state is self.state else state)

    @property
    def is_unanswered(self) -> bool:
        """Whether the agent has not acknowledged a message or a request yet."""
        return self.has_unread_message or self.requested is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing more happens until the next message or request."""
        return is_settled(self.state) and not self.is_unanswered

    @property
    def is_terminal(self) -> bool:
        """Whether the conversation has ended, unless a user continues it."""
        return self.state in TERMINAL_STATES and not self.is_unanswered


def make_initial_fields(created: ConversationCreated, node: str) -> dict[str, str | int | float]:
    """Return the index fields of a new conversation, including those that decide its turn."""
    found = {"title": created.title, "agent": created.agent.name, "state": AgentState.LOADING.value}
    found |= {"workspace": created.workspace.model_dump_json()}
    found |= {"is_movable": "1"} if created.workspace.path is None else {}
    found |= {"node": node} if node else {}
    # Tool workers may not read the log; see `EventLog.load_origin` and `is_workspace_used`.
    found |= {"used": "0"} | ({"forked_from": created.forked_from} if created.forked_from else {})
    found |= dict(_make_label_fields(created.labels)) if created.labels else {}
    found |= {"class": str(priority_of(created.tenancy, is_headless=created.headless).rank)}
    if created.tenancy is not None and created.tenancy.tenant:
        found |= {"tenant": created.tenancy.tenant}
    return {**found}


def make_index_fields(events: Sequence[Event]) -> dict[str, str | int | float]:
    """Return the index fields for a whole log without an active owner."""
    replies = [event for event in events if isinstance(event, ModelReply)]
    ends = [event for event in events if isinstance(event, DelegateEnded)]
    usages = [reply.usage for reply in replies]
    status = fold_status(events)
    answered = find_latest_model(events)
    changed = {
        name: value
        for event in events
        if isinstance(event, ConversationChanged)
        for name, value in make_changed_fields(event)
    }
    return (
        changed
        | ({"model": answered} if answered else {})
        | {
            "state": status.state.value,
            "iterations": sum(reply.service == "agent" for reply in replies),
            "cost_usd": round(sum(r.cost_usd or 0.0 for r in replies) + sum(e.cost_usd for e in ends), 8),
            "has_unknown_cost": int(any(r.cost_usd is None for r in replies) or any(e.has_unknown_cost for e in ends)),
            "prompt_tokens": sum(u.prompt_tokens for u in usages) + sum(e.prompt_tokens for e in ends),
            "busy": "" if status.is_settled else "1",
            "completion_tokens": sum(u.completion_tokens for u in usages) + sum(e.completion_tokens for e in ends),
        }
    )


def make_copied_fields(created: ConversationCreated, events: Sequence[Event]) -> dict[str, str | int | float]:
    """Return the index fields of a conversation created with events of another log.

    Args:
        created: its first event; also a copy if it has a timestamp.
        events: the events after it.
    """
    copied = f"{2 if created.timestamp is None else 1}:{len(events) + 1}"
    is_used = any(event.workspace_use is not WorkspaceUse.NONE for event in events)
    return make_index_fields(events) | {"copied": copied, "used": str(int(is_used))}


def find_copied_ids(about: Mapping[str, str]) -> range:
    """Return the ids of the events copied from another log; an invalid range counts as empty."""
    found = COPIED_RANGE.fullmatch(about.get("copied", ""))
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)


def find_latest_model(events: Sequence[Event]) -> str:
    """Return the model that answered the agent last; empty if no event has one."""
    replies = (event for event in reversed(events) if isinstance(event, ModelReply))
    return next((reply.model for reply in replies if reply.service == "agent" and reply.model), "")


def make_changed_fields(change: ConversationChanged) -> list[tuple[str, str]]:
    """Return the index fields that a change sets, with their values."""
    found = [("agent", change.agent.name)] if change.agent is not None else []
    found += [("title", change.title)] if change.title is not None else []
    return found + (_make_label_fields(change.labels) if change.labels is not None else [])


def _make_label_fields(labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the index fields for labels: those shown, and those that the store's functions index."""
    ordered = sorted(labels.items())
    return [("labels", json.dumps(dict(ordered))), ("label_index", " ".join("=".join(label) for label in ordered))]


def fold_status(events: Iterable[Event]) -> Status:
    """Return the status after these events, which start with the conversation's first."""
    found = Status()
    for event in events:
        found = found.apply(event)
    return found
