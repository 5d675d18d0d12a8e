"""Chat Completions on the wire, as litellm takes and gives it: a request to plain values, a reply to its parts.

Holds: a content is a string wherever a string can hold it: many servers take nothing else, and it costs clients less.
Does not: write bytes; litellm does, for its hundred providers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.tool_specs import ToolSpec
from controller_worker.llm.errors import ContentPolicyError, MalformedReplyError, NoResponseError
from controller_worker.llm.llm import Usage
from controller_worker.llm.messages import Message, TextPart, ToolCall
from controller_worker.llm.messages_wire import CACHE_MARK, Reply, count

REFUSAL_LIMIT_CHARS = 2_000


def chat_messages(messages: Sequence[Message], *, cache_marks: bool, thinking: bool) -> list[dict[str, Any]]:
    """Write the messages.

    Args:
        messages: in order.
        cache_marks: mark the system prompt and the last user or tool message for the provider's cache.
        thinking: replay thinking blocks, which only Claude wants.
    """
    last = next((message for message in reversed(messages) if message.role in ("user", "tool")), None)
    return [
        _message(
            message,
            is_marked=cache_marks and (message.cache or message is last or message.role == "system"),
            thinking=thinking,
        )
        for message in messages
    ]


def chat_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Write the tools."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


def _message(message: Message, *, is_marked: bool, thinking: bool) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": _content(message, is_marked=is_marked)}
    if is_marked and message.role == "tool":
        written["cache_control"] = CACHE_MARK
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        written["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            written["name"] = message.name
    if thinking and message.thinking_blocks:
        written["thinking_blocks"] = [dict(block) for block in message.thinking_blocks]
    return written


def _content(message: Message, *, is_marked: bool) -> str | list[dict[str, Any]] | None:
    # Differs: the original writes lists whenever the model has vision, caching or tools, because strings are enough
    # for plain text and every OpenAI-compatible server takes them.
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    # A mark needs a part to stand on; a tool result carries it on the message.
    is_marked = is_marked and bool(message.content) and message.role != "tool"
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
        parts[-1]["cache_control"] = CACHE_MARK
    return parts


def read_chat_reply(reply: Any) -> Reply:
    """Read litellm's `ModelResponse`.

    Raises:
        MalformedReplyError: it has not the form.
        ContentPolicyError: it is a refusal with nothing else in it.
        NoResponseError: it has no choice, or nothing in it.
    """
    try:
        if not reply.choices:
            raise NoResponseError("The reply has no choices.")
        choice = reply.choices[0]
        message = choice.message
        calls = tuple(
            ToolCall(id=str(call.id), name=str(call.function.name), arguments=str(call.function.arguments or ""))
            for call in message.tool_calls or ()
        )
        parts = Reply(
            text=message.content or "",
            tool_calls=calls,
            thinking_blocks=tuple(dict(block) for block in getattr(message, "thinking_blocks", None) or ()),
            model=str(reply.model or ""),
            response_id=str(reply.id or ""),
            stop_reason=str(choice.finish_reason or ""),
            usage=_usage(getattr(reply, "usage", None)),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReplyError(f"The reply is no chat completion: {error!r}.") from error
    if not (parts.text or parts.tool_calls or parts.thinking_blocks):
        refusal = str(getattr(message, "refusal", None) or "")[:REFUSAL_LIMIT_CHARS]
        if refusal or parts.stop_reason == "content_filter":
            raise ContentPolicyError(refusal or "The model refused to answer.", provider_text=refusal)
        raise NoResponseError("The reply has no content.")
    return parts


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=count(getattr(usage, "prompt_tokens", None)),
        completion_tokens=count(getattr(usage, "completion_tokens", None)),
        cache_read_tokens=count(getattr(details, "cached_tokens", None)),
        cache_write_tokens=count(_extra(usage).get("cache_creation_input_tokens")),
    )


def _extra(usage: Any) -> Mapping[str, Any]:
    extra = getattr(usage, "model_extra", None)
    return extra if isinstance(extra, Mapping) else {}
