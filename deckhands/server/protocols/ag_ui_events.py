"""The events of an AG-UI run, from the log of its conversation.

Holds: the events of a run follow from the log, and each has an id that names its position in the log. So a client that
reconnects with its last id, at any server, gets each further event once. Text that is streamed before its reply is
recorded has ids with the number and the checksum of its characters; the rest of the text is read from the log. A run
starts with a snapshot of all earlier messages, so it may be read again. It ends with another snapshot, which corrects
streamed text that a repeated model call has changed.
Does not: read or write anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

from broker.contract import (
    Action,
    AgentFinishAction,
    AgentRejectAction,
    AgentState,
    ChangeAgentStateAction,
    ConfirmationStatus,
    ConversationCreated,
    DelegateEnded,
    Event,
    EventSource,
    MCPAction,
    MessageAction,
    ModelReply,
    Observation,
    OfferedToolAction,
    OperatorActed,
    RiskyAction,
    TaskTrackingObservation,
    add_remedy,
    asks_for_server,
)
from broker.log import Status
from deckhands.client import Tally
from deckhands.server.models import event_json
from deckhands.server.protocols.ag_ui_input import RUN_LABEL
from deckhands.server.protocols.answer_text import AnswerText, answers_of
from deckhands.server.protocols.progress import SAID
from deckhands.server.streams import Item

if TYPE_CHECKING:
    from ag_ui import core

CURSOR = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?(?:\+([1-4])\.([0-9]{1,9})\.([0-9a-f]{1,8}))?")
WHOLE = 999
"""The slot of an event that stands for all its slots, except those that close a run."""
MAX_SNAPSHOT_CHARS = 4_000_000
"""The length of the messages in a snapshot; with more, the oldest are left out. Clients read 10 MB at once."""
NO_RESULT = "There is no result: the run has ended."
HIDDEN_FIELDS = frozenset(RiskyAction.model_fields) | {"fingerprint", "pool", "tool", "asks", "answers", "questions"}
MARK = "AG-UI run "
UNNAMED = "event-"
"""The name of a run whose message was sent in another way, before the number of the event that starts it."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of an event in a run.

    Attributes:
        event_id: the event of the log from which it follows.
        slot: its position among the events that follow from that event.
        live: for a text that is being streamed: its stage, its length and its checksum.
    """

    event_id: int
    slot: int = WHOLE
    live: tuple[int, int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an id as a cursor; None if it is invalid."""
        found = CURSOR.fullmatch(text.strip())
        if found is None:
            return None
        event_id, slot, opened, length, check = found.groups()
        live = None if opened is None else (int(opened), int(length), int(check, 16))
        return cls(int(event_id), WHOLE if slot is None else int(slot), live)

    def render(self) -> str:
        """Return the id."""
        slot = "" if self.slot == WHOLE else f".{self.slot}"
        return f"{self.event_id}{slot}" + ("+{}.{}.{:x}".format(*self.live) if self.live else "")


def mark_run(run_id: str) -> str:
    """Return the reason that the log has for a run's message or answer."""
    return f"{MARK}{run_id}"


def find_run(events: Iterable[Event], run_id: str) -> int | None:
    """Return the event that starts a run: the user's message or answer; None if there is no such run."""
    is_marked, unnamed = False, None
    for event in events:
        if isinstance(event, ConversationCreated):
            is_marked = (event.labels or {}).get(RUN_LABEL) == run_id
        elif isinstance(event, OperatorActed):
            is_marked = event.reason == mark_run(run_id)
        elif _is_users(event) and isinstance(event, MessageAction | ChangeAgentStateAction):
            if is_marked:
                return event.id
            if run_id == f"{UNNAMED}{event.id}":
                unnamed = event.id
    return unnamed


def find_last_run(events: Iterable[Event]) -> tuple[str, int] | None:
    """Return the last run and the event that starts it. Messages from other interfaces start runs, too."""
    found, name, status = None, "", Status()
    for event in events:
        if isinstance(event, ConversationCreated):
            name = (event.labels or {}).get(RUN_LABEL, "")
        elif isinstance(event, OperatorActed):
            name = event.reason.removeprefix(MARK) if event.reason.startswith(MARK) else ""
        elif _is_users(event) and isinstance(event, MessageAction | ChangeAgentStateAction):
            if found is None or status.is_settled or name:
                found = (name or f"{UNNAMED}{event.id}", event.id)
            name = ""
        status = status.apply(event)
    return found


