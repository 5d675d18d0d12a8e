"""Anthropic's Messages as a stream: assembles events into the message that a call without streaming would return.

Holds: a reply is complete only if it has a stop reason. Thinking blocks keep their signatures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from controller_worker.providers.errors import MalformedReplyError
from controller_worker.providers.llm import Delta
from controller_worker.providers.wires.provider_errors import StreamedError
from controller_worker.providers.wires.reply import get_counts

_FIELDS: Mapping[str, tuple[str, str]] = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("partial_json", "call"),
    "signature_delta": ("signature", ""),
}
"""By delta type: the field with the piece, and the kind of the streamed piece."""
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
"""Calls of our tools, the provider's tools, and MCP servers that the provider calls."""


class MessagesStream:
    """One reply in progress."""

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self._on_delta = on_delta
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, dict[str, list[str]]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the model has sent its stop reason."""
        return self._message is not None and bool(self._message.get("stop_reason"))

    def take(self, text: str) -> bool:
        """Process the text of the next event. Return whether it ends the message.

        Raises:
            StreamedError: the event is an error.
            MalformedReplyError: the text is not an event.
        """
        try:
            event = json.loads(text)
            if event["type"] == "error":
                raise StreamedError(event)
            self._take(event)
            return bool(event["type"] == "message_stop")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise MalformedReplyError(f"The stream has no event: {error!r}.", provider_text=text) from error

    def reply(self) -> dict[str, Any]:
        """Return the reply as a message.

        Raises:
            MalformedReplyError: the stream ended before the reply did, or its parts are invalid.
        """
        if self._message is None or not self.is_whole:
            raise MalformedReplyError("The stream has ended before the reply.")
        try:
            return self._message | {"content": [self._block(index) for index in sorted(self._blocks)]}
        except TypeError as error:
            raise MalformedReplyError(f"The parts of the reply cannot be put together: {error}.") from error

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self._message = dict(event["message"])
            case "content_block_start":
                block = dict(event["content_block"])
                self._blocks[event["index"]] = block
                if block["type"] in CALLS:
                    number = sum(known["type"] in CALLS for known in self._blocks.values())
                    mark = f"\n[call {number}] " if number > 1 else ""
                    self._on_delta(Delta("call", f"{mark}{block['name']} "))
            case "content_block_delta":
                self._take_delta(event["index"], event["delta"])
            case "message_delta" if self._message is not None:
                self._message["stop_reason"] = event["delta"].get("stop_reason")
                self._message["stop_details"] = event["delta"].get("stop_details")
                further = {"container": event["delta"], "context_management": event}
                self._message |= {name: held[name] for name, held in further.items() if held.get(name)}
                # some gateways do not repeat fields
                later = {name: count for name, count in get_counts(event).items() if count}
                self._message["usage"] = {**get_counts(self._message), **later}

    def _take_delta(self, index: int, delta: Mapping[str, Any]) -> None:
        if delta["type"] == "compaction_delta":  # the complete value, in one piece
            self._blocks[index] |= {name: value for name, value in delta.items() if name != "type"}
        if delta["type"] == "citations_delta":
            self._blocks[index]["citations"] = [*(self._blocks[index].get("citations") or ()), delta["citation"]]
        if delta["type"] not in _FIELDS:
            return  # types that do not exist yet
        name, shown = _FIELDS[delta["type"]]
        self._pieces.setdefault(index, {}).setdefault(name, []).append(delta[name])
        if shown and delta[name]:
            self._on_delta(Delta(shown, delta[name]))  # type: ignore[arg-type]

    def _block(self, index: int) -> dict[str, Any]:
        block = dict(self._blocks[index])
        found = self._pieces.get(index, {})
        for name, pieces in found.items():
            if name != "partial_json":
                block[name] = (block.get(name) or "") + "".join(pieces)
        written = "".join(found.get("partial_json", ()))
        if written:
            try:
                block["input"] = json.loads(written)
            except (ValueError, RecursionError):
                block["input"] = written  # the agent tells the model the problem
        return block
