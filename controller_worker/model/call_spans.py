"""The span of a model call, named after OpenTelemetry's conventions for generative AI.

Does not: record prompts, replies or tool arguments, unless the operator asks for content; then with masked secrets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from broker.contract import Action, Event, ModelCallDeferred, ModelCallFailed
from broker.runtime import OpenSpan, Tracing, Value, render_content
from broker.secrets import Masker
from controller_worker.core import CallModel
from controller_worker.model.models import ROUTED
from controller_worker.model.question import Question
from controller_worker.providers import Completion, LLMConfig, Message, TextPart, ToolCall, find_provider

PROVIDERS = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "bedrock_converse": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""Litellm's providers with another name in the conventions; the others have the same, or none there."""
UNKNOWN = "unknown"


def name_provider(config: LLMConfig | None) -> str:
    """Return the value of `gen_ai.provider.name` for a model's settings; None for unknown ones."""
    return _name_provider(config.model, config.custom_llm_provider) if config is not None else UNKNOWN


@lru_cache(maxsize=256)  # it may read the table of models
def _name_provider(model: str, custom: str | None) -> str:
    provider = find_provider(model, custom)
    return PROVIDERS.get(provider, provider)


def call_span(
    tracing: Tracing, traceparent: str | None, wanted: CallModel, question: Question, config: LLMConfig | None
) -> OpenSpan:
    """Return the span of a call.

    Args:
        config: the settings of its model; None if they cannot be used.
    """
    if not tracing.is_on:
        return tracing.span("chat", None)
    profile, _, named = (question.llm.model or "").removesuffix(ROUTED).partition("#")
    model = named or profile or "default"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": name_provider(config),
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": question.request.conversation_id,
        "deckhands.service": question.request.service,
        "deckhands.step": wanted.iteration,
        "deckhands.attempt": wanted.attempt,
    }
    return tracing.span(f"chat {model}", traceparent, kind="client", attributes=attributes)


def describe_result(span: OpenSpan, result: Completion | ModelCallFailed | ModelCallDeferred) -> None:
    """Record the result of a call in its span."""
    if isinstance(result, ModelCallFailed):
        span.fail(result.code)
    elif isinstance(result, ModelCallDeferred):
        span.add({"deckhands.deferred": result.code})
    else:
        used = result.usage
        span.add(
            {
                "gen_ai.response.model": result.model,
                "gen_ai.response.id": result.response_id,
                "gen_ai.response.finish_reasons": [result.stop_reason],
                "gen_ai.usage.input_tokens": used.prompt_tokens,
                "gen_ai.usage.output_tokens": used.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": used.cache_read_tokens,
                "gen_ai.usage.cache_creation.input_tokens": used.cache_write_tokens,
            }
        )


async def describe_content(span: OpenSpan, masker: Masker, question: Question, result: object) -> None:
    """Record the prompt and the reply of a call in its span, with masked secrets, in the shape of the conventions."""
    messages = question.request.messages
    system = [_to_part(part.text) for message in messages if message.role == "system" for part in _texts_of(message)]
    content: dict[str, Any] = {
        "gen_ai.system_instructions": system,
        "gen_ai.input.messages": [_to_message(message) for message in messages if message.role != "system"],
    }
    if isinstance(result, Completion):
        parts = [*([_to_part(result.text)] if result.text else []), *map(_to_call, result.tool_calls)]
        reply = {"role": "assistant", "parts": parts, "finish_reason": result.stop_reason}
        content["gen_ai.output.messages"] = [reply]

    def render() -> dict[str, Value]:
        return {name: render_content(masker.mask_wire(value)) for name, value in content.items()}

    span.add(await asyncio.to_thread(render))


def _to_message(message: Message) -> dict[str, Any]:
    parts = [_to_part(part.text) for part in _texts_of(message)]
    if message.role == "tool":
        text = "\n".join(part["content"] for part in parts)
        parts = [{"type": "tool_call_response", "id": message.tool_call_id, "response": text}]
    return {"role": message.role, "parts": [*parts, *map(_to_call, message.tool_calls)]}


def _texts_of(message: Message) -> list[TextPart]:
    return [part for part in message.content if isinstance(part, TextPart)]


def _to_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _to_call(call: ToolCall) -> Mapping[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments}


def add_traceparent(traceparent: str | None, events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of a reply; its actions carry the span of the call."""
    if traceparent is None:
        return tuple(events)
    return tuple(
        event.model_copy(update={"traceparent": traceparent}) if isinstance(event, Action) else event
        for event in events
    )
