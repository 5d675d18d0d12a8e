"""Conversations of OpenHands' SDK (V1), read as conversations of ours (OpenHands 13).

There each tool call is an event with a copy of its part of the model's reply; here the reply is one event before the
actions it led to. States are not events there; they follow from what was said.

Holds: every event that has an equivalent carries over, with its time and its place; what has none is counted by name.
An action without a result gets one that says so, or waits for the confirmation that it waited for: nothing is run a
second time because it was imported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.contract.codec import event_from_wire
from broker.contract.events import ConfirmationStatus, ConversationCreated, Event, EventSource
from broker.runtime.errors import CorruptEntry, UnknownKind, UsageError
from broker.specs.agent_state import AgentState
from deckhands.client.tasks import title_of
from deckhands.openhands.sdk_directory import Fields, SdkDirectory
from deckhands.openhands.trajectories import utc_text

ORIGIN = "openhands-sdk"
NO_RESULT = "The recording that this conversation was imported from has no result of this action. It may have run."
ENDS: Mapping[str, AgentState] = {
    "finished": AgentState.FINISHED,
    "paused": AgentState.PAUSED,
    "error": AgentState.ERROR,
    "stuck": AgentState.ERROR,
    "idle": AgentState.AWAITING_USER_INPUT,
    "waiting_for_confirmation": AgentState.AWAITING_USER_CONFIRMATION,
}
"""How a conversation stands, by its `execution_status`; any other is under way."""
EDIT_FIELDS = ("command", "path", "file_text", "old_str", "new_str", "insert_line")
_RISKS = {"LOW": 0, "MEDIUM": 1, "HIGH": 2}


def read_sdk_directory(path: Path, conversation_id: str) -> tuple[list[Event], Counter[str]]:
    """Read a conversation directory as a log, and count what could not be carried over.

    Raises:
        UsageError: the directory cannot be used; names the file or the event.
    """
    directory = SdkDirectory.read(path)
    reading = _Reading(directory)
    for position, fields in enumerate(directory.events):
        try:
            reading.take(fields)
        except (CorruptEntry, UnknownKind, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"Event {position} of {path} ({fields.get('kind')}) cannot be read: {error}") from error
    reading.end()
    try:
        created = ConversationCreated(
            id=1,
            timestamp=reading.events[0].timestamp if reading.events else None,
            source=EventSource.USER,
            conversation_id=conversation_id,
            agent=directory.agent,
            workspace=directory.workspace,
            limits=directory.limits,
            headless=False,
            title=title_of(reading.task) if reading.task else "A conversation of OpenHands",
            forked_from=f"{ORIGIN}@{len(reading.events) + 1}",
        )
    except ValidationError as error:
        raise UsageError(f"{path / 'base_state.json'} cannot be used: {error}") from error
    return [created, *reading.events], +(directory.left_out() + reading.left_out)


class _Reading:
    """A conversation on its way to a log."""

    def __init__(self, directory: SdkDirectory) -> None:
        self.events: list[Event] = []
        self.left_out: Counter[str] = Counter()
        self.task = ""
        self._status = str(directory.state.get("execution_status"))
        self._calls: dict[str, list[Fields]] = {}
        for event in directory.events:
            if event.get("kind") == "ActionEvent":
                self._calls.setdefault(event["llm_response_id"], []).append(event)
        self._costs = _costs(directory.state)
        self._replies: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._actions: dict[str, int] = {}
        self._unreadable: dict[str, Fields] = {}
        self._open: dict[int, Fields] = {}
        self._state = AgentState.LOADING
        self._error = ""
        self._now: str | None = None

    def take(self, fields: Fields) -> None:
        """Take in the next event."""
        self._now = utc_text(fields.get("timestamp"))
        first_id = self._next_id
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
            "ConversationErrorEvent": self._error_of,
        }
        kind = str(fields.get("kind"))
        if kind not in takers:
            self.left_out[f"events of the kind {kind}"] += 1
            return
        takers[kind](fields)
        if self._next_id > first_id:
            self._ids[fields["id"]] = self._next_id - 1

    def end(self) -> None:
        """Settle what is open, and end in the state in which the conversation stands."""
        wanted = ENDS.get(self._status)
        if wanted is AgentState.AWAITING_USER_CONFIRMATION and self._open:
            for action_id in self._open:
                waits = {"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION}
                self.events[action_id - 2] = self.events[action_id - 2].model_copy(update=waits)
            self._to(wanted, action_id=min(self._open))
            return
        for action_id, call in list(self._open.items()):
            self._add("observation.outcome_unknown", content=NO_RESULT, cause=action_id, **call)
        if wanted is not None and wanted is not AgentState.AWAITING_USER_CONFIRMATION:
            code = {"stuck": "stuck_in_loop"}.get(self._status, "unexpected") if wanted is AgentState.ERROR else ""
            self._to(wanted, reason=self._error, code=code)

    @property
    def _next_id(self) -> int:
        return len(self.events) + 2  # the creation is the first

    def _add(self, kind: str, *, source: str = "environment", **fields: Any) -> int:
        """Append an event and return its id."""
        wire = {"kind": kind, "source": source, "timestamp": self._now, **fields}
        self.events.append(event_from_wire({k: v for k, v in wire.items() if v is not None}, self._next_id))
        return self._next_id - 1

    def _to(self, state: AgentState, *, reason: str = "", code: str = "", **fields: Any) -> None:
        if self._state is not state:
            self._state = state
            fields |= {"agent_state": state.value, "reason": reason, "code": code}
            self._add("observation.agent_state_changed", **fields)

    def _greeting(self, fields: Fields) -> None:
        tools = [tool.get("title") or tool.get("name") or "" for tool in fields.get("tools") or ()]
        content = "\n\n".join(
            _text([part]) for part in (fields["system_prompt"], fields.get("dynamic_context")) if part
        )
        self._add("action.system", source="agent", content=content, tools=tools, agent_class="CodeActAgent")

    def _message(self, fields: Fields) -> None:
        content = fields["llm_message"].get("content") or []
        images = [url for part in content for url in part.get("image_urls") or ()] or None
        if fields["source"] != "user":
            self._reply(fields, _text(content))
            self._add(
                "action.message", source="agent", content=_text(content), image_urls=images, wait_for_response=True
            )
            self._to(AgentState.AWAITING_USER_INPUT)
            return
        text, is_first = _text(content), not self.task
        self.task = self.task or text
        self._add("action.message", source="user", content=text, image_urls=images)
        kind = "workspace_context" if is_first else "knowledge"
        recall = self._add("action.recall", source="user", recall_type=kind, query=text)
        self._to(AgentState.RUNNING)
        told = _text(fields.get("extended_content") or [])
        if not told:
            self._add("observation.null", cause=recall)
            return
        name = ", ".join(fields.get("activated_skills") or ()) or "knowledge"
        knowledge = [{"name": name, "trigger": name, "content": told}]
        self._add("observation.recall", recall_type="knowledge", microagent_knowledge=knowledge, cause=recall)

    def _reply(self, fields: Fields, text: str, service: str = "agent") -> int:
        """Return the id of the reply that an event belongs to, written first if this is the first event of it."""
        name = fields.get("llm_response_id") or fields["id"]
        if name not in self._replies:
            calls = [event["tool_call"] for event in self._calls.get(name, ())]
            self._replies[name] = self._add(
                "model.reply",
                source="agent",
                service=service,
                content=text,
                tool_calls=[
                    {"id": call["id"], "name": call["name"], "arguments": call["arguments"] or "{}"} for call in calls
                ],
                thinking_blocks=fields.get("thinking_blocks") or [],
                response_id=name,
                stop_reason="tool_calls" if calls else "stop",
                seen_id=self._next_id - 1,
                **self._costs.get(name, {}),
            )
        return self._replies[name]

    def _action(self, fields: Fields) -> None:
        thought = _text(fields.get("thought") or [])
        reply_id = self._reply(fields, thought)
        call = {
            "tool_call_metadata": {
                "function_name": fields["tool_name"],
                "tool_call_id": fields["tool_call_id"],
                "reply_id": reply_id,
                "total_calls_in_response": len(self._calls[fields["llm_response_id"]]),
            }
        }
        action = fields.get("action")
        if action is None:  # the SDK could not read the call; the error that follows says why
            self._unreadable[fields["tool_call_id"]] = call
            return
        kind, own = _content_of(fields, action)
        own.setdefault("thought", thought)
        risk = _RISKS.get(str(fields.get("security_risk")))
        runnable = kind not in ("action.think", "action.finish", "action.task_tracking")
        extra = {"security_risk": risk} if runnable and risk is not None else {}
        if action.get("reset"):
            self.left_out["resets of the terminal"] += 1
        action_id = self._add(kind, source="agent", **own, **extra, **call)
        self._actions[fields["tool_call_id"]] = action_id
        if kind == "action.finish":
            self._to(AgentState.FINISHED)
        else:
            self._open[action_id] = call

    def _answer(self, fields: Fields, kind: str, **own: Any) -> None:
        action_id = self._actions[fields["tool_call_id"]]
        call = self._open.pop(action_id, None)
        if call is not None:  # a finish needs no answer here
            self._add(kind, source="agent", cause=action_id, **call, **own)

    def _observation(self, fields: Fields) -> None:
        seen = fields["observation"]
        parts = [*(seen.get("content") or []), *(fields.get("extended_content") or [])]
        text = _text(parts) if isinstance(seen.get("content"), list) else str(seen.get("content") or "")
        action_id = self._actions[fields["tool_call_id"]]
        kind = self.events[action_id - 2].kind
        images = [url for part in parts if isinstance(part, dict) for url in part.get("image_urls") or ()] or None
        if kind == "action.run":
            metadata = {name: value for name, value in (seen.get("metadata") or {}).items() if value is not None}
            command = seen.get("command") or getattr(self.events[action_id - 2], "command", "")
            self._answer(fields, "observation.run", content=text, command=command, metadata=metadata)
        elif seen.get("is_error"):
            self._answer(fields, "observation.error", content=text)
        elif kind == "action.read":
            self._answer(fields, "observation.read", content=text, path=seen["path"], impl_source="oh_aci")
        elif kind == "action.edit":
            names = ("path", "prev_exist", "old_content", "new_content")
            edited = {name: seen[name] for name in names if seen.get(name) is not None}
            self._answer(fields, "observation.edit", content=text, **edited)
        elif kind == "action.task_tracking":
            tasks = _tasks(seen.get("task_list"))
            self._answer(
                fields, "observation.task_tracking", content=text, command=seen.get("command", "view"), task_list=tasks
            )
        elif kind == "action.think":
            self._answer(fields, "observation.think", content=text)
        else:
            self._answer(fields, "observation.call_tool", content=text, name=fields["tool_name"], image_urls=images)

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
        known = [self._ids[name] for name in fields.get("forgotten_event_ids") or () if name in self._ids]
        has_place = fields.get("summary") is not None and fields.get("summary_offset") is not None
        self._add(
            "action.condensation",
            source="agent",
            forgotten_event_ids=sorted(known),
            summary=fields["summary"] if has_place else None,
            summary_offset=fields["summary_offset"] if has_place else None,
        )

    def _error_of(self, fields: Fields) -> None:
        self._error = str(fields.get("detail") or fields.get("code") or "")
        self._to(AgentState.ERROR, reason=self._error, code="unexpected")


def _content_of(fields: Fields, action: Fields) -> tuple[str, Fields]:
    """Return the kind and the own fields of an action."""
    match action.get("kind"):
        case "TerminalAction" | "ExecuteBashAction":
            names = ("command", "is_input", "timeout")
            return "action.run", {name: action[name] for name in names if action.get(name) is not None}
        case "FileEditorAction" if action["command"] == "view":
            seen = {"view_range": action["view_range"]} if action.get("view_range") else {}
            return "action.read", {"path": action["path"], "impl_source": "oh_aci", **seen}
        case "FileEditorAction":
            return "action.edit", {name: action[name] for name in EDIT_FIELDS if action.get(name) is not None}
        case "TaskTrackerAction":
            return "action.task_tracking", {"command": action["command"], "task_list": _tasks(action.get("task_list"))}
        case "ThinkAction":
            return "action.think", {"thought": action["thought"]}
        case "FinishAction":
            return "action.finish", {"final_thought": action["message"]}
    arguments = json.loads(fields["tool_call"]["arguments"] or "{}")
    return "action.call_tool", {"name": fields["tool_name"], "arguments": arguments}


def _tasks(tasks: Any) -> list[Fields]:
    numbered = enumerate(tasks or (), 1)
    return [{"status": "todo", "notes": "", **task, "id": f"task-{n}"} for n, task in numbered]


def _text(parts: list[Fields]) -> str:
    return "\n".join(part["text"] for part in parts if part.get("type", "text") == "text" and part.get("text"))


def _costs(state: Fields) -> dict[str, Fields]:
    """Return what each reply has cost, by its id; costs themselves name no reply, and stand in the same order."""
    found: dict[str, Fields] = {}
    for metrics in ((state.get("stats") or {}).get("usage_to_metrics") or {}).values():
        usages, costs = metrics.get("token_usages") or [], metrics.get("costs") or []
        latencies = {one["response_id"]: one["latency"] for one in metrics.get("response_latencies") or ()}
        for position, usage in enumerate(usages):
            name = usage["response_id"]
            counts = ("prompt_tokens", "completion_tokens", "cache_read_tokens", "cache_write_tokens")
            found[name] = {
                "model": usage.get("model") or metrics.get("model_name") or "",
                "usage": {count: usage.get(count) or 0 for count in counts},
                "latency_seconds": latencies.get(name, 0.0),
                "cost_usd": costs[position]["cost"] if len(costs) == len(usages) else None,
            }
    return found
