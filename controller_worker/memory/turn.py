"""A turn: a reply of the model, its actions, and their results.

Holds: a call is shown if both its action and its result are there. A call without an action is answered by an
observation without a cause. If a user edited an action before it ran, the result names the edited action, because the
call shows the model's version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from broker.contract import Action, Event, EventSource, ModelReply, PlanAction, RiskyAction, truncate_content
from controller_worker.memory.observation_text import Content
from controller_worker.providers import Message, TextPart, ToolCall

EDITED = "A person changed this action before it ran. What ran has:\n{fields}\n\n"
MAX_EDITED_CHARS = 2_000
NOT_EDITED = frozenset(
    {"id", "timestamp", "thought", "confirmation_state", "replaces", "security_risk", "blobs"}
    | {"answers", "asks", "questions"}
)
"""Fields in which a copy differs from the original action without an edit."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a tool call, and its event."""

    event_id: int
    content: Content


@dataclass(slots=True)
class OpenTurn:
    """A reply with calls that still need results.

    Attributes:
        meanwhile: messages since its prompt was made, with their event ids.
    """

    reply: ModelReply
    meanwhile: list[tuple[int, Message]]
    _called: set[str] = field(default_factory=set)
    _results: dict[str, CallResult] = field(default_factory=dict)
    _asked: dict[int, Action] = field(default_factory=dict)
    _edits: dict[str, str] = field(default_factory=dict)
    _is_spoken: bool = False
    _pictures: tuple[tuple[int, Message], ...] = ()

    def is_part(self, event: Event) -> bool:
        """Return whether an event belongs to this turn: by its tool call, or as the effect of a reply without calls."""
        metadata = event.tool_call_metadata
        if metadata is not None:
            return metadata.reply_id == self.reply.id
        return not self.reply.tool_calls and _is_effect_of(event, self.reply)

    def add(self, event: Event, result: CallResult | None, pictures: Message | None = None) -> None:
        """Add an event of the turn, the result it brings, and the images of its message."""
        metadata = event.tool_call_metadata
        if metadata is None:
            self._is_spoken = True
            self._pictures = ((event.id, pictures),) if pictures is not None else ()
            return
        if isinstance(event, Action):
            self._called.add(metadata.tool_call_id)
            self._asked[event.id] = event
        if isinstance(event, RiskyAction) and event.replaces in self._asked:
            self._edits[metadata.tool_call_id] = render_edit(self._asked[event.replaces], event)
        if result is not None and (event.cause is None or metadata.tool_call_id in self._called):
            self._results[metadata.tool_call_id] = _prepend(self._edits.get(metadata.tool_call_id, ""), result)

    def is_complete(self) -> bool:
        """Return whether nothing is missing."""
        return len(self._results) == len(self.reply.tool_calls) and (bool(self.reply.tool_calls) or self._is_spoken)

    def messages(self) -> list[tuple[int, Message]]:
        """Return the reply with its calls that have results, and the results; empty if there are none.

        Each message has the id of its event; 0 for the reply itself.
        """
        reply = self.reply
        calls = tuple(
            ToolCall(call.id, call.name, call.arguments) for call in reply.tool_calls if call.id in self._results
        )
        content = (TextPart(reply.content),) if reply.content.strip() else ()
        if not calls and (reply.tool_calls or not content or not self._is_spoken):
            return [*self._pictures]
        results = [(call, self._results[call.id]) for call in calls]
        return [
            (0, Message("assistant", content, tool_calls=calls, thinking_blocks=reply.thinking_blocks)),
            *(
                (result.event_id, Message("tool", result.content, tool_call_id=call.id, name=call.name))
                for call, result in results
            ),
            *self._pictures,
        ]


def render_edit(asked: Action, ran: Action) -> str:
    """Return a note for the model that an edited action ran; empty if its own ran, or if the result says so itself."""
    fields = [] if isinstance(ran, PlanAction) else list(_find_edited(asked, ran))
    return EDITED.format(fields="\n".join(f"{name}: {value}" for name, value in fields)) if fields else ""


def _find_edited(asked: Action, ran: Action) -> Iterator[tuple[str, str]]:
    before = dict(asked)
    for name, value in dict(ran).items():
        if name not in NOT_EDITED and before.get(name) != value:
            yield name, truncate_content(_to_text(value), MAX_EDITED_CHARS)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _prepend(told: str, result: CallResult) -> CallResult:
    if not told:
        return result
    first, *rest = result.content or (TextPart(""),)
    if isinstance(first, TextPart):
        return CallResult(result.event_id, (TextPart(told + first.text), *rest))
    return CallResult(result.event_id, (TextPart(told.rstrip()), first, *rest))


def _is_effect_of(event: Event, reply: ModelReply) -> bool:
    return isinstance(event, Action) and event.source is EventSource.AGENT and event.id == reply.id + 1
