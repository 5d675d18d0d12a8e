"""OpenAI's Chat Completions on the wire: converts a request to plain values or bytes, and a reply to its parts.

A stream's chunks are assembled into the reply that a call without streaming would return.

Holds: a content is a string wherever possible, because many servers accept nothing else. A tool result contains text
only, because no model except Claude accepts images there. A reply is complete only if it has a stop reason. The final
`[DONE]` is optional, because some servers omit it.
Differs: the original assembles streamed text only. Here a streamed tool call equals one that was not streamed.
Does not: read the stream's bytes; see `event_stream`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.contract import ToolSpec
from controller_worker.providers.errors import MalformedReplyError, NoResponseError
from controller_worker.providers.llm import CallUsage, Delta, ModelRequest
from controller_worker.providers.messages.message_memo import (
    MessageMemo,
    WrittenMessages,
    WrittenTools,
    json_bytes,
    write_fields,
)
from controller_worker.providers.messages.messages import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    has_images,
    make_ids_distinct,
    to_arguments_text,
    to_valid_name,
)
from controller_worker.providers.model_features import ThoughtForm
from controller_worker.providers.strict_schemas import LOOSE, Strict, to_strict_schema
from controller_worker.providers.wires.event_stream import DONE
from controller_worker.providers.wires.messages_wire import CACHE_MARKS, CacheLifetime, find_turn_ends
from controller_worker.providers.wires.provider_errors import StreamedError, find_choice_failure, is_failure
from controller_worker.providers.wires.reply import (
    ParsedReply,
    get_counts,
    parse_reported_usd,
    parse_token_count,
    require_usable,
)
from controller_worker.providers.wires.thoughts import (
    CALL_ATTACHMENT_FIELDS,
    add_attachments,
    read_thoughts,
    write_thoughts,
)

STOP_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "model_length", "max_output_tokens", "model_context_window_exceeded"), "length"),
    **dict.fromkeys(("refusal", "safety", "sensitive", "prohibited_content", "blocklist", "spii"), "content_filter"),
}
"""Stop reasons that some servers and gateways pass on in the words of Claude, Mistral, GLM and Gemini."""
OUTPUT_NAME = "output"
DESCRIPTION_LIMIT_CHARS = 1_024
"""OpenAI, Azure and servers that imitate them refuse a request with a longer description of a tool."""
CUT_DESCRIPTION = " […]"
SEE_BELOW = "The result is the picture below."


class ChatWire:
    """Writes requests.

    Attributes:
        written: the serialized messages so far.
    """

    def __init__(self, *, cache_marks: bool, thoughts: ThoughtForm, cache_lifetime: CacheLifetime = "5m") -> None:
        """Choose the format.

        Args:
            cache_marks: mark the system prompt and the last user or tool message for the provider's cache.
            thoughts: the format in which the model accepts its thinking back. Claude, whose thinking is signed, is also
                the only model that accepts images in tool results.
        """
        self._cache_marks = cache_marks
        self._mark = CACHE_MARKS[cache_lifetime]
        self._thoughts: ThoughtForm = thoughts
        self._apart: MessageMemo[tuple[Message, Message]] = MessageMemo()
        self._tools = WrittenTools(write_tools)
        self.written = WrittenMessages(lambda message: json_bytes(self._value(message, is_marked=False)))

    def write_body(self, parameters: Mapping[str, Any], request: ModelRequest, strict: Strict = LOOSE) -> bytes:
        """Return the JSON body of a request. `parameters` are its fields besides messages and tools."""
        fields = write_fields(dict(parameters) | write_request_fields(request, strict, self._tools.value_of))
        shown = self._separate_images(make_ids_distinct(request.messages))
        marked = self._choose_marked(shown)
        written = self.written.list_bytes(shown, besides=marked)
        if marked:
            for position, message in enumerate(shown):
                if id(message) in marked:
                    written[position] = json_bytes(self._value(message, is_marked=True))
        return b'{%b,"messages":[%b]}' % (fields, b",".join(written))

    def list_parts(self, request: ModelRequest) -> tuple[bytes, list[bytes]]:
        """Return the JSON of the tools and of each message, as in `write_body` but without cache marks."""
        tools = self._tools.value_of(request.tools, is_strict=False).content if request.tools else b""
        return tools, self.written.list_bytes(self._separate_images(make_ids_distinct(request.messages)))

    def write_values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as plain values."""
        shown = self._separate_images(make_ids_distinct(messages))
        marked = self._choose_marked(shown)
        return [self._value(message, is_marked=id(message) in marked) for message in shown]

    def _separate_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with images from tools moved to separate messages, after all results of the turn."""
        if self._thoughts == "signed" or not any(map(has_images, messages)):
            return messages
        shown: list[Message] = []
        waiting: list[Message] = []
        for message in messages:
            if message.role == "tool" and has_images(message):
                result, pictures = self._apart.of(message, _split_result)
                shown.append(result)
                waiting.append(pictures)
                continue
            if message.role != "tool":
                shown += waiting
                waiting = []
            shown.append(message)
        return [*shown, *waiting]

    def _choose_marked(self, messages: Sequence[Message]) -> set[int]:
        if not self._cache_marks:
            return set()
        return {
            id(message) for message in (*find_turn_ends(messages), *(one for one in messages if one.role == "system"))
        }

    def _value(self, message: Message, *, is_marked: bool) -> dict[str, Any]:
        written: dict[str, Any] = {
            "role": message.role,
            "content": _content(message, self._mark if is_marked else None),
        }
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": to_valid_name(call.name), "arguments": to_arguments_text(call.arguments)},
                }
                for call in message.tool_calls
            ]
            if self._thoughts == "calls":
                add_attachments(message.thinking_blocks, written["tool_calls"])
        if message.role == "tool":
            written["tool_call_id"] = message.tool_call_id
            if message.name is not None:
                written["name"] = to_valid_name(message.name)
            if is_marked:
                written["cache_control"] = self._mark
        return written | write_thoughts(message.thinking_blocks, self._thoughts)


def write_request_fields(
    request: ModelRequest, strict: Strict = LOOSE, write: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return the request fields besides the messages. `write` replaces `write_tools`, for a cached form."""
    write = write or write_tools
    fields: dict[str, Any] = {"tools": write(request.tools, is_strict=strict.tools)} if request.tools else {}
    schema = to_strict_schema(strict.output, optional_as_null=True) if strict.output is not None else None
    if schema is not None:
        output = {"name": OUTPUT_NAME, "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": output}
    return fields | ({"stop": list(request.stop)} if request.stop else {})


