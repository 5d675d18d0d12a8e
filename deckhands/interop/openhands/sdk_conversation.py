"""Conversations of OpenHands' SDK (V1), read as conversations of ours (OpenHands 13).

In the SDK, each tool call is an event with a copy of its part of the model's reply; here, the reply is one event before
its actions. The SDK has no events for states; they follow from the messages and actions.

Holds: every event with an equivalent is imported, with its time and its position; others are counted by name. An action
without a result gets a substitute, or stays pending if it awaited confirmation: an import never runs an action again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from broker.contract import (
    AgentState,
    ConfirmationStatus,
    ConversationCreated,
    Event,
    EventSource,
    ModelReply,
    Observation,
    event_from_wire,
)
from deckhands.client import derive_title
from deckhands.interop.openhands.recordings import LOST_IDS, UNREADABLE, ImportFindings, check_fit
from deckhands.interop.openhands.renumbering import Renumbering
from deckhands.interop.openhands.results import NO_RESULT
from deckhands.interop.openhands.sdk_directory import Fields, SdkDirectory
from deckhands.interop.openhands.sdk_fields import (
    convert_action,
    convert_sdk_tasks,
    join_texts,
    read_costs,
    read_totals,
)
from deckhands.interop.openhands.sdk_kinds import FAILED_EDIT
from deckhands.interop.openhands.spending import RecordedSpending
from deckhands.interop.openhands.v0_fields import to_utc_text

ORIGIN = "openhands-sdk"
ENDS: Mapping[str, AgentState] = {
    "finished": AgentState.FINISHED,
    "paused": AgentState.PAUSED,
    "error": AgentState.ERROR,
    "stuck": AgentState.ERROR,
    "idle": AgentState.AWAITING_USER_INPUT,
    "waiting_for_confirmation": AgentState.AWAITING_USER_CONFIRMATION,
}
"""The agent state for an `execution_status`; any other is in progress."""
SHOWN = frozenset(
    {"SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
)
"""Events that the SDK shows to a model."""
NOTE_KINDS = frozenset(
    (
        *("observation.recall", "observation.delegate", "observation.error", "observation.run", "observation.survey"),
        *("observation.loop_detection", "observation.rolled_back", "observation.finish_refused", "observation.read"),
    )
)
"""Observations that an export writes as messages of the environment."""
OWN_HEAD = frozenset({"kind", "id", "cause", "source", "timestamp", "tool_call_metadata", "blobs"})
RESULTS = frozenset({"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"})
_RISKS = {"LOW": 0, "MEDIUM": 1, "HIGH": 2}


def read_sdk_directory(path: Path, conversation_id: str) -> tuple[list[Event], ImportFindings]:
    """Read a conversation directory as a log, and return the findings.

    Raises:
        UsageError: the directory cannot be used.
    """
    findings = ImportFindings()
    directory = SdkDirectory.read(path, findings)
    reading = _SdkConversionState(directory, findings)
    for number, fields in directory.events:
        reading.try_to_add(number, fields)
    reading.end()
    created = ConversationCreated(
        id=1,
        timestamp=reading.events[0].timestamp if reading.events else None,
        source=EventSource.USER,
        conversation_id=conversation_id,
        agent=directory.agent(findings),
        workspace=directory.workspace(findings),
        limits=directory.limits,
        headless=False,
        title=derive_title(reading.task) if reading.task.strip() else "A conversation of OpenHands",
        forked_from=f"{ORIGIN}@{len(reading.events) + 1}",
    )
    findings.left_out.update(directory.list_left_out())
    return [created, *reading.events], findings


class _SdkConversionState:
    """The state of converting a conversation into a log."""

    def __init__(self, directory: SdkDirectory, findings: ImportFindings) -> None:
        self.events: list[Event] = []
        self.task = ""
        self._findings = findings
        self._status = str(directory.state.get("execution_status"))
        self._notes, self._ended = directory.read_own_state()
        self._calls: dict[str, list[Fields]] = {}
        for _, event in directory.events:
            name = event.get("llm_response_id")
            if (
                event.get("kind") == "ActionEvent"
                and isinstance(name, str)
                and isinstance(event.get("tool_call"), dict)
            ):
                self._calls.setdefault(name, []).append(event)
        self._costs = read_costs(directory.state)
        self._spending = RecordedSpending()
        self._spending.add_totals(read_totals(directory.state))
        self._numbers = Renumbering()
        self._replies: dict[str, int] = {}
        self._actions: dict[str, int] = {}
        self._unreadable: dict[str, Fields] = {}
        self._summaries: set[str] = set()
        self._open: dict[int, Fields] = {}
        self._state = AgentState.LOADING
        self._error = ""
        self._now: str | None = None

    def try_to_add(self, number: int, fields: Fields) -> None:
        """Add the next event; if it is unreadable, keep only the end of its action."""
        kind = str(fields.get("kind"))
        count, state = len(self.events), self._state
        try:
            self.add(fields)
        except UNREADABLE as error:
            self._findings.add_fault(f"Event {number} ({kind[:40]})", error)
            self._undo(count, state)
            action_id = self._actions.get(str(fields.get("tool_call_id")))
            if kind in RESULTS and action_id in self._open:
                self._answer(fields, "observation.outcome_unknown", content=NO_RESULT)
        made = [event for event in self.events[count:] if not isinstance(event, ModelReply)]
        meant = made[-1].id if made else None
        self._numbers.add(fields.get("id"), made, meant=meant, is_shown=kind in SHOWN)

    def _undo(self, count: int, state: AgentState) -> None:
        del self.events[count:]
        self._state = state
        for known in (self._replies, self._actions):
            for name in [name for name, event_id in known.items() if event_id >= self._next_id]:
                del known[name]
        for action_id in [action_id for action_id in self._open if action_id >= self._next_id]:
            del self._open[action_id]

    def add(self, fields: Fields) -> None:
        """Add the next event."""
        self._now = to_utc_text(fields.get("timestamp"))
        takers: Mapping[str, Callable[[Fields], object]] = {
            "SystemPromptEvent": self._greeting,
            "MessageEvent": self._message,
            "ActionEvent": self._action,
            "ObservationEvent": self._observation,
            "UserRejectObservation": self._rejection,
            "AgentErrorEvent": self._failure,
            "Condensation": self._condensation,
            "CondensationRequest": lambda _: self._add("action.condensation_request", source="agent"),
            "PauseEvent": lambda _: self._to(AgentState.PAUSED),
            "InterruptEvent": lambda _: self._to(AgentState.PAUSED),
            "ConversationErrorEvent": self._conversation_error,
        }
        kind = str(fields.get("kind"))
        if kind not in takers:
            self._findings.left_out[f"events of the kind {kind[:40]}"] += 1
            return
        takers[kind](fields)

    def end(self) -> None:
        """Settle open actions, and end in the conversation's state."""
        wanted = self._ended or ENDS.get(self._status)
        if wanted is AgentState.AWAITING_USER_CONFIRMATION and self._open:
            for action_id in self._open:
                waits = {"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION}
                self.events[action_id - 2] = self.events[action_id - 2].model_copy(update=waits)
            self._to(wanted, action_id=min(self._open))
            self._settle_costs()
            return
        for action_id, call in list(self._open.items()):
            self._add("observation.outcome_unknown", content=NO_RESULT, cause=action_id, **call)
        self._settle_costs()
        if wanted is not None and wanted is not AgentState.AWAITING_USER_CONFIRMATION:
            code = {"stuck": "stuck_in_loop"}.get(self._status, "unexpected") if wanted is AgentState.ERROR else ""
            self._to(wanted, reason=self._error, code=code)

    @property
    def _next_id(self) -> int:
        return len(self.events) + 2  # the creation is the first

    def _add(self, kind: str, *, source: str = "environment", **fields: Any) -> int:
        """Append an event and return its id."""
        wire = {"kind": kind, "source": source, "timestamp": self._now, **fields}
        event = event_from_wire({k: v for k, v in wire.items() if v is not None}, self._next_id)
        check_fit(event)
        self.events.append(event)
        return event.id

    def _to(self, state: AgentState, *, reason: str = "", code: str = "", **fields: Any) -> None:
        if self._state is not state:
            self._state = state
            fields |= {"agent_state": state.value, "reason": reason, "code": code}
            self._add("observation.agent_state_changed", **fields)

    def _greeting(self, fields: Fields) -> None:
        tools = [tool.get("title") or tool.get("name") or "" for tool in fields.get("tools") or ()]
        content = "\n\n".join(
            join_texts([part]) for part in (fields["system_prompt"], fields.get("dynamic_context")) if part
        )
        self._add("action.system", source="agent", content=content, tools=tools, agent_class="CodeActAgent")

    def _message(self, fields: Fields) -> None:
        content = fields["llm_message"].get("content") or []
        images = [url for part in content for url in part.get("image_urls") or ()] or None
        if fields["source"] not in ("user", "agent"):
            self._environment_message(fields, join_texts(content))
            return
        if fields["source"] != "user":
            text = join_texts(content)
            self._reply(fields, text)
            self._add("action.message", source="agent", content=text, image_urls=images, wait_for_response=True)
            self._to(AgentState.AWAITING_USER_INPUT)
            return
        text, is_first = join_texts(content), not self.task
        self.task = self.task or text
        self._add("action.message", source="user", content=text, image_urls=images)
        kind = "workspace_context" if is_first else "knowledge"
        recall = self._add("action.recall", source="user", recall_type=kind, query=text)
        self._to(AgentState.RUNNING)
        reported = join_texts(fields.get("extended_content") or [])
        if not reported:
            self._add("observation.null", cause=recall)
            return
        name = ", ".join(fields.get("activated_skills") or ()) or "knowledge"
        knowledge = [{"name": name, "trigger": name, "content": reported}]
        self._add("observation.recall", recall_type="knowledge", microagent_knowledge=knowledge, cause=recall)

    def _environment_message(self, fields: Fields, text: str) -> None:
        """Add the environment's message to the model: as the event that was exported, or else as knowledge."""
        wire = self._notes.get(fields["id"])
        kept = None
        if isinstance(wire, dict) and str(wire.get("kind")) in NOTE_KINDS:
            kept = event_from_wire({name: value for name, value in wire.items() if name != "cause"}, 1)
        if not isinstance(kept, Observation) or kept.agent_text != text:
            name = ", ".join(fields.get("activated_skills") or ()) or "environment"
            knowledge = [{"name": name, "trigger": "", "content": text}]
            wire = {"kind": "observation.recall", "recall_type": "knowledge", "microagent_knowledge": knowledge}
        assert wire is not None
        own = {name: value for name, value in wire.items() if name not in OWN_HEAD}
        if wire["kind"] == "observation.recall":
            own["cause"] = self._add("action.recall", source="user", recall_type=own["recall_type"])
        self._add(wire["kind"], **own)

    def _reply(self, fields: Fields, text: str, service: str = "agent") -> int:
        """Return the id of the reply that an event belongs to; write the reply if this is its first event."""
        name = fields.get("llm_response_id") or fields["id"]
        if name not in self._replies:
            calls = [event["tool_call"] for event in self._calls.get(name, ())]
            reply = {
                "source": "agent",
                "service": service,
                "content": text,
                "tool_calls": [
                    {"id": call["id"], "name": call["name"], "arguments": call["arguments"] or "{}"}
                    for call in calls
                    if all(isinstance(call.get(part), str) for part in ("id", "name")) and "arguments" in call
                ],
                "thinking_blocks": fields.get("thinking_blocks") or [],
                "response_id": name,
                "stop_reason": "tool_calls" if calls else "stop",
                "seen_id": self._next_id - 1,
                **self._costs.get(name, {}),
            }
            self._replies[name] = self._add("model.reply", **reply)
        return self._replies[name]

    def _settle_costs(self) -> None:
        """Add the remaining costs to the last reply, so that the sums match the recording."""
        replies = [event for event in self.events if isinstance(event, ModelReply)]
        for reply in replies:
            self._spending.assign_cost(reply.wire(), is_own=True)
        if replies:
            self.events[replies[-1].id - 2] = self._spending.assign_rest(replies[-1])

    def _action(self, fields: Fields) -> None:
        thought = join_texts(fields.get("thought") or [])
        reply_id = self._reply(fields, thought)
        call = {
            "tool_call_metadata": {
                "function_name": fields["tool_call"]["name"],
                "tool_call_id": fields["tool_call_id"],
                "reply_id": reply_id,
                "total_calls_in_response": len(self._calls[fields["llm_response_id"]]),
            }
        }
        action = fields.get("action")
        if action is None:  # the SDK could not parse the call; the next error has the reason
            self._unreadable[fields["tool_call_id"]] = call
            return
        kind, own = convert_action(fields, action)
        own.setdefault("thought", thought)
        risk = _RISKS.get(str(fields.get("security_risk")))
        runnable = kind not in ("action.think", "action.finish", "action.task_tracking")
        extra = {"security_risk": risk} if runnable and risk is not None else {}
        if action.get("reset"):
            self._findings.left_out["resets of the terminal"] += 1
        action_id = self._add(kind, source="agent", **own, **extra, **call)
        self._actions[fields["tool_call_id"]] = action_id
        if kind != "action.finish":
            self._open[action_id] = call

    def _find_action(self, fields: Fields) -> int:
        """Return the action that an event answers."""
        if fields["tool_call_id"] not in self._actions:
            raise ValueError("the action that it answers is not here")
        return self._actions[fields["tool_call_id"]]

    def _answer(self, fields: Fields, kind: str, **own: Any) -> None:
        action_id = self._find_action(fields)
        if action_id in self._open:  # a finish needs no answer here
            self._add(kind, source="agent", cause=action_id, **self._open[action_id], **own)
            del self._open[action_id]

    def _observation(self, fields: Fields) -> None:
        seen = fields["observation"]
        parts = [*(seen.get("content") or []), *(fields.get("extended_content") or [])]
        text = join_texts(parts) if isinstance(seen.get("content"), list) else str(seen.get("content") or "")
        action_id = self._find_action(fields)
        kind = self.events[action_id - 2].kind
        images = [url for part in parts if isinstance(part, dict) for url in part.get("image_urls") or ()] or None
        if kind == "action.finish" and seen.get("is_error"):
            self._add("observation.finish_refused", content=text)
        elif kind == "action.finish":
            self._to(AgentState.FINISHED)
        elif kind == "action.run":
            metadata = {name: value for name, value in (seen.get("metadata") or {}).items() if value is not None}
            command = seen.get("command") or getattr(self.events[action_id - 2], "command", "")
            self._answer(fields, "observation.run", content=text, command=command, metadata=metadata)
        elif seen.get("is_error") and not (kind in ("action.read", "action.edit") and text.startswith(FAILED_EDIT)):
            self._answer(fields, "observation.error", content=text)
        elif kind == "action.read":
            self._answer(fields, "observation.read", content=text, path=seen["path"], impl_source="oh_aci")
        elif kind == "action.edit":
            names = ("path", "prev_exist", "old_content", "new_content")
            edited = {name: seen[name] for name in names if seen.get(name) is not None}
            self._answer(fields, "observation.edit", content=text, **edited)
        elif kind == "action.task_tracking":
            own = {"command": seen.get("command", "view"), "task_list": convert_sdk_tasks(seen.get("task_list"))}
            self._answer(fields, "observation.task_tracking", content=text, **own)
        elif kind == "action.think":
            self._answer(fields, "observation.think", content=text)
        else:
            name = fields["tool_name"]
            self._answer(fields, "observation.call_tool", content=text, name=name, image_urls=images)

    def _rejection(self, fields: Fields) -> None:
        self._answer(fields, "observation.user_rejected", content=str(fields.get("rejection_reason") or ""))

    def _failure(self, fields: Fields) -> None:
        if fields["tool_call_id"] in self._actions:
            self._answer(fields, "observation.error", content=fields["error"])
        else:
            call = self._unreadable.get(fields["tool_call_id"], {})
            self._add("observation.error", source="agent", content=fields["error"], **call)

    def _condensation(self, fields: Fields) -> None:
        if fields.get("llm_response_id"):
            self._reply(fields, fields.get("summary") or "", "condenser")
        names = [name for name in fields.get("forgotten_event_ids") or () if name not in self._summaries]
        self._summaries.add(f"{fields['id']}-summary")
        forgotten, lost = self._numbers.forget(names)
        if lost:
            self._findings.left_out[LOST_IDS] += lost
        place = {name: fields.get(name) for name in ("summary", "summary_offset")}
        if None in place.values():
            place = {}
        elif type(place["summary_offset"]) is int:
            place["summary_offset"] = self._numbers.map_offset(place["summary_offset"])
        self._add("action.condensation", source="agent", forgotten_event_ids=forgotten, **place)

    def _conversation_error(self, fields: Fields) -> None:
        self._error = str(fields.get("detail") or fields.get("code") or "")
        self._to(AgentState.ERROR, reason=self._error, code="unexpected")
