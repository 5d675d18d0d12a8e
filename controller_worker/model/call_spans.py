"""The span of a model call, named after OpenTelemetry's conventions for generative AI.

Does not: record prompts, replies or tool arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import Action, Event, ModelCallDeferred, ModelCallFailed
from broker.runtime import OpenSpan, Tracing, Value
from controller_worker.core import CallModel
from controller_worker.model.models import ROUTED
from controller_worker.model.question import Question
from controller_worker.providers import Completion


def call_span(tracing: Tracing, traceparent: str | None, wanted: CallModel, question: Question) -> OpenSpan:
    """Return the span of a call."""
    if not tracing.is_on:
        return tracing.span("chat", None)
    profile, _, named = (question.llm.model or "").removesuffix(ROUTED).partition("#")
    model = named or profile or "default"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
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
            }
        )


def add_traceparent(traceparent: str | None, events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of a reply; its actions carry the span of the call."""
    if traceparent is None:
        return tuple(events)
    return tuple(
        event.model_copy(update={"traceparent": traceparent}) if isinstance(event, Action) else event
        for event in events
    )
