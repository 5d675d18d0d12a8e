"""The part of a log that a fresh program of the SDK needs to continue the conversation: pure functions.

A model's prompt is made from the log, so a program needs only the current turn: the message that started the turn, the
replies since, and the results of their calls. Of a long turn, the latest replies are enough.

Holds: a call has the same id in every program of the conversation; it is made from the reply and the call's index in
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from broker.contract import (
    ConversationChanged,
    ErrorObservation,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    Observation,
    PlanAcceptedObservation,
    parse_json,
)

MAX_RESTORED = 20
"""Replies that a fresh program is given again."""
SHOWN_CHARS = 20_000
BEGIN = "Continue."
SETTLED = "The call is settled."


@dataclass(frozen=True, slots=True)
class RestoredTurn:
    """The current turn.

    Attributes:
        query: the message that started it.
        replies: its latest replies, in order.
        observations: the answers to calls of these replies.
    """

    query: str
    replies: tuple[ModelReply, ...] = ()
    observations: tuple[Observation, ...] = ()


def restore_turn(events: Iterable[Event]) -> RestoredTurn:
    """Return the current turn of a log, without events that were taken back."""
    replies: list[ModelReply] = []
    observations: list[Observation] = []
    query = begun_by = BEGIN
    for event in events:
        if is_agent_reply(event):
            assert isinstance(event, ModelReply)
            if not replies:
                begun_by = query
            replies = [*replies, event][-MAX_RESTORED:] if event.tool_calls else []
        elif is_agent_change(event):
            replies = []
        elif isinstance(event, MessageAction) and event.source is EventSource.USER:
            query = to_query(event)
        elif isinstance(event, Observation):
            observations.append(event)
    if not replies:
        return RestoredTurn(query)
    kept = {reply.id for reply in replies}
    answers = tuple(one for one in observations if (key := find_call(one)) is not None and key[0] in kept)
    return RestoredTurn(begun_by, tuple(replies), answers)


def is_agent_reply(event: Event) -> bool:
    """Return whether an event is a reply to the agent's own question."""
    return isinstance(event, ModelReply) and event.service == "agent"


def is_agent_change(event: Event) -> bool:
    """Return whether another agent may continue after an event."""
    if isinstance(event, ConversationChanged):
        return event.agent is not None or event.loop is not None or event.tools is not None
    return isinstance(event, PlanAcceptedObservation)


def to_query(message: MessageAction) -> str:
    """Return a user's message as a query.

    It starts with a text of ours, so that the CLI never takes it for a command.
    """
    return f"Message {message.id}: {message.content}"[:SHOWN_CHARS]


def find_call(observation: Observation) -> tuple[int, str] | None:
    """Return the reply and the call that an observation answers."""
    metadata = observation.tool_call_metadata
    return None if metadata is None else (metadata.reply_id, metadata.tool_call_id)


def make_call_id(reply_id: int, place: int) -> str:
    """Return the id of a call in the SDK: providers' ids may repeat, and need not fit the protocol."""
    return f"toolu_{reply_id}_{place}"


def to_reply(reply: ModelReply, model: str) -> dict[str, Any]:
    """Return a reply in the form for `reply_stream`."""
    calls = [
        {"id": make_call_id(reply.id, place), "name": call.name, "input": _parse_arguments(call.arguments)}
        for place, call in enumerate(reply.tool_calls)
    ]
    return {"id": f"msg_{reply.id}", "model": model, "text": reply.content, "calls": calls}


def to_result(number: str, observation: Observation | None) -> dict[str, Any]:
    """Return the result of a call in the SDK's form; None if there is none or it is no longer needed."""
    text = SETTLED if observation is None else (observation.content or SETTLED)[:SHOWN_CHARS]
    return {"id": number, "text": text, "is_error": isinstance(observation, ErrorObservation)}


def drop_rolled_back(events: Sequence[Event], taken: set[int]) -> list[Event]:
    """Return a log without the events that were taken back."""
    return [event for event in events if event.id not in taken]


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
