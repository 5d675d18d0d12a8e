"""Anthropic's Messages on the wire: converts a request to bytes, and a reply to the parts of a completion.

A stream's events are assembled into the message that a call without streaming would return.

Holds: adjacent messages of one role become one, so a tool's result directly follows its call. Content that the API
refuses is left out: empty texts, thinking blocks without Claude's signature, images of unsupported types. A reply is
complete only if it has a stop reason. Thinking blocks keep their signatures.
Does not: read the stream's bytes; see `event_stream`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from broker.contract import ToolSpec
from controller_worker.providers.errors import MalformedReplyError
from controller_worker.providers.llm import CallUsage, Delta, ModelRequest
from controller_worker.providers.messages.message_memo import (
    WrittenMessages,
    WrittenTools,
    WrittenValue,
    json_bytes,
    write_fields,
)
from controller_worker.providers.messages.messages import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    make_ids_distinct,
    to_arguments_object,
    to_valid_name,
)
from controller_worker.providers.strict_schemas import LOOSE, Strict, to_strict_schema, to_strict_tools
from controller_worker.providers.wires.claude_blocks import collect_blocks, list_compaction_counts, restore_blocks
from controller_worker.providers.wires.provider_errors import StreamedError
from controller_worker.providers.wires.reply import ParsedReply, get_counts, parse_token_count, require_usable
from controller_worker.providers.wires.thoughts import is_signed

CacheLifetime = Literal["5m", "1h"]
CACHE_MARKS: Mapping[CacheLifetime, Mapping[str, str]] = {
    "5m": {"type": "ephemeral"},
    "1h": {"type": "ephemeral", "ttl": "1h"},
}
PARAMETER_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""Anthropic refuses a request if a parameter of any tool has another name."""
IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})

_STOP_REASONS: Mapping[str, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}

Block = dict[str, Any]


class MessagesWire:
    """Writes requests.

    Attributes:
        written: the serialized messages so far.
    """

    def __init__(self, *, caching_prompt: bool, cache_lifetime: CacheLifetime = "5m", compacts: bool = False) -> None:
        """Choose the format.

        Args:
            compacts: requests ask for compaction and may contain earlier compaction blocks.
        """
        self._caching_prompt = caching_prompt
        self._mark = CACHE_MARKS[cache_lifetime]
        self.written = WrittenMessages(lambda message: _join(_blocks(message, compacts=compacts)))
        self._marked_system = WrittenMessages(lambda message: _join(_add_mark(_blocks(message), self._mark)))
        self._tools = WrittenTools(_write_tools)

    def write_body(self, parameters: Mapping[str, Any], request: ModelRequest, strict: Strict = LOOSE) -> bytes:
        """Return the JSON body of a request. `parameters` are its fields besides system, tools and messages."""
        shown = make_ids_distinct(request.messages)
        marked = set(map(id, find_turn_ends(shown) if self._caching_prompt else ()))
        fields = dict(parameters)
        thinking = fields.get("thinking")
        if isinstance(thinking, Mapping) and thinking.get("type") == "enabled" and not _may_think(shown):
            del fields["thinking"]
        system = [message for message in shown if message.role == "system" and self.written.bytes_of(message)]
        if system:
            write = self._marked_system if self._caching_prompt else self.written
            *others, last = system
            parts = [*map(self.written.bytes_of, others), write.bytes_of(last)]
            fields["system"] = WrittenValue(b"[%b]" % b",".join(parts))
        if request.tools:
            fields["tools"] = self._tools.value_of(request.tools, is_strict=strict.tools)
        if strict.output is not None:
            schema = to_strict_schema(strict.output, optional_as_null=False)
            if schema is not None:
                form = {"format": {"type": "json_schema", "schema": schema}}
                fields["output_config"] = fields.get("output_config", {}) | form
        if request.stop:
            fields["stop_sequences"] = list(request.stop)
        turns: list[tuple[bytes, list[bytes]]] = []
        latest: bytes | None = None
        for message, written in zip(shown, self.written.list_bytes(shown, besides=marked), strict=True):
            role = message.role
            if role == "system":
                continue
            # The mark moves on with the next request, so these bytes are not worth caching.
            blocks = _join(_add_mark(_blocks(message), self._mark)) if id(message) in marked else written
            if not blocks:
                continue
            name = b"assistant" if role == "assistant" else b"user"
            if latest is name:
                turns[-1][1].append(blocks)
            else:
                turns.append((name, [blocks]))
                latest = name
        messages = b",".join([b'{"role":"%b","content":[%b]}' % (name, b",".join(parts)) for name, parts in turns])
        return b'{%b,"messages":[%b]}' % (write_fields(fields), messages)


def find_turn_ends(messages: Sequence[Message]) -> list[Message]:
    """Return the positions of the last message of the previous request and of this one, for the cache marks.

    Claude finds a cached prefix by looking back from a mark, but at most 20 blocks, and a turn with many calls has
    more. The mark at the end of the previous request is where that request stored its prefix. Together with the system
    prompt's mark, this uses three of the four marks that Claude accepts.
    """
    ends: list[Message] = []
    is_wanted = True
    for message in reversed(messages):
        if message.role in ("user", "tool") and is_wanted:
            ends.insert(0, message)
            if len(ends) == 2:
                break
            is_wanted = False
        is_wanted = is_wanted or message.role == "assistant"
    return ends


