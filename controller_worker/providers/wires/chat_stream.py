"""Chat Completions as a stream: assembles chunks into the reply that a call without streaming would return.

Holds: a reply is complete only if it has a stop reason. The final `[DONE]` is optional, because some servers omit it.
Differs: the original assembles streamed text only. Here a streamed tool call equals one that was not streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from controller_worker.providers.errors import MalformedReplyError
from controller_worker.providers.llm import Delta
from controller_worker.providers.wires.event_stream import DONE
from controller_worker.providers.wires.provider_errors import StreamedError, find_choice_failure, is_failure
from controller_worker.providers.wires.thoughts import CALL_ATTACHMENT_FIELDS


class ChatStream:
    """One reply in progress."""

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self._on_delta = on_delta
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._finish_reason: str | None = None
        self._texts: dict[str, list[str]] = {}
        self._thinking_blocks: list[dict[str, Any]] = []
        self._thoughts: list[list[str]] = []  # the pieces of each thinking block
        self._reasoning_items: dict[str, Mapping[str, Any]] = {}  # by id, because litellm repeats them at the end
        self._calls: dict[int, dict[str, Any]] = {}
        self._places: dict[int, int] = {}  # places of calls whose number another call has already
        self._latest_call = -1
        self._shown_call = 0

    @property
    def is_whole(self) -> bool:
        """Whether the model has sent its stop reason."""
        return self._finish_reason is not None

    def take(self, text: str) -> bool:
        """Process the text of the next event. Return whether it is the last one.

        Raises:
            StreamedError: the event is an error.
            MalformedReplyError: the event is not a chunk.
        """
        if text.strip() == DONE:
            return True
        try:
            chunk = json.loads(text)
            if isinstance(chunk, dict) and is_failure(chunk):
                raise StreamedError(chunk)
            if isinstance(chunk, dict) and (failed := find_choice_failure(chunk)) is not None:
                raise failed
            self.take_chunk(chunk)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise MalformedReplyError(f"The stream has no chunk: {error!r}.", provider_text=text) from error
        return False

    def take_chunk(self, chunk: Mapping[str, Any]) -> None:
        """Process a parsed chunk."""
        for name in ("id", "model"):
            self._head.setdefault(name, chunk.get(name))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue  # the request asks for one reply only
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._take_delta(choice.get("delta") or {})

    def reply(self) -> dict[str, Any]:
        """Return the reply as a chat completion.

        Raises:
            MalformedReplyError: the stream ended before the reply did.
        """
        if not self._head or (not self.is_whole and self._has_started()):
            raise MalformedReplyError("The stream has ended before the reply.")
        message: dict[str, Any] = {name: "".join(pieces) for name, pieces in self._texts.items()}
        message["tool_calls"] = [
            call["attached"]
            | {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["arguments"])}}
            for _, call in sorted(self._calls.items())
        ]
        message["thinking_blocks"] = [
            block | {"thinking": "".join(pieces)} if pieces else block
            for block, pieces in zip(self._thinking_blocks, self._thoughts, strict=True)
        ]
        message["reasoning_items"] = list(self._reasoning_items.values())
        choice = {"message": message, "finish_reason": self._finish_reason}
        return self._head | {"choices": [choice] if self._has_started() else [], "usage": self._usage}

    def _has_started(self) -> bool:
        return bool(self._texts or self._calls or self._thinking_blocks or self._finish_reason)

    def _take_delta(self, delta: Mapping[str, Any]) -> None:
        self._take_text("content", "text", delta.get("content"))
        self._take_text("refusal", "text", delta.get("refusal"))
        self._take_text("reasoning_content", "thinking", delta.get("reasoning_content") or delta.get("reasoning"))
        for block in delta.get("thinking_blocks") or ():
            self._take_thinking(block)
        self._reasoning_items |= {str(item.get("id")): item for item in delta.get("reasoning_items") or ()}
        for call in delta.get("tool_calls") or ():
            self._take_call(call)

    def _take_text(self, name: str, kind: Any, piece: Any) -> None:
        if isinstance(piece, str) and piece:
            self._texts.setdefault(name, []).append(piece)
            self._on_delta(Delta(kind, piece))

    def _take_thinking(self, piece: Mapping[str, Any]) -> None:
        """Append to the current thinking block. A signature completes the block."""
        blocks = self._thinking_blocks
        if not blocks or "signature" in blocks[-1] or piece.get("type") == "redacted_thinking":
            blocks.append({"type": piece.get("type") or "thinking"})
            self._thoughts.append([])
        for name, value in piece.items():
            if name == "thinking":
                self._thoughts[-1].append("" + (value or ""))  # raises TypeError unless it is text
            elif value and name != "type":
                blocks[-1][name] = value

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        """Append to a tool call.

        Without an index, a piece belongs to the latest call, or starts a new one if it has an id. Some servers give
        every call of a reply the index 0. There, a name with another id starts a new call.
        """
        function = piece.get("function") or {}
        index = piece.get("index")
        if not isinstance(index, int):
            index = self._latest_call + (1 if piece.get("id") or not self._calls else 0)
        else:
            index = self._find_place(index, piece.get("id"), function.get("name"))
        self._latest_call = max(self._latest_call, index)
        call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": [], "attached": {}})
        call["attached"] |= {name: piece[name] for name in CALL_ATTACHMENT_FIELDS if piece.get(name)}
        call["id"] = call["id"] or piece.get("id") or ""
        name = function.get("name") or ""
        arguments = function.get("arguments") or ""
        call["name"] = call["name"] or name
        call["arguments"].append(arguments if isinstance(arguments, str) else json.dumps(arguments))
        if name or arguments:
            shown = f"{name} {arguments}" if name else call["arguments"][-1]
            # Parallel tool calls are shown with their number in the reply.
            is_other = index != self._shown_call
            self._shown_call = index
            self._on_delta(Delta("call", f"\n[call {index + 1}] {shown}" if is_other else shown))

    def _find_place(self, index: int, call_id: Any, name: Any) -> int:
        """Return the place of the call that a piece with this index belongs to."""
        place = self._places.get(index, index)
        begun = self._calls.get(place)
        if begun and name and call_id and begun["name"] and begun["id"] not in ("", call_id):
            place = self._places[index] = self._latest_call + 1
        return place
