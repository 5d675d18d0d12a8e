"""A turn: a reply of the model, the actions it led to, and their results.

Holds: a call is shown if both its action and its result are there; a call that led to no action is answered by an
observation without a cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.events import Action, Event, EventSource, ModelReply
from controller_worker.llm.messages import Message, TextPart, ToolCall
from controller_worker.memory.observation_text import Content


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool call brought, and the event it came with."""

    event_id: int
    content: Content


@dataclass(slots=True)
class OpenTurn:
    """A reply whose calls do not all have results yet.

    Attributes:
        meanwhile: what came since its prompt was made, with its event ids.
    """

    reply: ModelReply
    meanwhile: list[tuple[int, Message]]
    _called: set[str] = field(default_factory=set)
    _results: dict[str, Result] = field(default_factory=dict)
    _is_spoken: bool = False

    def concerns(self, event: Event) -> bool:
        """Say whether an event belongs to this turn: by its tool call, or as what a reply without calls led to."""
        metadata = event.tool_call_metadata
        if metadata is not None:
            return metadata.reply_id == self.reply.id
        return not self.reply.tool_calls and _is_led_to(event, self.reply)

    def take(self, event: Event, result: Result | None) -> None:
        """Take in an event of the turn, and the result it brings."""
        metadata = event.tool_call_metadata
        if metadata is None:
            self._is_spoken = True
            return
        if isinstance(event, Action):
            self._called.add(metadata.tool_call_id)
        if result is not None and (event.cause is None or metadata.tool_call_id in self._called):
            self._results[metadata.tool_call_id] = result

    def is_complete(self) -> bool:
        """Say whether nothing is missing."""
        return len(self._results) == len(self.reply.tool_calls) and (bool(self.reply.tool_calls) or self._is_spoken)

    def messages(self) -> list[tuple[int, Message]]:
        """Return the reply with those of its calls that have results, and the results; nothing if none has.

        Each with the id of the event it was made from; 0 for the reply itself.
        """
        reply = self.reply
        calls = tuple(
            ToolCall(call.id, call.name, call.arguments) for call in reply.tool_calls if call.id in self._results
        )
        content = (TextPart(reply.content),) if reply.content.strip() else ()
        if not calls and (reply.tool_calls or not content or not self._is_spoken):
            return []
        results = [(call, self._results[call.id]) for call in calls]
        return [
            (0, Message("assistant", content, tool_calls=calls, thinking_blocks=reply.thinking_blocks)),
            *(
                (result.event_id, Message("tool", result.content, tool_call_id=call.id, name=call.name))
                for call, result in results
            ),
        ]


def _is_led_to(event: Event, reply: ModelReply) -> bool:
    return isinstance(event, Action) and event.source is EventSource.AGENT and event.id == reply.id + 1
