"""Tools for models without function calling: calls and results travel as text (OpenHands 6.5).

It wraps any backend and implements the same protocol.

Holds: the log keeps calls, never their text form, so a conversation can continue with a model that calls tools
natively.
Does not: reject a history with several calls in one message, as the original does. A model that calls tools natively
may have written it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.contract import ToolSpec
from controller_worker.providers import (
    LLM,
    STOP_WORD,
    Completion,
    ImagePart,
    LLMConfig,
    Message,
    MessageMemo,
    ModelRequest,
    TextPart,
    add_example,
    add_suffix,
    find_features,
    needs_example,
    read_calls,
    render_system_suffix,
    write_calls,
)

RESULT_PREFIX = "EXECUTION RESULT of [{name}]:\n"


class TextToolsLLM:
    """A model with its tools described in the prompt and its calls parsed from the reply's text."""

    def __init__(self, inner: LLM, config: LLMConfig) -> None:
        self._inner = inner
        self._wants_example = needs_example(config.model)
        has_stop_word = find_features(config.known_as).stop_words and not config.disable_stop_word
        self._stop = (STOP_WORD,) if has_stop_word else ()
        self._made: MessageMemo[Message] = MessageMemo()
        self._suffix: tuple[Sequence[ToolSpec], str] = ((), "")  # of the latest tools, which rarely change

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once. See `LLM.complete`."""
        tools = {tool.name: tool for tool in request.tools}
        messages = self._messages(request, tools)
        if not tools:
            return await self._inner.complete(replace(request, messages=messages))
        stop = (*request.stop, *self._stop)
        completion = await self._inner.complete(replace(request, messages=messages, tools=(), stop=stop))
        if completion.tool_calls:
            return completion  # some servers recognise the format and convert it to calls themselves
        text, calls = read_calls(
            completion.text,
            tools,
            ids=f"toolu_{request.iteration + 1:02d}_",
            is_cut=completion.stop_reason == "length",
        )
        stop_reason = "tool_calls" if calls else completion.stop_reason
        return replace(completion, text=text, tool_calls=calls, stop_reason=stop_reason)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()

    def _messages(self, request: ModelRequest, tools: Mapping[str, ToolSpec]) -> list[Message]:
        messages = [self._made.of(message, lambda made: _to_text(made, tools)) for message in request.messages]
        if not tools:
            return messages
        if self._suffix[0] != request.tools:
            self._suffix = (request.tools, render_system_suffix(request.tools))
        suffix = self._suffix[1]
        first = next((index for index, message in enumerate(messages) if message.role == "system"), None)
        if first is None:
            messages.insert(0, Message("system", (TextPart(suffix.lstrip()),)))
        else:
            messages[first] = add_suffix(messages[first], suffix)
        task = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if task is not None and self._wants_example:
            messages[task] = _with_example(messages[task], request)
        return messages


def _to_text(message: Message, tools: Mapping[str, ToolSpec]) -> Message:
    """Convert a message to plain text, which any chat model can read."""
    if message.role == "tool":
        prefix = RESULT_PREFIX.format(name=message.name or "function")
        return Message("user", _add_prefix(message.content, prefix))
    if message.role == "assistant":
        text = "\n".join(part.text for part in message.content if isinstance(part, TextPart))
        images = tuple(part for part in message.content if isinstance(part, ImagePart))
        written = TextPart(write_calls(text, message.tool_calls, tools))
        return Message("assistant", (written, *images), thinking_blocks=message.thinking_blocks)
    return message


def _add_prefix(content: tuple[TextPart | ImagePart, ...], prefix: str) -> tuple[TextPart | ImagePart, ...]:
    if content and isinstance(content[0], TextPart):
        return (TextPart(prefix + content[0].text), *content[1:])
    return (TextPart(prefix), *content)


def _with_example(message: Message, request: ModelRequest) -> Message:
    if message.content and isinstance(message.content[0], TextPart):
        text = add_example(message.content[0].text, request.tools)
        return replace(message, content=(TextPart(text), *message.content[1:]))
    text = add_example("", request.tools)
    return replace(message, content=(TextPart(text), *message.content)) if text else message
