"""One model call of one step: from a request to an event.

Holds: a call always ends in a `Completion` or a `ModelCallFailed`. If a key is rate limited, the other keys of its
quota are tried. If the model fails, its fallbacks are tried immediately, each once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from broker.contract import (
    TOKENS_BLOB,
    BlobRef,
    CallEstimate,
    EventSource,
    LLMSpec,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    RecordedTokens,
    TokenUsage,
    replace_surrogates,
    to_plain_json,
)
from broker.runtime import Clock, DeckhandsError, UsageError, draw_jitter
from broker.secrets import OwnEndpoint
from controller_worker.core import BATCH, render_last_error
from controller_worker.model.models import Models
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.providers import (
    LLM,
    CallBatched,
    CallUsage,
    Completion,
    Delta,
    HookVeto,
    InternalServerError,
    LLMConfig,
    LLMConfigError,
    ModelError,
    ModelRequest,
    RateLimitError,
    ServiceUnavailableError,
    TokensMissingError,
    compute_next_wait_seconds,
)

MAX_REPLICAS_TRIED = 8
"""The most keys or replicas of a model that one attempt tries."""

_log = logging.getLogger(__name__)


async def ask_model(
    models: Models,
    spec: LLMSpec,
    request: ModelRequest,
    *,
    attempt: int,
    clock: Clock,
    permit: CallPermit,
    endpoint: OwnEndpoint | None = None,
    admit: Callable[[str], Awaitable[None]] | None = None,
) -> Completion | ModelCallFailed | ModelCallDeferred:
    """Make one attempt: call the model and, if it fails, its fallbacks.

    Args:
        attempt: the number of this attempt within the step, from 1.
        permit: the permit acquired for this model.
        endpoint: the conversation's own; no call goes elsewhere then.
        admit: called with the name of each model before the call; raises if the model may not be called.

    Returns:
        The reply; or the failure and the time of the next attempt; or a deferral if the call was added to a batch.
    """
    try:
        async with models.use_client(spec, key=permit.key, endpoint=endpoint) as (llm, config):
            if admit is not None:
                await admit(config.model)
            try:
                return await _complete(llm, config, request, permit)
            except ModelError as error:
                is_bound = request.carry is not None or endpoint is not None
                others = [] if is_bound else _list_alternatives(spec, config, permit)
                answer = await _ask_alternatives(models, others, request, error, permit=permit, admit=admit)
                if isinstance(answer, Completion):
                    return answer
                if not isinstance(answer, ModelError):
                    raise answer from error
                wait = compute_next_wait_seconds(config, attempt, answer, jitter=draw_jitter() - 0.5)
                return _make_failure(
                    answer.code,
                    answer.provider_text or str(answer),
                    answer.last_error,
                    attempt=attempt,
                    attempts=config.num_retries,
                    retry_at=None if wait is None else clock.now() + timedelta(seconds=wait),
                )
    except CallBatched:
        return ModelCallDeferred(code=BATCH, content="The call was given to a batch of the provider's.")
    except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
        return to_call_failure(error, request.conversation_id, attempt=attempt)


def to_call_failure(error: Exception, conversation_id: str, *, attempt: int) -> ModelCallFailed:
    """Return the failure event for an error outside the model. Such a call is not retried."""
    last_error = render_last_error(error)
    if isinstance(error, DeckhandsError):
        return _make_failure(error.code, str(error), last_error, attempt=attempt)
    _log.error("model call of conversation %s failed", conversation_id, exc_info=error)
    return _make_failure("unexpected", last_error.partition(": ")[2], last_error, attempt=attempt)


async def _complete(llm: LLM, config: LLMConfig, request: ModelRequest, permit: CallPermit) -> Completion:
    async with permit.hold(config.model) as held:
        completion = held.completion = replace(await llm.complete(request), asked=config.model)
    if request.rollout is not None and completion.tokens is None:
        raise TokensMissingError(
            f"The model {config.model!r} returns no exact tokens, which a rollout records.",
            remedy="Use a server such as vLLM with the backend openai, or submit the task without rollout.",
        )
    return completion


@dataclass(frozen=True, slots=True)
class _Alternative:
    """One alternative to try when a call fails.

    Attributes:
        is_for: returns whether this alternative applies to an error code.
        spec: the model that failed.
        fallback: the fallback named in its settings; None to retry the same model with another key.
    """

    is_for: Callable[[str], bool]
    spec: LLMSpec
    fallback: str | None = None


def _list_alternatives(spec: LLMSpec, config: LLMConfig, permit: CallPermit) -> list[_Alternative]:
    """Return the alternatives in order: the same model with its other keys or replicas, then the fallbacks."""
    pool = permit.find_pool(config)
    others: list[_Alternative] = []
    if pool is not None:
        is_for = _is_for_replicas if pool.has_replicas else _is_rate_limit
        others = [_Alternative(is_for, spec)] * (min(len(pool.quotas), MAX_REPLICAS_TRIED) - 1)
    return others + [_Alternative(each.is_for, spec, each.use) for each in config.fallbacks]


def _is_rate_limit(code: str) -> bool:
    return code == RateLimitError.code


def _is_for_replicas(code: str) -> bool:
    """Return whether another replica may take the call: this one is full, or does not answer."""
    return code in (RateLimitError.code, ServiceUnavailableError.code, InternalServerError.code)


async def _ask_alternatives(
    models: Models,
    others: Sequence[_Alternative],
    request: ModelRequest,
    failure: ModelError,
    *,
    permit: CallPermit,
    admit: Callable[[str], Awaitable[None]] | None,
) -> Completion | DeckhandsError:
    """Call each alternative that applies to the latest error, is allowed and has room in its quota.

    Returns:
        The first of these that exists: a reply; a retryable error, which makes another attempt worthwhile; the reason
        why a fallback could not be used; the first model's error.
    """
    failures = [failure]
    obstacles = list[DeckhandsError]()
    for each in others:
        spec = each.spec
        name = each.fallback or spec.model
        if not each.is_for(failures[-1].code):
            continue
        _log.warning("conversation %s: %s; calling %s", request.conversation_id, failures[-1].code, name)
        try:
            if each.fallback is not None:
                spec = models.choose_fallback(spec, each.fallback, permit.tenant)
            await models.get_client(spec)  # a router must exist before it can choose
            other = await models.route(spec, request, permit.tenant)
            config = models.find_settings(other)
            if each.fallback is not None and config is not None and config.own_endpoints:
                raise LLMConfigError(
                    f"The fallback {name!r} is an entry with own_endpoints.", remedy="Name another fallback."
                )
            if admit is not None and config is not None:
                await admit(config.model)
            if config is not None and not await permit.try_alternative(config, request):
                continue
            async with models.use_client(other, key=permit.key) as (llm, config):
                if request.on_delta is not None:
                    request.on_delta(Delta("superseded", ""))  # discard the text of the model before
                return await _complete(llm, config, request, permit)
        except ModelError as error:
            failures.append(error)
        except (UsageError, HookVeto) as error:
            _log.warning("conversation %s: cannot call %s: %s", request.conversation_id, name, error)
            obstacles.append(error)
    return next((error for error in failures if error.retryable), (*obstacles, failures[0])[0])


def to_model_reply(
    completion: Completion,
    *,
    iteration: int,
    seen_id: int,
    event_id: int,
    estimated_tokens: int | None = None,
    recorded: BlobRef | None = None,
) -> ModelReply:
    """Convert a reply to its event. Repeated tool call ids are made unique, so that each result has one call.

    Args:
        estimated_tokens: the estimated size of the prompt; None without an estimate.
        recorded: the stored record of its tokens; None if it has none.
    """
    is_estimated = estimated_tokens is not None
    calls: list[ModelToolCall] = []
    taken: set[str] = set()
    for call in completion.tool_calls:
        call_id = replace_surrogates(call.id) or f"call_{event_id}_{len(calls) + 1}"
        while call_id in taken:
            call_id = f"{call_id}_{len(calls) + 1}"
        taken.add(call_id)
        calls.append(
            ModelToolCall(
                id=call_id,
                name=replace_surrogates(call.name),
                arguments=replace_surrogates(call.arguments),
                problem=replace_surrogates(call.problem) if call.problem else None,
            )
        )
    return ModelReply(
        id=event_id,
        source=EventSource.AGENT,
        content=replace_surrogates(completion.text),
        tool_calls=tuple(calls),
        thinking_blocks=tuple(_to_storable(_replace_places(completion.thinking_blocks, calls))),
        model=completion.model,
        response_id=completion.response_id,
        stop_reason=completion.stop_reason,
        usage=TokenUsage(**{name: getattr(completion.usage, name) for name in CallUsage.__slots__}),
        cost_usd=completion.cost_usd,
        latency_seconds=completion.latency_seconds,
        iteration=iteration,
        seen_id=seen_id,
        estimate=CallEstimate(model=completion.asked, prompt_tokens=estimated_tokens) if is_estimated else None,
        is_usage_estimated=completion.is_usage_estimated or None,
        tokens=_to_recorded_tokens(completion),
        blobs=None if recorded is None else {TOKENS_BLOB: recorded},
    )


def _to_recorded_tokens(completion: Completion) -> RecordedTokens | None:
    tokens = completion.tokens
    if tokens is None:
        return None
    oldest, newest = tokens.reply.find_version_bounds() or (None, None)
    return RecordedTokens(
        start=tokens.start,
        prompt=len(tokens.prompt),
        sampled=len(tokens.reply.sampled),
        min_version=oldest,
        max_version=newest,
        messages=tokens.messages,
        digest=tokens.digest,
        model=completion.asked,
    )


def _replace_places(blocks: Iterable[Mapping[str, Any]], calls: Sequence[ModelToolCall]) -> Iterator[Mapping[str, Any]]:
    """Yield the thinking blocks of a reply. A block attached to a call without a usable id gets the call's new id."""
    for block in blocks:
        place = block.get("place") if block.get("type") == "call" else None
        if isinstance(place, int) and 0 <= place < len(calls):
            yield {name: value for name, value in block.items() if name != "place"} | {"id": calls[place].id}
        else:
            yield block


def _to_storable(blocks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the thinking blocks as plain JSON, leaving out those that JSON cannot hold."""
    for block in blocks:
        with contextlib.suppress(ValueError):
            yield to_plain_json(dict(block))


def _make_failure(
    code: str,
    content: str,
    last_error: str,
    *,
    attempt: int,
    attempts: int | None = None,
    retry_at: datetime | None = None,
) -> ModelCallFailed:
    return ModelCallFailed(
        code=code,
        content=replace_surrogates(content),
        last_error=replace_surrogates(last_error),
        attempt=attempt,
        attempts=attempts,
        retry_at=retry_at,
    )
