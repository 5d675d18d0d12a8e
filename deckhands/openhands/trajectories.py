"""Trajectories of OpenHands V0: read as a conversation of ours, and written from one.

A trajectory is a JSON list of events (OpenHands 3.4). Names and fields of actions and observations are the same here;
what differs is where a model's reply stands: there a copy in every event it led to, here once, as a separate event.

Holds: what is read gets ids from 1 without gaps, replies before their actions, causes that point to the right events;
what is written has ids from 0. Events that have no name there are left out.
Does not: judge what OpenHands decided: an imported log counts as taken over from elsewhere, as a fork does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from broker.contract.code_search import CodeSearchAction
from broker.contract.codec import event_from_wire
from broker.contract.events import (
    AgentSpec,
    ConfirmationStatus,
    ConversationCreated,
    DelegateEnded,
    Event,
    EventSource,
    ModelReply,
)
from broker.runtime.errors import CorruptEntry, UnknownKind, UsageError
from deckhands.client.tasks import title_of
from deckhands.reading.metrics import Metrics, metrics_of, with_delegate, with_reply

ORIGIN = "openhands"
# fmt: off
ACTIONS = frozenset({
    "null", "message", "system", "run", "run_ipython", "browse", "browse_interactive", "read", "write", "edit",
    "call_tool_mcp", "think", "finish", "reject", "delegate", "recall", "change_agent_state", "condensation",
    "condensation_request", "task_tracking", "loop_recovery",
})
OBSERVATIONS = frozenset({
    "null", "success", "error", "user_rejected", "think", "condense", "loop_detection", "run", "run_ipython", "browse",
    "read", "write", "edit", "delegate", "agent_state_changed", "recall", "mcp", "download", "task_tracking",
})
# fmt: on
LEGACY_ARGS = {"is_confirmed": "confirmation_state", "images_urls": "image_urls", "openhands_version": "version"}
RENAMED = {
    "observation.outcome_unknown": "error",
    "action.search_code": "run_ipython",
    "observation.search_code": "run_ipython",
}
"""What has another name there."""
HEAD = ("id", "timestamp", "source", "cause", "tool_call_metadata", "timeout")

Fields = Mapping[str, Any]


def read_trajectory(path: Path, conversation_id: str) -> list[Event]:
    """Read a trajectory as the log of a conversation.

    Raises:
        UsageError: the file cannot be read or is no trajectory; names the event.
    """
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The trajectory {path} cannot be read: {error}.", remedy="Name another file.") from error
    if not isinstance(recorded, list) or not all(isinstance(event, dict) for event in recorded):
        raise UsageError(f"{path} is no trajectory.", remedy="It is a JSON list of events, as OpenHands saves it.")
    return _Reading(conversation_id).events_of(recorded)


class _Reading:
    """A trajectory on its way to a log."""

    def __init__(self, conversation_id: str) -> None:
        self._conversation_id = conversation_id
        self._events: list[Event] = []
        self._ids: dict[int, int] = {}
        self._replies: dict[str, int] = {}
        self._waiting: dict[str, int] = {}

    def events_of(self, recorded: Sequence[Fields]) -> list[Event]:
        for position, fields in enumerate(recorded):
            try:
                self._take(fields, position)
            except (CorruptEntry, UnknownKind, LookupError, TypeError, ValueError, AttributeError) as error:
                raise UsageError(f"Event {position} of the trajectory cannot be read: {error}") from error
        said = (event for event in self._events if event.kind == "action.message" and event.source is EventSource.USER)
        title = title_of(str(getattr(first, "content", ""))) if (first := next(said, None)) else "A trajectory"
        agents = (getattr(event, "agent_class", None) for event in self._events)
        created = ConversationCreated(
            id=1,
            timestamp=self._events[0].timestamp if self._events else None,
            source=EventSource.USER,
            conversation_id=self._conversation_id,
            agent=AgentSpec(name=next(filter(None, agents), "CodeActAgent")),
            title=title,
            forked_from=f"{ORIGIN}@{len(self._events) + 1}",
        )
        return [created, *self._events]

    def _take(self, fields: Fields, position: int) -> None:
        moment = utc_text(fields.get("timestamp"))
        metadata = fields.get("tool_call_metadata")
        call = self._call_of(metadata, moment) if metadata else None
        wire = _content(fields) | {"timestamp": moment, "source": fields.get("source") or "environment"}
        if call is not None:
            wire["tool_call_metadata"] = call
        self._link_copy(wire)
        cause = self._ids.get(fields.get("cause", -1))
        if cause is not None:
            wire["cause"] = cause
        self._ids[fields.get("id", position)] = self._next_id
        self._events.append(event_from_wire(wire, self._next_id))

    def _link_copy(self, wire: dict[str, Any]) -> None:
        """Say which waiting action a confirmed or rejected copy replaces: OpenHands writes the same call again."""
        call_id = (wire.get("tool_call_metadata") or {}).get("tool_call_id", "")
        given = self._ids.get(wire.pop("replaces", -1))
        if wire.get("confirmation_state") == ConfirmationStatus.AWAITING_CONFIRMATION:
            self._waiting[call_id] = self._next_id
        elif "confirmation_state" in wire:
            replaced = self._waiting.pop(call_id, None) if call_id else None
            if given or replaced:
                wire["replaces"] = given or replaced

    @property
    def _next_id(self) -> int:
        return len(self._events) + 2  # the creation is the first

    def _call_of(self, metadata: Fields, moment: str | None) -> dict[str, Any]:
        """Return which call an event belongs to, its reply written first if this is the first event of it."""
        response = metadata.get("model_response") or {}
        name = str(response.get("id") or metadata["tool_call_id"])
        if name not in self._replies:
            self._replies[name] = self._next_id
            self._events.append(event_from_wire(_reply(response, metadata, self._next_id, moment), self._next_id))
        return {
            "function_name": metadata["function_name"],
            "tool_call_id": metadata["tool_call_id"],
            "reply_id": self._replies[name],
            "total_calls_in_response": metadata.get("total_calls_in_response", 1),
        }


def _content(fields: Fields) -> dict[str, Any]:
    """Return kind and own fields of an event."""
    if "action" in fields:
        args = {LEGACY_ARGS.get(key, key): value for key, value in (fields.get("args") or {}).items()}
        if fields["action"] == "system":
            args["tools"] = [tool["function"]["name"] for tool in args.get("tools") or ()]
        if args.get("security_risk") not in (-1, 0, 1, 2):
            args.pop("security_risk", None)
        if fields.get("timeout") is not None:
            args["timeout"] = fields["timeout"]
        return {key: value for key, value in args.items() if value is not None} | {"kind": f"action.{fields['action']}"}
    extras = {key: value for key, value in (fields.get("extras") or {}).items() if value is not None}
    return extras | {"kind": f"observation.{fields['observation']}", "content": fields.get("content") or ""}


def _reply(response: Fields, metadata: Fields, reply_id: int, moment: str | None) -> dict[str, Any]:
    choice = (response.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"].get("arguments") or "{}"}
        for call in message.get("tool_calls") or ()
    ] or [{"id": metadata["tool_call_id"], "name": metadata["function_name"], "arguments": "{}"}]
    usage = response.get("usage") or {}
    return {
        "kind": "model.reply",
        "timestamp": moment,
        "content": message.get("content") or "",
        "tool_calls": calls,
        "model": response.get("model") or "",
        "response_id": response.get("id") or "",
        "stop_reason": choice.get("finish_reason") or "",
        "usage": {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")},
        "seen_id": reply_id - 1,
    }


def utc_text(text: Any) -> str | None:
    """Return a time of OpenHands', which may name no zone, with its zone, UTC; None for what is no text."""
    if not isinstance(text, str):
        return None
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def trajectory_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return a log as a trajectory of OpenHands V0.

    Args:
        events: whole, from the first one on.
    """
    replies = {event.id: event for event in events if isinstance(event, ModelReply)}
    metrics = metrics_of(events[:1])
    ids: dict[int, int] = {}
    written: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ModelReply):
            metrics = with_reply(metrics, event)
            continue
        if isinstance(event, DelegateEnded):
            metrics = with_delegate(metrics, event, "")
        family, _, name = event.kind.partition(".")
        name = RENAMED.get(event.kind, name)
        if name not in {"action": ACTIONS, "observation": OBSERVATIONS}.get(family, ()):
            continue
        ids[event.id] = len(written)
        written.append(_written(event, family, name, ids, replies=replies, metrics=metrics))
    return written


def _written(
    event: Event, family: str, name: str, ids: Mapping[int, int], *, replies: Mapping[int, ModelReply], metrics: Metrics
) -> dict[str, Any]:
    fields = event.wire()
    own = {key: value for key, value in fields.items() if key not in (*HEAD, "kind", "blobs", "content")}
    if "replaces" in own:
        own["replaces"] = ids.get(own["replaces"], -1)
    if isinstance(event, CodeSearchAction):
        own = {"code": f"print({event.question}(**{dict(event.arguments)!r}))", "thought": event.thought}
    head: dict[str, Any] = {
        "id": ids[event.id],
        "timestamp": event.timestamp.replace(tzinfo=None).isoformat() if event.timestamp else None,
        "source": event.source.value,
        "message": event.sentence,
        "cause": ids.get(event.cause) if event.cause else None,
        family: name,
    }
    call = event.tool_call_metadata
    if call is not None:
        reply = replies.get(call.reply_id)
        head["tool_call_metadata"] = call.model_dump(exclude={"reply_id"}) | {"model_response": _response(reply)}
    if family == "observation":
        body: dict[str, Any] = {"content": fields.get("content", ""), "extras": own}
    else:
        args = own | ({"content": fields["content"]} if "content" in fields else {})
        if name == "system":
            args["tools"] = [{"type": "function", "function": {"name": tool}} for tool in args.get("tools", ())]
            args["openhands_version"] = args.pop("version", "")
        body = {"args": args, "timeout": fields.get("timeout")}
        if event.source is EventSource.AGENT:
            body["llm_metrics"] = metrics.get() | {"costs": [], "response_latencies": [], "token_usages": []}
    return {key: value for key, value in (head | body).items() if value is not None}


def _response(reply: ModelReply | None) -> dict[str, Any] | None:
    if reply is None:
        return None
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    message = {"role": "assistant", "content": reply.content, "tool_calls": calls}
    usage = reply.usage
    return {
        "id": reply.response_id or f"reply-{reply.id}",
        "model": reply.model,
        "choices": [{"index": 0, "finish_reason": reply.stop_reason, "message": message}],
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
    }