def _may_think(messages: Sequence[Message]) -> bool:
    """Return whether a Claude with a thinking budget may think in the current turn.

    Claude refuses thinking in a turn that started without it, such as a turn that another model started.
    """
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    return last is None or not last.tool_calls or any(map(is_signed, last.thinking_blocks))


def _join(blocks: Sequence[Block]) -> bytes:
    return b",".join(json_bytes(block) for block in blocks)


def _add_mark(blocks: list[Block], mark: Mapping[str, str]) -> list[Block]:
    if blocks and "thinking" not in blocks[-1]["type"]:
        blocks[-1] = blocks[-1] | {"cache_control": mark}
    return blocks


def _blocks(message: Message, *, compacts: bool = False) -> list[Block]:
    parts = [block for part in message.content if (block := _part(part)) is not None]
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": to_valid_name(message.tool_call_id or "")}
        return [result | {"content": parts} if parts else result]
    if message.role == "assistant":
        calls = [
            {
                "type": "tool_use",
                "id": to_valid_name(call.id),
                "name": to_valid_name(call.name),
                "input": to_arguments_object(call.arguments),
            }
            for call in message.tool_calls
        ]
        return restore_blocks(message, parts, calls, compacts=compacts)
    return parts


def _part(part: TextPart | ImagePart) -> Block | None:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text} if part.text.strip() else None
    if not part.url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    header, _, content = part.url.partition(",")
    media_type = header.removeprefix("data:").partition(";")[0].lower().replace("image/jpg", "image/jpeg")
    if media_type not in IMAGE_TYPES:
        return {"type": "text", "text": f"[An image of the type {media_type} was left out here.]"}
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": content}}


def _write_tools(tools: Sequence[ToolSpec], *, is_strict: bool) -> list[dict[str, Any]]:
    fitted = [_describe_odd_parameters(tool) for tool in tools]
    # A strict schema forbids all other arguments, also those that are in the description.
    usual = [tool for tool, one in zip(tools, fitted, strict=True) if one is tool]
    schemas = dict(zip(map(id, usual), to_strict_tools(usual), strict=True)) if is_strict else {}
    return [_tool(tool, schemas.get(id(tool))) for tool in fitted]


def _describe_odd_parameters(tool: ToolSpec) -> ToolSpec:
    """Return a tool whose parameters with refused names are in its description instead of its schema."""
    properties = tool.parameters.get("properties")
    names = properties if isinstance(properties, Mapping) else {}
    odd = {name: schema for name, schema in names.items() if not PARAMETER_NAME.fullmatch(name)}
    if not odd:
        return tool
    # The tool worker checks the arguments by the whole schema.
    parameters = tool.parameters | {"properties": {name: names[name] for name in names if name not in odd}}
    parameters.pop("additionalProperties", None)
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in odd]
    note = f"Further arguments, with their JSON Schemas: {json.dumps(odd)}"
    return replace(tool, description=f"{tool.description}\n\n{note}".strip(), parameters=parameters)


def _tool(tool: ToolSpec, strict: Mapping[str, Any] | None) -> dict[str, Any]:
    written = {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
    return written if strict is None else written | {"input_schema": strict, "strict": True}


def read_message(message: Any, *, is_joined: bool = False, part: ParsedReply | None = None) -> ParsedReply:
    """Convert a message, parsed from JSON.

    Args:
        is_joined: the message came in several parts.
        part: the message as `read_part` converts it, if that was done before.

    Raises:
        MalformedReplyError: it violates the protocol.
        ContentPolicyError: it is a refusal.
        NoResponseError: it has no content.
    """
    reply = part if part is not None else read_part(message, is_joined=is_joined)
    details = message.get("stop_details")
    return require_usable(reply, refusal=str(details.get("explanation") or "") if isinstance(details, Mapping) else "")


def read_part(message: Any, *, is_joined: bool = False) -> ParsedReply:
    """Convert a message, or one part of a paused turn, even without content; see `read_message`."""
    try:
        blocks = message["content"]
        stop_reason = str(message.get("stop_reason") or "")
        return ParsedReply(
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            tool_calls=tuple(_tool_call(block) for block in blocks if block["type"] == "tool_use"),
            thinking_blocks=collect_blocks(message, is_joined=is_joined),
            model=str(message["model"]),
            response_id=str(message["id"]),
            stop_reason=_STOP_REASONS.get(stop_reason, stop_reason),
            usage=_usage(get_counts(message)),
            service_tier=str(get_counts(message).get("service_tier") or ""),
        )
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        shown = str(message)[:200]
        raise MalformedReplyError(f"The reply is no message: {error!r}.", provider_text=shown) from error


def _tool_call(block: Mapping[str, Any]) -> ToolCall:
    arguments = block["input"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(block["id"]), name=str(block["name"]), arguments=arguments)


def _usage(usage: Mapping[str, Any]) -> CallUsage:
    # A gateway's counts may be of wrong types. Implausible values are replaced later.
    counted = [usage, *list_compaction_counts(usage)]

    def total(name: str) -> int:
        return sum(parse_token_count(counts.get(name)) for counts in counted)

    read = total("cache_read_input_tokens")
    write = total("cache_creation_input_tokens")
    return CallUsage(
        prompt_tokens=total("input_tokens") + read + write,
        completion_tokens=total("output_tokens"),
        cache_read_tokens=read,
        cache_write_tokens=write,
    )


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
