"""A log as a trajectory of OpenHands V0, a JSON list of events (OpenHands 3.4).

Holds: each event has exactly the fields that the original's reader accepts, and ids from 0 without gaps; references use
these ids. Further data of the log is under `EXTENSION`, so that an import of the trajectory gives the same
conversation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from broker.contract import (
    BrowseURLAction,
    CmdOutputObservation,
    CodeSearchAction,
    CondensationAction,
    ConversationCreated,
    Event,
    EventSource,
    IPythonRunCellAction,
    ModelReply,
    Observation,
    OfferedToolAction,
    RecallAction,
    RiskyAction,
    find_rolled_back,
)
from deckhands.client import Metrics, MetricsFold
from deckhands.interop.openhands.model_responses import make_unknown_response, to_reply_extension, to_response
from deckhands.interop.openhands.v0_kinds import (
    EARLIER_EVENTS,
    EXTENSION,
    FAMILIES,
    HEAD,
    PLACES,
    SUBSTITUTES,
    list_names,
)

MAX_MESSAGE_QUERY_CHARS = 50

Fields = dict[str, Any]


def to_trajectory(events: Sequence[Event]) -> tuple[list[Fields], Counter[str]]:
    """Return a log as a trajectory, and the counts of events without an equivalent, by kind.

    Args:
        events: whole, from the first one on.
    """
    writing, without = _TrajectoryWriter(events), find_rolled_back(events)
    for event in events:
        if event.id in without:  # a trajectory has only the agent's history
            writing.left_out[event.kind] += 1
        else:
            writing.write(event)
    return writing.written, writing.left_out + Counter({"model.reply": len(writing.replies)})


class _TrajectoryWriter:
    """The state of converting a log into a trajectory."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.written: list[Fields] = []
        self.left_out: Counter[str] = Counter()
        self.replies: list[ModelReply] = []
        """Those that no event carries yet."""
        self._all_replies = {event.id: event for event in events if isinstance(event, ModelReply)}
        self._metrics = MetricsFold()
        self._ids: list[int] = []
        """Of the events that are written, by their place in the trajectory."""

    def write(self, event: Event) -> None:
        """Write the next event of the log, if it has a name in trajectories."""
        self._metrics.add(event)
        if isinstance(event, ModelReply):
            self.replies.append(event)
            return
        family, name = _name_of(event)
        if not name:
            if not isinstance(event, ConversationCreated):
                self.left_out[event.kind] += 1
            return
        record = self._convert(event, family, name)
        self._ids.append(event.id)
        self.written.append(record)
        self.replies = []

    def _convert(self, event: Event, family: str, name: str) -> Fields:
        head: Fields = {
            "id": len(self.written),
            "timestamp": event.timestamp.replace(tzinfo=None).isoformat() if event.timestamp else None,
            "source": event.source.value,
            "message": _message_of(event, name),
            "cause": self._id_of(event.cause),
            family: name,
        }
        call = event.tool_call_metadata
        if call is not None:
            reply = self._all_replies.get(call.reply_id)
            response = make_unknown_response(call) if reply is None else to_response(reply)
            head["tool_call_metadata"] = call.model_dump(exclude={"reply_id"}) | {"model_response": response}
        own, extra = self._fields_of(event, family, name)
        if call is not None:
            extra["reply_id"] = call.reply_id
        if self.replies:
            extra["replies"] = [self._reply(reply, event) for reply in self.replies]
        if family == "observation":
            body: Fields = {"content": own.pop("content", ""), "extras": own, "success": _success_of(event, name)}
        else:
            body = {"args": own, "timeout": extra.pop("timeout", None)}
            if event.source is EventSource.AGENT:
                body["llm_metrics"] = _sums(self._metrics.sums)
        body[EXTENSION] = extra or None
        return {key: value for key, value in (head | body).items() if value is not None}

    def _fields_of(self, event: Event, family: str, name: str) -> tuple[Fields, Fields]:
        """Return the fields that the original accepts, and our further fields."""
        wire = {key: value for key, value in event.wire().items() if key not in HEAD}
        defaults = {name: field.default for name, field in type(event).model_fields.items()}
        wire |= {field: self._id_of(wire[field]) for field in EARLIER_EVENTS if field in wire}
        wire |= {field: self._place_of(wire[field]) for field in PLACES if field in wire}
        if isinstance(event, CondensationAction):
            wire |= self._convert_forgotten(event)
        if event.kind != f"{family}.{name}":
            shown = _make_substitute(event)
            extra = {key: value for key, value in wire.items() if shown.get(key) != value}
            return shown, {"kind": event.kind} | {key: value for key, value in extra.items() if value is not None}
        if event.kind == "action.system":
            if "tools" in wire:
                wire["tools"] = [{"type": "function", "function": {"name": tool}} for tool in wire["tools"]]
            wire["openhands_version"] = wire.pop("version", "")
        taken = FAMILIES[family][name] | {"content"}
        own = {key: value for key, value in wire.items() if key in taken and value is not None}
        extra = {key: value for key, value in wire.items() if key not in own and value != defaults.get(key)}
        knowledge = own.get("microagent_knowledge")
        if knowledge and any("path" in item for item in knowledge):  # the original has no rules for files
            own["microagent_knowledge"] = [{key: item[key] for key in item if key != "path"} for item in knowledge]
            extra["microagent_knowledge"] = knowledge
        return own, {key: value for key, value in extra.items() if value not in (None, {}, [])}

    def _reply(self, reply: ModelReply, event: Event) -> Fields:
        call = event.tool_call_metadata
        has_response = call is not None and call.reply_id == reply.id
        return to_reply_extension(reply, seen=self._place_of(reply.seen_id), has_response=has_response)

    def _id_of(self, event_id: int | None) -> int | None:
        """Return the place of an event in the trajectory; None if it has none."""
        place = self._place_of(event_id) if event_id else -1
        return place if place >= 0 and self._ids[place] == event_id else None

    def _place_of(self, event_id: int) -> int:
        """Return the place of the last written event up to this one; -1 for none."""
        return bisect_right(self._ids, event_id) - 1

    def _convert_forgotten(self, event: CondensationAction) -> Fields:
        """Return the forgotten events by their ids in the trajectory; a range covers the written events."""
        start, end = event.forgotten_events_start_id, event.forgotten_events_end_id
        if start is None or end is None:
            places = (self._id_of(event_id) for event_id in event.forgotten_event_ids or ())
            return {"forgotten_event_ids": [place for place in places if place is not None]}
        first, last = self._place_of(start - 1) + 1, self._place_of(end)
        if first > last:
            return {"forgotten_event_ids": [], "forgotten_events_start_id": None, "forgotten_events_end_id": None}
        return {"forgotten_events_start_id": first, "forgotten_events_end_id": last}


