"""A log as events of OpenHands' SDK (V1), event by event.

In the SDK, each tool call is an event with its part of the model's reply, all calls of a reply are adjacent, and no
message comes between a call and its result. In our log, events are in the order of their time. A translation therefore
holds some events back until others have arrived.

Holds: the same log always gives the same events, with the same ids, order and parents. Each event is accepted by the
SDK's classes. Every call has one result, once its turn has ended.
Differs: a confirmed action that a user edited is shown as the model wrote it, because events of the SDK never change.
Does not: translate states; see `sdk_state`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from broker.contract import (
    STUCK_CODE,
    Action,
    ActionSecurityRisk,
    AgentFinishAction,
    AgentRejectAction,
    AgentState,
    AgentStateChangedObservation,
    CondensationAction,
    CondensationRequestAction,
    ErrorObservation,
    Event,
    EventSource,
    FinishRefusedObservation,
    FinishVerdictObservation,
    InterruptedObservation,
    MessageAction,
    ModelReply,
    Observation,
    OutcomeUnknownObservation,
    RolledBackObservation,
    SystemMessageAction,
    ToolCallMetadata,
    UserRejectObservation,
    is_settled,
)
from deckhands.interop.openhands.renumbering import is_shown_here
from deckhands.interop.openhands.sdk_ids import to_uuid
from deckhands.interop.openhands.sdk_kinds import (
    Fields,
    read_arguments,
    to_sdk_action,
    to_sdk_images,
    to_sdk_observation,
    to_sdk_text,
    to_sdk_tool,
    to_sdk_tool_name,
)

NAMESPACE = uuid5(NAMESPACE_URL, "urn:deckhands:openhands-sdk")
_RISKS = {
    ActionSecurityRisk.UNKNOWN: "UNKNOWN",
    ActionSecurityRisk.LOW: "LOW",
    ActionSecurityRisk.MEDIUM: "MEDIUM",
    ActionSecurityRisk.HIGH: "HIGH",
}
MAX_SUMMARY_CHARS = 1_000
_ERROR_CODES = {"max_iterations": "MaxIterationsReached"}
"""The SDK's names of errors by ours; others are ours."""
_THINKING = {"thinking": "thinking", "redacted_thinking": "data"}
"""The blocks of a reply that the SDK knows, each with its text."""
SHOWN = frozenset(
    {"SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
)
"""Events that the SDK shows to a model."""
_ANSWERS = frozenset({"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"})
_WITHOUT_RESULT = frozenset({"request_condensation"})
"""Tools whose calls have no observation here."""
_CARRIED = frozenset(
    (
        *("conversation.created", "model.reply", "action.recall", "observation.null", "observation.rolled_back"),
        *("action.change_agent_state", "observation.agent_state_changed", "observation.finish_verdict"),
    )
)
"""Kinds that other events, states or metrics stand for."""


def to_sdk_conversation_id(conversation_id: str) -> str:
    """Return the SDK's id of a conversation, which the routes of its API also use; see `sdk_ids`."""
    return str(to_uuid(conversation_id))


def to_sdk_events(conversation_id: str, events: Iterable[Event]) -> tuple[list[Fields], Counter[str]]:
    """Return a log as events of the SDK, and the counts of events without an equivalent, by kind.

    Args:
        events: whole, from the first one on.
    """
    translation = SdkTranslation(conversation_id)
    found = [fields for event in events for fields in translation.add(event)]
    return found + translation.end(), translation.left_out


def announce_pause(request: Event) -> Event:
    """Return the announcement of a pause whose request finds the agent at rest: the agent itself writes none."""
    return AgentStateChangedObservation(id=request.id, timestamp=request.timestamp, agent_state=AgentState.PAUSED)


class SdkTranslation:
    """The translation of one log; feed it every event from the first one on.

    Attributes:
        left_out: counts of events without an equivalent, by kind.
        leaf_id: the id of the last event on the current branch; None for none.
        last_message_id: the id of the last message of a user; None for none.
    """

    def __init__(self, conversation_id: str) -> None:
        self.left_out: Counter[str] = Counter()
        self.leaf_id: str | None = None
        self.last_message_id: str | None = None
        self._conversation_id = conversation_id
        self._written: list[Fields] = []
        self._has_system = False
        # The names of replies there, by our ids; the latest reply, and how many of its calls have not come yet.
        self._names: dict[int, str] = {}
        self._taken_names: set[str] = set()
        self._condenser_name = ""
        self._reply: ModelReply | None = None
        self._missing_calls = 0
        self._is_first_call = True
        # Actions that wait for their results, by our ids; results and messages that wait for actions.
        self._open: dict[int, Fields] = {}
        self._results: list[Fields] = []
        self._messages: list[Fields] = []
        self._verdict = ""
        self._is_interrupted = False
        # The model's view: our ids, and the ids of the events that each became; the latest summary's id.
        self._view: list[int] = []
        self._sdk_ids: dict[int, list[str]] = {}
        self._notes: dict[int, list[str]] = {}
        self._summary_id = ""
        # Events since the agent last rested, and their places there: a rollback reaches no further.
        self._recent: list[tuple[Event, list[Fields]]] = []
        self._places: dict[str, int] = {}

    def add(self, event: Event) -> list[Fields]:
        """Add the next event of the log, and return the events of the SDK that are now complete."""
        if isinstance(event, RolledBackObservation):
            self._release(is_forced=True)
            self._roll_back(event)
        made = self._translate(event)
        if not made and event.kind not in _CARRIED and getattr(event, "replaces", None) is None:
            self.left_out[event.kind] += 1
        self._recent.append((event, made))
        if is_shown_here(event):
            self._view.append(event.id)
        for fields in made:
            if fields["kind"] in SHOWN:
                self._sdk_ids.setdefault(event.id, []).append(fields["id"])
            self._queue(fields)
        self._release()
        if isinstance(event, AgentStateChangedObservation) and is_settled(event.agent_state):
            self._recent.clear()
            self._places.clear()
        found, self._written = self._written, []
        return found

    def end(self) -> list[Fields]:
        """Return the events that are still held back, because the log has ended."""
        self._release(is_forced=True)
        found, self._written = self._written, []
        return found

    def find_response_id(self, reply_id: int) -> str:
        """Return the SDK's id of a reply that was added."""
        return self._names[reply_id]

    def find_events(self, event_id: int) -> Sequence[str]:
        """Return the ids of the shown SDK events made from one of our events."""
        return self._sdk_ids.get(event_id, ())

    def find_notes(self, event_id: int) -> Sequence[str]:
        """Return the ids of the environment's messages made from one of our events."""
        return self._notes.get(event_id, ())

    def find_open_actions(self) -> list[str]:
        """Return the ids of the actions without a result, in order."""
        return list(dict.fromkeys(action["id"] for action in self._open.values()))

    # Order

    def _queue(self, fields: Fields) -> None:
        kind = fields["kind"]
        if kind in _ANSWERS:
            self._results.append(fields)
        elif kind == "MessageEvent":
            self._messages.append(fields)
        else:
            self._write(fields)

    def _release(self, *, is_forced: bool = False) -> None:
        """Write the events that no longer need to be held back."""
        if self._missing_calls and not is_forced:
            return
        results, self._results = self._results, []
        for fields in results:
            self._write(fields)
        if (self._open or not self._has_system) and not is_forced:
            return
        messages, self._messages = self._messages, []
        for fields in messages:
            self._write(fields)

    def _write(self, fields: Fields) -> None:
        fields["parent_id"] = self.leaf_id
        self.leaf_id = fields["id"]
        self._places[fields["id"]] = len(self._places)
        self._written.append(fields)
        if fields["kind"] == "MessageEvent" and fields["source"] == "user":
            self.last_message_id = fields["id"]
        elif fields["kind"] == "SystemPromptEvent":
            self._has_system = True

    def _roll_back(self, event: RolledBackObservation) -> None:
        """Continue from before the rolled-back events, and repeat the kept ones."""
        made = [(old, one) for old, fields in self._recent if old.id >= event.start_id for one in fields]
        undone = [one for old, one in made if event.rolls_back(old)]
        if undone:
            first = min(undone, key=lambda one: self._places[one["id"]])
            self.leaf_id = first["parent_id"]
            for old, one in made:
                if not event.rolls_back(old) and self._places[one["id"]] > self._places[first["id"]]:
                    self._write(one | {"id": self._make_id(event, f"kept-{one['id']}")})
        self._open = {event_id: action for event_id, action in self._open.items() if event_id < event.start_id}
        self._view = [event_id for event_id in self._view if event_id < event.start_id or event_id in event.kept]
        self._missing_calls = 0

    # Events

    def _make_id(self, event: Event, part: str = "") -> str:
        return str(uuid5(NAMESPACE, f"{self._conversation_id}/{event.id}/{part}"))

    def _make(self, event: Event, kind: str, *, part: str = "", source: str = "", **own: Any) -> Fields:
        moment = event.timestamp
        return {
            "kind": kind,
            "id": self._make_id(event, part),
            "timestamp": moment.replace(tzinfo=None).isoformat(timespec="microseconds") if moment else "",
            "source": source or event.source.value,
            **own,
        }

    def _translate(self, event: Event) -> list[Fields]:
        """Return the events that one of ours becomes; none if it has no equivalent."""
        if isinstance(event, Action):
            self._is_interrupted = False
        match event:
            case ModelReply():
                self._add_reply(event)
                return []
            case SystemMessageAction():
                prompt = {"type": "text", "text": event.content}
                tools = [to_sdk_tool(name) for name in event.tools or ()]
                return [self._make(event, "SystemPromptEvent", source="agent", system_prompt=prompt, tools=tools)]
            case MessageAction():
                return [self._make_message(event)]
            case AgentStateChangedObservation():
                return self._convert_state(event)
            case CondensationAction():
                return [self._convert_condensation(event)]
            case CondensationRequestAction(tool_call_metadata=None):
                return [self._make(event, "CondensationRequest", source="environment")]
            case InterruptedObservation():
                self._is_interrupted = True
                return [self._make(event, "InterruptEvent", source="user")]
            case FinishVerdictObservation():
                self._verdict = event.agent_text
                return []
            case FinishRefusedObservation():
                text = "\n".join(filter(None, (self._verdict, event.agent_text)))
                self._verdict = ""
                return self._refuse_finish(event, text) or self._make_note(event, text)
            case AgentRejectAction(tool_call_metadata=None):
                message = {"role": "assistant", "content": to_sdk_text(event.sentence)}
                return [self._make(event, "MessageEvent", source="agent", llm_message=message)]
            case Action() if event.tool_call_metadata is not None or _is_agent_step(event):
                return self._convert_action(event)
            case Observation() if event.cause in self._open:
                return [self._convert_result(event, self._close(self._open[event.cause]))]
            case ErrorObservation(cause=None, tool_call_metadata=ToolCallMetadata() as call):
                action = self._make_call(event, call, self._find_arguments(call) or "{}") | {"action": None}
                return [action, self._make_error(event, action)]
            case Action(source=EventSource.USER, runnable=True) if is_shown_here(event):
                return self._make_note(event, event.user_text)
            case Observation() if is_shown_here(event):
                return self._make_note(event, event.agent_text)
        return []

    def _add_reply(self, reply: ModelReply) -> None:
        name = reply.response_id
        if not name or name in self._taken_names:
            name = f"{name or 'reply'}-{reply.id}"
        self._names[reply.id] = name
        self._taken_names.add(name)
        if reply.service == "condenser":
            self._condenser_name = name
        elif reply.service == "agent":
            self._results += self._end_turn(reply)
            self._release(is_forced=True)
            self._reply, self._missing_calls, self._is_first_call = reply, len(reply.tool_calls), True

    def _end_turn(self, event: Event) -> list[Fields]:
        """Answer the actions that have no result here."""
        found: list[Fields] = []
        for action in list(self._open.values()):
            match action["action"]["kind"]:
                case "FinishAction":
                    seen = {"kind": "FinishObservation", "content": to_sdk_text(action["action"]["message"])}
                case "MCPToolAction" if action["tool_name"] in _WITHOUT_RESULT:
                    seen = {"kind": "MCPToolObservation", "content": [], "tool_name": action["tool_name"]}
                case _:
                    continue
            found.append(self._make_result(event, self._close(action), seen))
        return found

    def _refuse_finish(self, event: Event, text: str) -> list[Fields]:
        for action in self._open.values():
            if action["action"]["kind"] == "FinishAction":
                seen = {"kind": "FinishObservation", "content": to_sdk_text(text), "is_error": True}
                return [self._make_result(event, self._close(action), seen)]
        return []

    def _close(self, action: Fields) -> Fields:
        """Return an action that now has its result."""
        self._open = {event_id: one for event_id, one in self._open.items() if one is not action}
        return action

    def _make_message(self, event: MessageAction) -> Fields:
        content = [*to_sdk_text(event.content), *to_sdk_images(event)]
        if event.source is not EventSource.AGENT:
            source = "user" if event.source is EventSource.USER else "environment"
            return self._make(event, "MessageEvent", source=source, llm_message={"role": "user", "content": content})
        message: Fields = {"role": "assistant", "content": content}
        own: Fields = {}
        if self._reply is not None and not self._reply.tool_calls:
            message |= _read_thinking(self._reply)
            own["llm_response_id"] = self._names[self._reply.id]
        return self._make(event, "MessageEvent", source="agent", llm_message=message, **own)

    def _make_note(self, event: Event, text: str) -> list[Fields]:
        """Return the model's text of an event without a counterpart, as a message of the environment."""
        content = [*to_sdk_text(text), *to_sdk_images(event)]
        if not content:
            return []
        skills = [skill.name for skill in getattr(event, "microagent_knowledge", ())]
        own: Fields = {"activated_skills": skills} if skills else {}
        message = {"role": "user", "content": content}
        fields = self._make(event, "MessageEvent", source="environment", llm_message=message, **own)
        self._notes[event.id] = [fields["id"]]
        return [fields]

    def _convert_action(self, action: Action) -> list[Fields]:
        replaced = getattr(action, "replaces", None)
        if replaced in self._open:  # the copy with the user's decision
            self._open[action.id] = self._open[replaced]
            return []
        call = action.tool_call_metadata
        written = self._find_arguments(call)
        arguments = read_arguments(action, written)
        fields = self._make_call(action, call, json.dumps(arguments) if written is None else written)
        fields["action"] = to_sdk_action(action, arguments)
        fields["summary"] = _summarize(fields["tool_name"], arguments)
        fields["security_risk"] = _RISKS[getattr(action, "security_risk", ActionSecurityRisk.UNKNOWN)]
        if written is None:
            fields["thought"] = to_sdk_text(action.thought)
        self._open[action.id] = fields
        if not isinstance(action, CondensationRequestAction):
            return [fields]
        return [fields, self._make(action, "CondensationRequest", part="request", source="environment")]

    def _find_arguments(self, call: ToolCallMetadata | None) -> str | None:
        """Return the arguments of a call of the latest reply, as the model wrote them."""
        if call is None or self._reply is None or call.reply_id != self._reply.id:
            return None
        return next((one.arguments for one in self._reply.tool_calls if one.id == call.tool_call_id), None)

    def _make_call(self, event: Event, call: ToolCallMetadata | None, arguments: str) -> Fields:
        """Return the event of a call, without its action."""
        name, call_id, response_id = _find_tool(event), f"call-{event.id}", f"reply-of-{event.id}"
        own: Fields = {"thought": []}
        if call is not None:
            name, call_id = call.function_name, call.tool_call_id
            response_id = self._names.get(call.reply_id, f"reply-{call.reply_id}")
            if self._reply is not None and call.reply_id == self._reply.id:
                self._missing_calls = max(self._missing_calls - 1, 0)
                if self._is_first_call:
                    own = {"thought": to_sdk_text(self._reply.content), **_read_thinking(self._reply)}
                    self._is_first_call = False
        return self._make(
            event,
            "ActionEvent",
            source="agent",
            **own,
            tool_name=to_sdk_tool_name(name),
            tool_call_id=call_id,
            tool_call={"id": call_id, "name": name, "arguments": arguments, "origin": "completion"},
            llm_response_id=response_id,
        )

    def _make_error(self, event: Observation, action: Fields) -> Fields:
        own = _call_of(action)
        if action["action"] is None:  # the agent can correct its call
            own["classification"] = {"kind": "agent_action", "retryable": True, "user_action": "retry"}
        return self._make(event, "AgentErrorEvent", part="error", source="agent", error=event.content, **own)

    def _make_result(self, event: Event, action: Fields, seen: Fields) -> Fields:
        own = {**_call_of(action), "action_id": action["id"], "observation": seen}
        return self._make(event, "ObservationEvent", part=f"result-{action['id']}", source="environment", **own)

    def _convert_result(self, event: Observation, action: Fields) -> Fields:
        match event:
            case ErrorObservation() | OutcomeUnknownObservation():
                return self._make_error(event, action)
            case UserRejectObservation():
                reason = event.content or "The user rejected the action."
                own = {**_call_of(action), "action_id": action["id"], "rejection_reason": reason}
                return self._make(event, "UserRejectObservation", source="environment", **own)
        return self._make_result(
            event, action, to_sdk_observation(event, action["action"], action["tool_call"]["name"])
        )

    def _convert_state(self, event: AgentStateChangedObservation) -> list[Fields]:
        match event.agent_state:
            case AgentState.FINISHED | AgentState.REJECTED:
                return self._end_turn(event)
            case AgentState.PAUSED:
                return [] if self._is_interrupted else [self._make(event, "PauseEvent", source="user")]
            case AgentState.ERROR if event.code != STUCK_CODE:  # the status says that there
                code = _ERROR_CODES.get(event.code, event.code) or "unexpected"
                own = {"code": code, "detail": event.reason or "The agent has failed."}
                return [self._make(event, "ConversationErrorEvent", source="environment", **own)]
        return []

    def _convert_condensation(self, event: CondensationAction) -> Fields:
        forgotten = set(event.forgotten)
        names = [name for event_id in sorted(forgotten & self._sdk_ids.keys()) for name in self._sdk_ids[event_id]]
        if self._summary_id:  # only the latest summary is shown here
            names.append(self._summary_id)
        self._view = [event_id for event_id in self._view if event_id not in forgotten]
        fields = self._make(
            event,
            "Condensation",
            source="environment",
            forgotten_event_ids=names,
            llm_response_id=self._condenser_name or f"condensation-{event.id}",
        )
        self._summary_id = ""
        if event.summary is not None and event.summary_offset is not None:
            before = self._view[: event.summary_offset]
            offset = sum(len(self._sdk_ids.get(event_id, ())) for event_id in before)
            fields |= {"summary": event.summary, "summary_offset": offset}
            self._summary_id = f"{fields['id']}-summary"
        return fields


def _call_of(action: Fields) -> Fields:
    return {name: action[name] for name in ("tool_name", "tool_call_id")}


def _summarize(tool_name: str, arguments: Fields) -> str:
    """Return the sentence that the model wrote about a call, or the start of the call."""
    written = arguments.get("summary")
    if isinstance(written, str) and written.strip():
        return written
    own = {name: value for name, value in arguments.items() if name not in ("summary", "security_risk")}
    return f"{tool_name}: {json.dumps(own)}"[:MAX_SUMMARY_CHARS]


def _is_agent_step(action: Action) -> bool:
    """Return whether the agent performed an action without a call of its model's."""
    return action.source is EventSource.AGENT and (action.runnable or isinstance(action, AgentFinishAction))


def _find_tool(event: Event) -> str:
    """Return the name of the tool of an action without a call."""
    tool = getattr(event, "tool_spec", None)
    return getattr(event, "name", "") or (tool.name if tool is not None else event.kind.partition(".")[2])


def _read_thinking(reply: ModelReply) -> Fields:
    """Return the thinking of a reply: the blocks that the SDK knows, and their text."""
    blocks = [
        block
        for block in reply.thinking_blocks
        if isinstance(block.get(_THINKING.get(str(block.get("type")), "")), str)
        and isinstance(block.get("signature"), str | None)
    ]
    text = "\n".join(str(block["thinking"]) for block in blocks if block["type"] == "thinking")
    own: Fields = {"thinking_blocks": blocks} if blocks else {}
    return own | ({"reasoning_content": text} if text else {})
