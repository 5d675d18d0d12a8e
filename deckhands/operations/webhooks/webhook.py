"""Webhooks and deliveries as values: the events that a webhook gets, and the body of a delivery.

Holds: an event leads to at most one delivery for each webhook. The id of a delivery follows from the webhook, the
conversation and the event, so planning it twice has no effect.
Source: A2A protocol 1.0, section 4.3, for the form of its push notifications.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from broker.contract import (
    TERMINAL_STATES,
    WAITING_FOR_USER_STATES,
    AgentState,
    AgentStateChangedObservation,
    Event,
    find_kinds,
    is_settled,
    render_error,
)

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


SETTLED = "conversation.settled"
WAITING = "conversation.waiting"
STATE_CHANGED = "conversation.state_changed"
OTHER = "conversation.event"
STATES = (WAITING, SETTLED, STATE_CHANGED)
"""The names of a change of state: a delivery has the first name that applies and that its webhook gets."""
MAX_URL_CHARS = 2_000
MAX_CHOSEN = 32
MAX_EVENT_BYTES = 8_192
"""For a longer event, only the id is sent."""
RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0, 1_800.0, 7_200.0, 18_000.0, 36_000.0)
"""The pauses between attempts; after the last attempt, a delivery has failed."""


def check_choice(name: str) -> str:
    """Return the name of an event that a webhook may get, checked.

    Raises:
        ValueError: there is no such event.
    """
    if name not in STATES and name not in find_kinds():
        raise ValueError(f"there is no event {ascii(name)[:100]}; use {', '.join(STATES)} or a kind in docs/events.md")
    return name


Chosen = Annotated[str, Field(max_length=100), AfterValidator(check_choice)]


class Webhook(BaseModel):
    """A registered webhook.

    Attributes:
        tenant: the tenant whose conversations it reports; `*` for all tenants.
        conversation_id: the only conversation that it reports; empty for all of the tenant.
        events: the events that it gets: names of `STATES`, and kinds.
        secret: signs deliveries; encrypted and in base64.
        created: the time of its creation; it gets no earlier event.
        why_off: the reason why it was turned off automatically; empty if it was not.
        form: the form of deliveries: ours, or that of A2A's push notifications.
        token: for A2A: sent back to the receiver; encrypted and in base64; empty for none.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    form: Literal["deckhands", "a2a"] = "deckhands"
    token: str = ""
    tenant: str
    url: str
    events: tuple[str, ...]
    conversation_id: str = ""
    is_enabled: bool = True
    secret: str = ""
    created: AwareDatetime
    why_off: str = ""

    def match_event(self, event: Event) -> str:
        """Return the name under which the webhook gets an event; empty if it does not get it."""
        if isinstance(event, AgentStateChangedObservation):
            fitting = list_types(event.agent_state)
            found = next((name for name in STATES if name in fitting and name in self.events), "")
            if found:
                return found
        return OTHER if event.kind in self.events else ""

    def is_for(self, conversation_id: str, tenant: str) -> bool:
        """Return whether the webhook reports a conversation."""
        is_its = self.tenant in ("*", tenant) and self.conversation_id in ("", conversation_id)
        return self.is_enabled and is_its


class Delivery(BaseModel):
    """One event for one webhook.

    Attributes:
        id: the header `webhook-id`, the same in every attempt.
        body: the body of the request.
        attempts: the number of attempts so far.
        next_attempt: when the next attempt is due; None for at once or never.
        status: the HTTP status of the latest attempt; None if there was no answer.
        error: the error of the latest attempt; empty for none.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    conversation_id: str
    event_id: int
    type: str
    body: str
    planned: AwareDatetime
    state: Literal["waiting", "delivered", "failed"] = "waiting"
    attempts: int = 0
    next_attempt: AwareDatetime | None = None
    status: int | None = None
    error: str = ""


def list_types(state: AgentState) -> set[str]:
    """Return the names that apply to a state."""
    found = {STATE_CHANGED}
    if is_settled(state):
        found.add(SETTLED)
    if state in WAITING_FOR_USER_STATES - {AgentState.PAUSED}:
        found.add(WAITING)
    return found


def build_delivery(
    hook: Webhook, conversation_id: str, event: Event, about: Mapping[str, str], now: datetime
) -> Delivery:
    """Return the delivery of an event.

    Args:
        about: the conversation's row in the index.
    """
    what = hook.match_event(event)
    found: dict[str, Any] = {
        "conversation_id": conversation_id,
        "event_id": event.id,
        "kind": event.kind,
        "tenant": about.get("tenant", ""),
        "title": about.get("title", ""),
        "labels": json.loads(about.get("labels") or "{}"),
    }
    if isinstance(event, AgentStateChangedObservation):
        found |= {"state": event.agent_state.value, "is_over": event.agent_state in TERMINAL_STATES}
        found |= {"reason": render_error(event.reason)[:1_000], "code": event.code, "action_id": event.action_id}
    if what == OTHER:
        wire = event.export()
        is_short = len(json.dumps(wire)) <= MAX_EVENT_BYTES
        found |= {"event": wire} if is_short else {"event": None}
    moment = event.timestamp.isoformat() if event.timestamp is not None else ""
    body = json.dumps({"type": what, "timestamp": moment, "data": found}, ensure_ascii=True)
    if hook.form == "a2a" and isinstance(event, AgentStateChangedObservation):
        body = render_push_body(conversation_id, event)
    named = hashlib.sha256(f"{hook.id}\n{conversation_id}\n{event.id}\n{moment}\n{event.kind}".encode()).hexdigest()[
        :32
    ]
    return Delivery(
        id=f"msg_{named}",
        conversation_id=conversation_id,
        event_id=event.id or 0,
        type=what,
        body=body,
        planned=now,
    )


def render_push_body(conversation_id: str, event: AgentStateChangedObservation) -> str:
    """Return a change of state in the form that A2A's clients read."""
    status: dict[str, object] = {"state": A2A_STATES[event.agent_state]}
    if event.timestamp is not None:
        status["timestamp"] = event.timestamp.isoformat()
    update = {"taskId": conversation_id, "contextId": conversation_id, "status": status}
    return json.dumps({"statusUpdate": update}, ensure_ascii=True)
