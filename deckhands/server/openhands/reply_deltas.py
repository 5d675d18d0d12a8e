"""The text of replies as it is written, in OpenHands' transient events, from pieces that may be lost and the log.

Holds: before the events of a reply, its whole text has come, once. Only if a call failed and was repeated, its text
comes again, as in OpenHands.
Does not: send tool calls; OpenHands has no such events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import ModelReply
from broker.runtime import Clock, new_key
from deckhands.server.openhands.events import format_moment

_FIELDS = {"text": "content", "thinking": "reasoning_content"}
"""The fields of an event by the kinds of pieces."""


class ReplyDeltas:
    """The pieces of one conversation's replies.

    Attributes:
        _step: the step that the next reply completes; pieces of others are too late, or come with their reply.
        _call: the call whose pieces were added; empty for none.
        _length: the length of its pieces so far, of all kinds; None if one is missing.
        _sent: its text that was sent.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step = 1
        self._call = ""
        self._length: int | None = 0
        self._sent = ""

    def add_piece(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add a piece of a reply, and return the events to send."""
        if not piece["call"].startswith(f"{self._step}."):
            return []
        if piece["call"] != self._call or piece["at"] == 0:
            self._call, self._length, self._sent = piece["call"], 0, ""
        if self._length is None or piece["at"] != self._length:
            self._length = None
            return []
        self._length += len(piece["text"])
        if piece["kind"] not in _FIELDS or not piece["text"]:
            return []
        if piece["kind"] == "text":
            self._sent += piece["text"]
        return [self._make(piece["kind"], piece["text"])]

    def add_reply(self, reply: ModelReply) -> list[dict[str, Any]]:
        """Add a recorded reply, and return the event for its text that was not sent."""
        if reply.service != "agent":
            return []
        rest = reply.content.removeprefix(self._sent) if reply.content.startswith(self._sent) else ""
        self._step, self._call, self._length, self._sent = reply.iteration + 1, "", 0, ""
        return [self._make("text", rest)] if rest else []

    def _make(self, kind: str, text: str) -> dict[str, Any]:
        return {
            "kind": "StreamingDeltaEvent",
            "id": new_key(),
            "timestamp": format_moment(self._clock.now()),
            "source": "agent",
            _FIELDS[kind]: text,
        }