def write_tools(tools: Sequence[ToolSpec], *, is_strict: bool = False) -> list[dict[str, Any]]:
    """Return the tools in wire format. Tools whose schemas allow it are strict; long descriptions are cut."""
    written = []
    for tool in tools:
        description = _shorten_description(tool.description)
        function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": tool.parameters}
        schema = to_strict_schema(tool.parameters, optional_as_null=True) if is_strict else None
        if schema is not None:
            function |= {"parameters": schema, "strict": True}
        written.append({"type": "function", "function": function})
    return written


def _shorten_description(text: str) -> str:
    if len(text) <= DESCRIPTION_LIMIT_CHARS:
        return text
    return text[: DESCRIPTION_LIMIT_CHARS - len(CUT_DESCRIPTION)].rstrip() + CUT_DESCRIPTION


def _split_result(result: Message) -> tuple[Message, Message]:
    """Split a tool's result into a message with its text and a message with its images."""
    words = tuple(part for part in result.content if isinstance(part, TextPart)) or (TextPart(SEE_BELOW),)
    pictures = tuple(part for part in result.content if isinstance(part, ImagePart))
    head = TextPart(f"Pictures that belong to the result of {result.name or 'the tool'}:")
    return replace(result, content=words), Message("user", (head, *pictures))


def _content(message: Message, mark: Mapping[str, str] | None) -> str | list[dict[str, Any]] | None:
    # Differs: the original writes lists whenever the model has vision, caching or tools. Strings are enough for plain
    # text, and every OpenAI-compatible server accepts them.
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    # A cache mark needs a content part; a tool result carries it on the message.
    is_marked = mark is not None and bool(message.content) and message.role != "tool"
    if len(texts) == len(message.content) and not is_marked:
        text = "\n".join(texts)
        return text if text.strip() or not message.tool_calls else None
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in message.content
    ]
    if is_marked:
        parts[-1]["cache_control"] = mark
    return parts


def read_chat_reply(reply: Any) -> ParsedReply:
    """Convert a chat completion, parsed from JSON.

    Raises:
        MalformedReplyError: it violates the protocol.
        ContentPolicyError: it is a refusal.
        NoResponseError: it has no choice, or an empty one.
    """
    try:
        if not reply["choices"]:
            raise NoResponseError("The reply has no choices.")
        choice = reply["choices"][0]
        message = choice["message"]
        corner = message.get("provider_specific_fields")  # litellm puts fields here that its own type does not have
        stopped = str(choice.get("finish_reason") or "")
        refusal = str(message.get("refusal") or (corner.get("refusal") if isinstance(corner, Mapping) else "") or "")
        parts = ParsedReply(
            text=_text(message.get("content")),
            tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
            thinking_blocks=read_thoughts(message, str(reply.get("model") or "")),
            model=str(reply.get("model") or ""),
            response_id=str(reply.get("id") or ""),
            stop_reason=STOP_REASONS.get(stopped.lower(), stopped),
            usage=_usage(get_counts(reply)),
            service_tier=str(reply.get("service_tier") or ""),
            reported_usd=parse_reported_usd(get_counts(reply).get("cost")),  # reported by OpenRouter
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReplyError(f"The reply is not a chat completion: {error!r}.") from error
    return require_usable(parts, refusal=refusal)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content or ""


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = json_bytes(arguments).decode()
    return ToolCall(id=str(call.get("id") or ""), name=str(function["name"]), arguments=arguments)


def _usage(usage: Mapping[str, Any]) -> CallUsage:
    asked = _part(usage, "prompt_tokens_details")
    cached = asked.get("cached_tokens") or usage.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")
    prompt = parse_token_count(usage.get("prompt_tokens"))
    written = parse_token_count(usage.get("completion_tokens"))
    # xAI counts thinking separately from the text, and includes it in the total only.
    thought = parse_token_count(_part(usage, "completion_tokens_details").get("reasoning_tokens"))
    is_beside = parse_token_count(usage.get("total_tokens")) == prompt + written + thought
    return CallUsage(
        prompt_tokens=prompt,
        completion_tokens=written + (thought if is_beside else 0),
        cache_read_tokens=parse_token_count(cached),  # OpenAI and most others; Kimi; DeepSeek
        cache_write_tokens=parse_token_count(usage.get("cache_creation_input_tokens")),
    )


def _part(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = usage.get(name)
    return part if isinstance(part, Mapping) else {}


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
        """Process the text of the next event. Return whether it is the last event.

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
        every call of a reply the index 0. For these, a name with a new id starts a new call.
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