def _name_of(event: Event) -> tuple[str, str]:
    """Return the family and the name of an event in OpenHands; an empty name if it has none."""
    family = event.kind.partition(".")[0]
    names = list_names(event.kind)
    if event.kind == "observation.finish_verdict":
        return family, names[0] if getattr(event, "is_accepted", False) else names[1]
    return family, names[0] if names else ""


def _make_substitute(event: Event) -> Fields:
    """Return the fields of the substitute for an event that OpenHands has no name for."""
    wire = event.wire()
    name = event.kind.partition(".")[2]
    if isinstance(event, Observation):
        content = event.agent_text or event.content or event.sentence
        if event.kind in SUBSTITUTES:
            is_code = event.kind == "observation.search_code"
            return {"content": content} | ({"code": wire["question"]} if is_code else {})
        return {"content": content, "name": wire.get("name", name), "arguments": {}}
    own = {key: wire[key] for key in ("thought", "security_risk") if key in wire}
    if isinstance(event, CodeSearchAction):
        code = f"print({event.question}(**{dict(event.arguments)!r}))"
        return own | {"code": code, "confirmation_state": event.confirmation_state.value}
    if isinstance(event, OfferedToolAction):
        return own | {"name": event.name, "arguments": wire["arguments"]}
    tool = getattr(event, "tool_spec", None)
    arguments = {key: value for key, value in wire.items() if key not in HEAD | RiskyAction.model_fields.keys()}
    return own | {"name": tool.name if tool is not None else name, "arguments": arguments}


def _sums(metrics: Metrics) -> Fields:
    """Return the metrics that the original copies onto every action: without the lists of calls (OpenHands 4.7)."""
    return {
        "accumulated_cost": metrics.accumulated_cost,
        "max_budget_per_task": metrics.max_budget_per_task,
        "accumulated_token_usage": asdict(metrics.accumulated_token_usage),
        "costs": [],
        "response_latencies": [],
        "token_usages": [],
    }


def _success_of(event: Event, name: str) -> bool | None:
    """Return the `success` field of commands and cells; None for all others, which have none in the original."""
    if isinstance(event, CmdOutputObservation):
        return event.exit_code == 0
    return True if name == "run_ipython" else None


def _message_of(event: Event, name: str) -> str:
    """Return the readable sentence of an event; empty if the original has none."""
    match event:
        case Observation() if name in ("delegate", "agent_state_changed", "loop_detection"):
            return ""
        case RecallAction():
            return f"Looking up what is known about: {event.query[:MAX_MESSAGE_QUERY_CHARS]}"
        case BrowseURLAction():
            return f"Opening {event.url}"
        case IPythonRunCellAction():
            return f"Running Python: {event.code}"
    if name in ("message", "system"):
        return str(getattr(event, "content", ""))
    if event.sentence != event.kind:
        return event.sentence
    if isinstance(event, Observation):
        return event.content or _SENTENCES.get(event.kind, "")
    return _SENTENCES.get(event.kind, "")


_SENTENCES: Mapping[str, str] = {
    "action.null": "Nothing to do",
    "action.task_tracking": "Keeping the task list",
    "action.loop_recovery": "",
    "action.note": "Keeping a note",
    "observation.null": "Nothing to report",
    "observation.recall": "Looked up what is known",
    "observation.run_ipython": "The cell has run.",
}
