"""A trajectory of OpenHands V0, a JSON list of events, as a log (OpenHands 3.4).

Names and fields of actions and observations are the same in both. Only model replies differ: OpenHands has a copy in
every resulting event, Deckhands a separate event. A trajectory written by Deckhands has more data, under `EXTENSION`.

Holds: events get ids from 1 without gaps, replies come before their actions, and references point to the right earlier
events or nowhere. An unreadable event affects no other event. An action without a result gets a substitute, so that an
import never runs it again.
Does not: judge OpenHands' decisions, because an imported log counts as inherited, like that of a fork.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.contract import (
    AgentSpec,
    ConfirmationStatus,
    ConversationCreated,
    Event,
    EventSource,
    ModelReply,
    event_from_wire,
)
from broker.runtime import UsageError
from deckhands.client import derive_title
from deckhands.interop.openhands.model_responses import OWN_FIELDS, parse_reply_fields, to_object
from deckhands.interop.openhands.recordings import (
    LOST_IDS,
    UNREADABLE,
    ImportFindings,
    check_fit,
    parse_event_list,
    read_text,
)
from deckhands.interop.openhands.renumbering import Renumbering
from deckhands.interop.openhands.results import (
    NO_RESULTS,
    is_result,
    is_run_elsewhere,
    make_missing_result,
    needs_result,
)
from deckhands.interop.openhands.spending import RecordedSpending
from deckhands.interop.openhands.v0_fields import convert_action, convert_observation, to_utc_text
from deckhands.interop.openhands.v0_kinds import EARLIER_EVENTS, EXTENSION, FAMILIES, HEAD, PLACES, list_names
from deckhands.interop.openhands.v0_shape import TrajectoryShape, is_hidden_from_model, parse_record_name

ORIGIN = "openhands"
MAX_NAME_CHARS = 100

Fields = Mapping[str, Any]


def read_trajectory(path: Path, conversation_id: str) -> tuple[list[Event], ImportFindings]:
    """Read a trajectory as the log of a conversation, and return the findings.

    Raises:
        UsageError: the file cannot be read or is not a trajectory.
    """
    findings = ImportFindings()
    try:
        records = list(parse_event_list(read_text(path), findings))
    except ValueError as error:
        raise UsageError(
            f"{path} is not a trajectory: {error}.", remedy="It is a JSON list of events, as OpenHands saves it."
        ) from error
    events = _TrajectoryReader(conversation_id, findings, records).log()
    if len(events) == 1:
        raise UsageError(
            " ".join([f"{path} is not a trajectory: it holds no event that can be read.", *findings.faults[:1]]),
            remedy="It is a JSON list of events, as OpenHands saves it.",
        )
    return events, findings


class _TrajectoryReader:
    """The state of converting a trajectory into a log."""

    def __init__(self, conversation_id: str, findings: ImportFindings, records: Sequence[tuple[int, Fields]]) -> None:
        self._conversation_id = conversation_id
        self._findings = findings
        self._records = records
        self._shape = TrajectoryShape.of([record for _, record in records])
        self._events: list[Event] = []
        self._numbers = Renumbering()
        self._spending = RecordedSpending()
        self._replies: dict[Hashable, int] = {}
        self._waiting: dict[str, int] = {}
        """Actions that wait for a confirmation, by their calls: OpenHands writes the same call again afterwards."""
        self._answered: set[int] = set()
        self._unrecalled: Event | None = None
        self._now: str | None = None

    def log(self) -> list[Event]:
        """Return the events, from the creation on."""
        for index, (position, record) in enumerate(self._records):
            self._now = to_utc_text(record.get("timestamp")) or to_utc_text(
                to_object(record.get("args")).get("timestamp")
            )
            self._spending.add_totals(record.get("llm_metrics"))
            if index in self._shape.of_delegates:
                self._findings.left_out["events of delegates, whose results are kept"] += 1
                continue
            self._add_record(index, position, record)
        self._settle_rest()
        self._settle_costs()
        said = (event for event in self._events if event.kind == "action.message" and event.source is EventSource.USER)
        texts = (str(getattr(event, "content", "")) for event in said)
        task = next((text for text in texts if text.strip()), "A trajectory")
        agents = (str(getattr(event, "agent_class", None) or "") for event in self._events)
        named = (name for name in agents if 0 < len(name) <= MAX_NAME_CHARS)
        created = ConversationCreated(
            id=1,
            timestamp=self._events[0].timestamp if self._events else None,
            source=EventSource.USER,
            conversation_id=self._conversation_id,
            agent=AgentSpec(name=next(named, "CodeActAgent")),
            title=derive_title(task),
            forked_from=f"{ORIGIN}@{len(self._events) + 1}",
        )
        return [created, *self._events]

    def _add_record(self, index: int, position: int, record: Fields) -> None:
        """Add a recorded event; of an unreadable event, at most its reply or the end of its action is kept."""
        family, name = parse_record_name(record)
        own_id = record.get("id")
        key: Hashable = own_id if type(own_id) is int else ("position", position)
        first = len(self._events)
        event: Event | None = None
        try:
            event = self._event_of(index, record, family, name)
            self._append(event)
        except UNREADABLE as error:
            event = None
            self._findings.add_fault(f"Event {position} ({name[:40] or 'of no kind'})", error)
            self._replace_result(record, family)
        if event is not None and index not in self._shape.answered and needs_result(event):
            self._add_missing_result(event)
        made = [event for event in self._events[first:] if not isinstance(event, ModelReply)]
        is_shown = not is_hidden_from_model(record, family, name)
        self._numbers.add(key, made, meant=event.id if event else None, is_shown=is_shown)

    def _event_of(self, index: int, record: Fields, family: str, name: str) -> Event:
        """Return the event of a record, after appending its replies and other events that must come before it."""
        if not name:
            raise ValueError("it is neither an action nor an observation")
        extension = to_object(record.get(EXTENSION))
        kind = self._kind_of(extension, family, name)
        self._recall_missing(record, family, name)
        own = convert_action(record) if family == "action" else convert_observation(record)
        own |= {key: value for key, value in extension.items() if key not in ("kind", "reply_id", "replies")}
        own = {key: value for key, value in own.items() if key not in HEAD}
        self._refer(own, kind)
        wire = own | {"kind": kind, "timestamp": self._now, "source": record.get("source") or "environment"}
        self._add_replies(extension, record)
        metadata = record.get("tool_call_metadata")
        if isinstance(metadata, dict):
            wire["tool_call_metadata"] = self._call_of(metadata, extension)
        elif family == "action" and record.get("source") == "agent" and self._is_step(record, name):
            event_from_wire(wire, self._next_id)  # without its action, the reply would be empty
            self._add_spoken_reply(kind, own)
        cause = self._cause_of(index, record, kind)
        if cause is not None:
            wire["cause"] = cause
            if kind == "observation.delegate" and "delegate_id" not in own:
                wire["delegate_id"] = cause
        self._link_copy(wire)
        return event_from_wire({key: value for key, value in wire.items() if value is not None}, self._next_id)

    def _kind_of(self, extension: Fields, family: str, name: str) -> str:
        if name not in FAMILIES[family]:
            raise ValueError(f"OpenHands has no {family} of this name")
        kind = extension.get("kind", f"{family}.{name}")
        if kind != f"{family}.{name}" and not (
            isinstance(kind, str) and kind.startswith(f"{family}.") and name in list_names(kind)
        ):
            raise ValueError(f"{family}.{name} cannot stand for {kind!r}")
        return str(kind)

    def _append(self, event: Event) -> None:
        check_fit(event)
        self._events.append(event)
        if event.cause is not None and is_result(event):
            self._answered.add(event.cause)
        if event.kind == "action.message" and event.source is EventSource.USER:
            self._unrecalled = event
        elif event.kind == "action.recall":
            self._unrecalled = None

    def _add(self, kind: str, **fields: Any) -> int:
        """Append an event that the trajectory does not have, and return its id."""
        wire = {"kind": kind, "timestamp": self._now, **fields}
        event = event_from_wire({key: value for key, value in wire.items() if value is not None}, self._next_id)
        self._append(event)
        return event.id

    @property
    def _next_id(self) -> int:
        return len(self._events) + 2  # the creation is the first

    # References

    def _refer(self, own: dict[str, Any], kind: str) -> None:
        """Map the references in a record to events of the log."""
        for name in EARLIER_EVENTS:
            if name in own:
                found = self._numbers.find_event(own.pop(name))
                if found is not None:
                    own[name] = found
                else:
                    self._findings.left_out["links to actions that are not here"] += 1
        for name in PLACES:
            if type(own.get(name)) is int:
                own[name] = self._numbers.find_latest(own[name])
        if kind == "action.condensation":
            self._forget(own)

    def _forget(self, own: dict[str, Any]) -> None:
        ids, start, end = (own.pop(name, None) for name in _FORGOTTEN)
        if isinstance(ids, list) and start is None and end is None:
            found, lost = self._numbers.forget(ids)
            if lost:
                self._findings.left_out[LOST_IDS] += lost
            own["forgotten_event_ids"] = found
        elif ids is None and type(start) is int and type(end) is int:
            within = self._numbers.forget_between(start, end)
            if isinstance(within, list):
                own["forgotten_event_ids"] = within
            else:
                own["forgotten_events_start_id"], own["forgotten_events_end_id"] = within
        else:
            raise ValueError("a condensation forgets either a list or a range of events")
        if type(own.get("summary_offset")) is int:
            own["summary_offset"] = self._numbers.map_offset(own["summary_offset"])

    def _cause_of(self, index: int, record: Fields, kind: str) -> int | None:
        """Return the action that a record answers; None if there is none, or if it has been answered."""
        asked = self._shape.delegate_of.get(index)
        named = record.get("cause") if asked is None else self._key_at(asked)
        if named is None or isinstance(named, bool):
            return None
        found = self._numbers.find_event(named)
        if found is None or not self._events[found - 2].kind.startswith("action."):
            self._findings.left_out["links to actions that are not here"] += 1
            return None
        if kind in NO_RESULTS:
            return None if is_run_elsewhere(self._events[found - 2]) else found
        if kind.startswith("observation.") and found in self._answered:
            self._findings.left_out["links to actions that already have a result"] += 1
            return None
        return found

    def _key_at(self, index: int) -> Hashable:
        position, record = self._records[index]
        own_id = record.get("id")
        return own_id if type(own_id) is int else ("position", position)

    def _link_copy(self, wire: dict[str, Any]) -> None:
        """Link a confirmed or rejected copy to the waiting action that it replaces.

        OpenHands writes the same call again.
        """
        call_id = (wire.get("tool_call_metadata") or {}).get("tool_call_id", "")
        state = wire.get("confirmation_state")
        if state == ConfirmationStatus.AWAITING_CONFIRMATION:
            self._waiting[call_id or f"event {self._next_id}"] = self._next_id
        elif state is not None:
            replaced = self._waiting.pop(call_id, None)
            if "replaces" not in wire and replaced is not None:
                wire["replaces"] = replaced

    # Replies

    def _add_replies(self, extension: Fields, record: Fields) -> None:
        """Append the replies in a record written by Deckhands, as they were in the original log."""
        replies = extension.get("replies")
        for given in replies if isinstance(replies, list) else ():
            metadata = to_object(record.get("tool_call_metadata"))
            has_response = extension.get("reply_id") == given["id"] and metadata
            response = metadata.get("model_response") if has_response else given.get("response")
            fields = parse_reply_fields(response, metadata if has_response else {})
            fields |= {name: given[name] for name in (*OWN_FIELDS, "tool_calls") if name in given}
            seen = given.get("seen")
            seen_id = self._numbers.find_latest(seen) if type(seen) is int else self._next_id - 1
            self._add_reply(("own", given["id"]), fields, seen_id=max(seen_id, 1), is_own=True)

    def _call_of(self, metadata: Fields, extension: Fields) -> dict[str, Any]:
        """Return the call that an event belongs to; append its reply if this is its first event."""
        own_id = extension.get("reply_id")
        key: Hashable = ("own", own_id) if type(own_id) is int else None
        if key not in self._replies:
            fields = parse_reply_fields(metadata.get("model_response"), metadata)
            calls = tuple(call["id"] for call in fields["tool_calls"])
            # The id alone is not enough: some servers give the same id to every response.
            key = (fields["response_id"], fields["content"], calls)
            if key not in self._replies:
                self._add_reply(key, fields, seen_id=self._next_id - 1)
        return {
            "function_name": metadata["function_name"],
            "tool_call_id": metadata["tool_call_id"],
            "reply_id": self._replies[key],
            "total_calls_in_response": metadata.get("total_calls_in_response", 1),
        }

    def _is_step(self, record: Fields, name: str) -> bool:
        """Return whether a reply caused an action of the agent without a tool call."""
        if self._shape.is_ours or name == "system":
            return False
        return name == "message" or ("llm_metrics" in record and self._spending.has_rest())

    def _add_spoken_reply(self, kind: str, own: Fields) -> None:
        """Append the reply of an event without a call: a message, or an action that was written as text."""
        named = {"action.condensation": ("summary", "condenser"), "action.message": ("content", "agent")}
        name, service = named.get(kind, ("thought", "agent"))
        text = own.get(name)
        fields = {"content": text if isinstance(text, str) else "", "service": service}
        self._add_reply(("spoken", self._next_id), fields, seen_id=self._next_id - 1)

    def _add_reply(self, key: Hashable, fields: dict[str, Any], *, seen_id: int, is_own: bool = False) -> None:
        given = self._spending.assign_cost(fields, is_own=is_own)
        self._replies[key] = self._add("model.reply", **{"source": "agent", "seen_id": seen_id, **given})

    def _settle_costs(self) -> None:
        """Add the remaining costs to the last reply, so that the sums match the recording."""
        places = (n for n in reversed(range(len(self._events))) if isinstance(self._events[n], ModelReply))
        place = next(places, None)
        if place is not None:
            reply = self._events[place]
            assert isinstance(reply, ModelReply)
            self._events[place] = self._spending.assign_rest(reply)

    # Missing parts of a recording

    def _recall_missing(self, record: Fields, family: str, name: str) -> None:
        """Append the recall of a message before the agent acts on it; the first versions did not record it."""
        if self._shape.has_recalls or self._unrecalled is None or family != "action":
            return
        if record.get("source") != "agent" or name in ("system", "condensation", "condensation_request"):
            return
        earlier = any(event.kind == "action.recall" for event in self._events)
        recall_type = "knowledge" if earlier else "workspace_context"
        query = getattr(self._unrecalled, "content", "")
        recall = self._add("action.recall", source="user", recall_type=recall_type, query=query)
        self._add("observation.null", cause=recall)

    def _replace_result(self, record: Fields, family: str) -> None:
        """Substitute a result that cannot be read."""
        cause = self._numbers.find_event(record.get("cause")) if family == "observation" else None
        if cause is not None and is_run_elsewhere(self._events[cause - 2]):
            self._add_missing_result(self._events[cause - 2])

    def _settle_rest(self) -> None:
        """Append substitutes for the results of the remaining actions, except those that await confirmation."""
        changes = (event for event in reversed(self._events) if event.kind == "observation.agent_state_changed")
        is_asked = getattr(next(changes, None), "agent_state", "") == "awaiting_user_confirmation"
        asked = set(self._waiting.values()) if is_asked else set()
        settled = asked | self._answered | {getattr(event, "replaces", None) for event in self._events}
        for event in list(self._events):
            if event.id not in settled and is_run_elsewhere(event):
                self._add_missing_result(event)

    def _add_missing_result(self, action: Event) -> None:
        if action.id not in self._answered:
            self._append(make_missing_result(action, event_id=self._next_id, timestamp=self._now))


_FORGOTTEN = ("forgotten_event_ids", "forgotten_events_start_id", "forgotten_events_end_id")