class RunEvents:
    """Converts the log of a conversation, event by event from the first, to the events of one run.

    Args:
        start: the event that starts the run.
        cursor: the last event that the client has; None if it has none.

    Attributes:
        is_closed: nothing more follows.
        _messages: the thread's messages by their ids.
        _calls: the tool calls without a result, by the ids of their actions; `_asked` has the actions that needed a
            confirmation.
        _step: the step that is open, or empty.
        _place: the place of the event that was written last.
        _opened, _said: for the text that is streamed before its reply: its stage, and its pieces; `_kept` has pieces
            that wait for results of tools.
        _spoken: None if the client reconnected in the middle of a text, whose rest comes with the reply.
    """

    def __init__(self, thread_id: str, run_id: str, start: int, cursor: Cursor | None = None) -> None:
        from ag_ui import core

        self._core = core
        self._thread_id, self._run_id, self._start = thread_id, run_id, start
        self._cursor = cursor if cursor is not None and cursor.event_id >= start else Cursor(start, -1)
        self._tally = Tally()
        self._messages: dict[str, dict[str, Any]] = {}
        self._calls: dict[int, str] = {}
        self._asked: dict[int, RiskyAction] = {}
        self._usage: dict[str, dict[str, int]] = {}
        self._state: dict[str, Any] = {}
        self._tasks: list[dict[str, str]] = []
        self._conversation_id = self._parent = self._step = ""
        self._answers: frozenset[str] = frozenset()
        self._steps = 0
        self._place = Cursor(0)
        self._written: list[bytes] = []
        self._spoken: AnswerText | None = None
        self._opened = self._length = self._checksum = 0
        self._kept = ""
        self.is_closed = False

    @property
    def seen_id(self) -> int:
        """The last event of the log that the client has something of."""
        return self._cursor.event_id

    def of(self, item: Item) -> bytes:
        """Convert an item of a stream to server-sent events."""
        if self.is_closed:
            return b""
        if item.kind == "delta":
            self._add_piece(item.content)
        elif item.kind == "problem":
            self.is_closed = True
            if item.content.get("retryable"):
                return f": {item.content['code']}\n\n".encode()  # the client comes back with its last id
            self._write(WHOLE + 1, "RunErrorEvent", message=item.content["detail"], code=item.content["code"])
        elif item.kind == "end":
            self._close()
        else:
            assert item.event is not None
            self.add(item.event)
        found = b"".join(self._written)
        self._written.clear()
        return found

    def add(self, event: Event) -> None:
        """Add the next event of the log."""
        if self._tally.status.is_settled and _is_users(event):
            if self._place.event_id >= self._start:
                self._close()
                return
            self._drop_calls()
        self._tally.add(event)
        self._place = Cursor(event.id, -1)
        if event.id == self._start:
            self._step = ""
            self._forget_text()
        self._convert(event)
        if event.id == self._start:
            self._write(1, "RunStartedEvent", thread_id=self._thread_id, run_id=self._run_id, protocol_version="1.0")
            self._write(2, "MessagesSnapshotEvent", messages=self._snapshot())
            self._state = self._current_state()
            self._write(3, "StateSnapshotEvent", snapshot=self._state)
        elif event.id > self._start:
            self._write_state()
        self._place = Cursor(event.id)
        if event.id == self._cursor.event_id and self._cursor.live is not None:
            self._opened, self._length, self._checksum = self._cursor.live
            self._spoken = None
            self._step = f"step {self._steps + 1}" if self._opened > 1 else ""
        if self._kept and not self._calls:
            kept, self._kept = self._kept, ""
            self._say(kept)

    def _convert(self, event: Event) -> None:
        match event:
            case ConversationCreated():
                self._conversation_id = event.conversation_id
            case ModelReply(service="agent"):
                self._add_reply(event)
            case MessageAction(source=EventSource.USER):
                self._messages[f"user-{event.id}"] = {"role": "user", "content": event.content}
                if event.id > self._start:
                    self._write_text(f"user-{event.id}", event.content, role="user")
            case MessageAction(source=EventSource.AGENT, content=text):
                self._add_answer(event, text)
            case AgentFinishAction():
                self._add_answer(event, event.final_thought or event.thought)
            case AgentRejectAction():
                self._add_answer(event, str(event.outputs.get("reason", "")) or event.thought)
            case RiskyAction(replaces=int() as replaced) if replaced in self._calls:
                self._calls[event.id] = self._calls[replaced]
            case Action(source=EventSource.AGENT) if event.kind not in SAID:
                self._add_call(event)
            case Action() if asks_for_server(event):
                self._add_call(event)
            case TaskTrackingObservation():
                self._tasks = [{"id": i.id, "title": i.title, "status": i.status} for i in event.task_list]
                self._add_result(event, event.cause, event.content)
            case Observation():
                self._add_result(event, event.cause, event.content or event.agent_text)
            case DelegateEnded():
                self._add_result(event, event.delegate_id, event.content)

    def _add_reply(self, event: ModelReply) -> None:
        self._steps = event.iteration or self._steps + 1
        whole, self._answers = answers_of(event_json(event))
        text = whole.lstrip()
        name = f"step-{self._steps}"
        self._parent = name if name not in self._messages else f"{name}-{event.id}"
        used = self._usage.setdefault(event.model, {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0})
        if event.id > self._start:
            used["input_tokens"] += event.usage.prompt_tokens
            used["output_tokens"] += event.usage.completion_tokens
            used["total_tokens"] += event.usage.prompt_tokens + event.usage.completion_tokens
        if text:
            self._messages[self._parent] = {"role": "assistant", "content": text}
        opened, length, checksum = self._opened, self._length, self._checksum
        self._forget_text()
        self._open_step(1, opened)
        if text and opened < 3:
            self._write(3, "TextMessageStartEvent", message_id=self._parent, role="assistant")
        is_same = _checksum(text[:length]) == checksum
        if text[length:] and is_same:
            self._write(4, "TextMessageContentEvent", message_id=self._parent, delta=text[length:])
        if text or opened > 2:
            self._write(5, "TextMessageEndEvent", message_id=self._parent)
        if not is_same:  # the call was repeated, and says something else
            self._write(6, "MessagesSnapshotEvent", messages=self._snapshot())

    def _open_step(self, slot: int, opened: int = 0) -> None:
        if self._step and opened < 1:
            self._write(slot, "StepFinishedEvent", step_name=self._step)
        if opened < 2:
            self._step = f"step {self._steps}"
            self._write(slot + 1, "StepStartedEvent", step_name=self._step)

    def _add_answer(self, event: Event, text: str) -> None:
        """Add the agent's message, unless the model's reply contained it."""
        if not text.strip() or "".join(text.split()) in self._answers:
            return
        self._messages[f"message-{event.id}"] = {"role": "assistant", "content": text}
        self._write_text(f"message-{event.id}", text)

    def _write_text(self, name: str, text: str, role: str = "assistant") -> None:
        self._write(1, "TextMessageStartEvent", message_id=name, role=role)
        if text:
            self._write(2, "TextMessageContentEvent", message_id=name, delta=text)
        self._write(3, "TextMessageEndEvent", message_id=name)

    def _add_call(self, event: Action) -> None:
        call, name, arguments = f"call-{event.id}", _tool_of(event), _arguments_of(event)
        parent = self._parent or f"actions-{event.id}"
        self._calls[event.id] = call
        if isinstance(event, RiskyAction) and event.confirmation_state is ConfirmationStatus.AWAITING_CONFIRMATION:
            self._asked[event.id] = event
        made = {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        holder = self._messages.setdefault(parent, {"role": "assistant"})
        holder.setdefault("tool_calls", []).append(made)
        self._write(1, "ToolCallStartEvent", tool_call_id=call, tool_call_name=name, parent_message_id=parent)
        self._write(2, "ToolCallArgsEvent", tool_call_id=call, delta=arguments)
        self._write(3, "ToolCallEndEvent", tool_call_id=call)

    def _add_result(self, event: Event, cause: int | None, text: str) -> None:
        if cause is not None and (call := self._calls.get(cause)) is not None:
            self._write_result(1, f"result-{event.id}", call, text)

    def _write_result(self, slot: int, name: str, call: str, text: str) -> None:
        self._calls = {action: other for action, other in self._calls.items() if other != call}
        self._messages[name] = {"role": "tool", "tool_call_id": call, "content": text}
        self._write(slot, "ToolCallResultEvent", message_id=name, tool_call_id=call, content=text, role="tool")

    # The text that is streamed ahead of its reply

    def _forget_text(self) -> None:
        self._spoken = AnswerText(self._steps + 1)
        self._opened = self._length = self._checksum = 0
        self._kept = ""

    def _add_piece(self, piece: Mapping[str, Any]) -> None:
        if self._spoken is None or self._place.event_id < max(self._start, self._cursor.event_id):
            return
        words = self._spoken.add_piece(piece)
        if self._calls:
            self._kept += words  # a message that starts before the results of the step before would stand before them
        else:
            self._say(words)

    def _say(self, words: str) -> None:
        if not words:
            return
        name = f"step-{self._steps + 1}"
        if name in self._messages:
            return  # a step that was rolled back; the text comes with the reply
        if self._opened < 1 and self._step:
            self._write_ahead(1, "StepFinishedEvent", step_name=self._step)
        if self._opened < 2:
            self._step = f"step {self._steps + 1}"
            self._write_ahead(2, "StepStartedEvent", step_name=self._step)
        if self._opened < 3:
            self._write_ahead(3, "TextMessageStartEvent", message_id=name, role="assistant")
        self._length += len(words)
        self._checksum = crc32(words.encode("utf-8", "surrogatepass"), self._checksum)
        self._write_ahead(4, "TextMessageContentEvent", message_id=name, delta=words)

    def _write_ahead(self, opened: int, kind: str, **fields: Any) -> None:
        self._opened = opened
        self._write(self._place.slot, kind, is_ahead=True, **fields)

    # The end

    def _close(self) -> None:
        """Write the end of the run, and close it."""
        last = self._place.event_id
        if self._opened > 2:
            self._write(WHOLE + 1, "TextMessageEndEvent", message_id=f"step-{self._steps + 1}")
        if self._step:
            self._write(WHOLE + 2, "StepFinishedEvent", step_name=self._step)
        status, summary = self._tally.status, self._tally.summary()
        outcome: dict[str, Any] = {"type": "success"}
        if status.state is AgentState.AWAITING_USER_CONFIRMATION:
            outcome = {"type": "interrupt", "interrupts": [self._interrupt(status.confirmation_id)]}
        else:
            if status.state in (AgentState.STOPPED, AgentState.PAUSED):
                outcome = {"type": "cancelled"}
            for n, call in enumerate(dict.fromkeys(self._calls.values())):
                self._write_result(WHOLE + 3 + n, f"end-{last}-{call}", call, NO_RESULT)
        slot = WHOLE + 3 + len(self._messages)
        self._write(slot, "MessagesSnapshotEvent", messages=self._snapshot())
        self._write(slot + 1, "StateSnapshotEvent", snapshot=self._current_state())
        usage = [{"model": model, **used} for model, used in self._usage.items() if used["total_tokens"]] or None
        if status.state is AgentState.ERROR:
            message = add_remedy(summary.last_error, summary.remedy)
            self._write(slot + 2, "RunErrorEvent", message=message, code=summary.error_code or None, usage=usage)
        else:
            ended: dict[str, Any] = {"result": summary.outputs or summary.message, "outcome": outcome, "usage": usage}
            self._write(slot + 2, "RunFinishedEvent", thread_id=self._thread_id, run_id=self._run_id, **ended)
        self.is_closed = True

    def _drop_calls(self) -> None:
        """Forget the calls of an earlier run, as its end did."""
        if self._tally.status.state is not AgentState.AWAITING_USER_CONFIRMATION:
            for call in dict.fromkeys(self._calls.values()):
                self._write_result(0, f"end-{self._place.event_id}-{call}", call, NO_RESULT)

    def _interrupt(self, action_id: int | None) -> dict[str, Any]:
        action = self._asked.get(action_id or 0)
        call = self._calls.get(action_id or 0)
        approved = {"type": "boolean", "description": "whether the action may run"}
        reason = {"type": "string", "description": "why not; the agent reads it and continues"}
        properties: dict[str, Any] = {"approved": approved, "reason": reason}
        if action is not None and asks_for_server(action):
            assert isinstance(action, MCPAction)
            server = (action.tool or action.name).partition("/")[0]
            forms = [question.fields for question in action.questions if question.fields is not None]
            form = forms[0] if len(forms) == 1 else {"type": "object"}
            kind, properties["answers"] = "input_required", form
            message = "\n".join(question.render(server) for question in action.questions)
        else:
            kind = "tool_call"
            properties["editedArgs"] = {"type": "object", "description": "replaces these arguments before it runs"}
            message = action.sentence if action is not None else ""
        schema = {"type": "object", "properties": properties, "required": ["approved"]}
        bound = {"tool_call_id": call} if call is not None else {}
        return {
            "id": interrupt_id(action_id),
            "reason": kind if call is not None or kind != "tool_call" else "confirmation",
            "message": message,
            "response_schema": schema,
            **bound,
        }

    # Parts

    def _current_state(self) -> dict[str, Any]:
        return {
            "conversation_id": self._conversation_id,
            "state": self._tally.status.state.value,
            "steps": self._steps,
            "tasks": self._tasks,
        }

    def _write_state(self) -> None:
        state = self._current_state()
        delta = [
            {"op": "replace", "path": f"/{name}", "value": value}
            for name, value in state.items()
            if value != self._state[name]
        ]
        self._state = state
        if delta:
            self._write(7, "StateDeltaEvent", delta=delta)

    def _snapshot(self) -> list[dict[str, Any]]:
        """Return the thread's messages; of a very long thread, the newest."""
        room = MAX_SNAPSHOT_CHARS
        newest: list[dict[str, Any]] = []
        for name, message in reversed(self._messages.items()):
            room -= len(message.get("content") or "") + sum(
                len(each["function"]["arguments"]) for each in message.get("tool_calls", ())
            )
            if room < 0 and newest:
                break
            newest.append({"id": name, **message})
        known = {each["id"] for message in newest for each in message.get("tool_calls", ())}
        return [each for each in reversed(newest) if each["role"] != "tool" or each["tool_call_id"] in known]

    def _write(self, slot: int, kind: str, *, is_ahead: bool = False, **fields: Any) -> None:
        """Write an event, unless the client already has it."""
        place = self._place.event_id, slot
        if place[0] < self._start:
            return
        if place <= (self._cursor.event_id, self._cursor.slot) and not is_ahead:
            return
        live = (self._opened, self._length, self._checksum) if self._opened else None
        name = Cursor(place[0], slot, live).render()
        event: core.BaseEvent = getattr(self._core, kind)(**fields)
        text = event.model_dump_json(by_alias=True)
        self._written.append(f"id: {name}\ndata: {text}\n\n".encode("utf-8", "replace"))


def interrupt_id(action_id: int | None) -> str:
    """Return the id of the interrupt that asks about an action."""
    return f"confirm-{action_id}"


def edits_of(action: Event, edited: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an action that replace the arguments of its displayed call."""
    return {"arguments": dict(edited)} if isinstance(action, OfferedToolAction) else dict(edited)


def _tool_of(action: Action) -> str:
    if isinstance(action, OfferedToolAction):
        return action.name
    called = action.tool_call_metadata
    return called.function_name if called is not None else action.kind.removeprefix("action.")


def _arguments_of(action: Action) -> str:
    if isinstance(action, OfferedToolAction):
        return json.dumps(action.arguments, ensure_ascii=False)
    given = action.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    shown = {name: value for name, value in given.items() if name not in HIDDEN_FIELDS}
    return json.dumps(shown, ensure_ascii=False)


def _is_users(event: Event) -> bool:
    return event.source is EventSource.USER


def _checksum(text: str) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"))
