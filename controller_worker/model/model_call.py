"""One model call of one step: from a request to an event.

Holds: a call ends in a `Completion` or in a `ModelCallFailed`, whatever goes wrong; a key that was refused gives way to
the others of its quota, and what a failed model's settings name as fallbacks is asked at once, each once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from broker.contract import (
    CallEstimate,
    EventSource,
    LLMSpec,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    TokenUsage,
    replace_surrogates,
    to_plain_json,
)
from broker.runtime import Clock, DeckhandsError, UsageError, jitter
from controller_worker.core import BATCH, last_error_of
from controller_worker.model.models import Models
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.providers import (
    LLM,
    CallBatched,
    Completion,
    Delta,
    HookVeto,
    LLMConfig,
    ModelError,
    ModelRequest,
    RateLimitError,
    next_wait_seconds,
)

_log = logging.getLogger(__name__)


async def ask(
    models: Models,
    spec: LLMSpec,
    request: ModelRequest,
    *,
    attempt: int,
    clock: Clock,
    permit: CallPermit,
    admit: Callable[[str], Awaitable[None]] | None = None,
) -> Completion | ModelCallFailed | ModelCallDeferred:
    """Make one attempt: ask the model and, while it fails, its fallbacks.

    Args:
        attempt: which attempt of this step it is, from 1.
        permit: acquired for this model.
        admit: gets the name of each model before it is asked; raises if it may not be.

    Returns:
        The reply, or what went wrong and when to try again; or that the call was given to a batch.
    """
    try:
        async with models.using(spec, key_env=permit.key_env) as (llm, config):
            if admit is not None:
                await admit(config.model)
            try:
                return await _complete(llm, config, request, permit)
            except ModelError as error:
                others = _others(spec, config, permit) if request.carry is None else []
                answer = await _ask_others(models, others, request, error, permit=permit, admit=admit)
                if isinstance(answer, Completion):
                    return answer
                if not isinstance(answer, ModelError):
                    raise answer from error
                wait = next_wait_seconds(config, attempt, answer, jitter=jitter() - 0.5)
                return _failed(
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
        return failed_by(error, request.conversation_id, attempt=attempt)


def failed_by(error: Exception, conversation_id: str, *, attempt: int) -> ModelCallFailed:
    """Return the failure of a call that something other than the model has ended. It is not retried."""
    last_error = last_error_of(error)
    if isinstance(error, DeckhandsError):
        return _failed(error.code, str(error), last_error, attempt=attempt)
    _log.error("model call of %s", conversation_id, exc_info=error)
    return _failed("unexpected", last_error.partition(": ")[2], last_error, attempt=attempt)


async def _complete(llm: LLM, config: LLMConfig, request: ModelRequest, permit: CallPermit) -> Completion:
    async with permit.held(config.model) as held:
        completion = held.completion = replace(await llm.complete(request), asked=config.model)
    return completion


@dataclass(frozen=True, slots=True)
class _Other:
    """What to ask when a call fails.

    Attributes:
        is_for: whether it is for an error, by its code.
        spec: the model that has failed.
        fallback: what its settings name to be asked instead; None: it is asked with another key.
    """

    is_for: Callable[[str], bool]
    spec: LLMSpec
    fallback: str | None = None


def _others(spec: LLMSpec, config: LLMConfig, permit: CallPermit) -> list[_Other]:
    """Return what to ask when a call fails: the same with its other keys, then the fallbacks."""
    further_keys = permit.key_count(config) - 1
    others = [_Other(_is_rate_limit, spec)] * further_keys
    return others + [_Other(each.is_for, spec, each.use) for each in config.fallbacks]


def _is_rate_limit(code: str) -> bool:
    return code == RateLimitError.code


async def _ask_others(
    models: Models,
    others: Sequence[_Other],
    request: ModelRequest,
    failure: ModelError,
    *,
    permit: CallPermit,
    admit: Callable[[str], Awaitable[None]] | None,
) -> Completion | DeckhandsError:
    """Ask each model that takes over after the latest error, may be called and has room in its quota.

    Returns:
        The first reply; or the first error that may pass, because an attempt is worth repeating if any of them is; or
        why a fallback could not be used at all; or the model's own error.
    """
    failures, obstacles = [failure], list[DeckhandsError]()
    for each in others:
        spec, name = each.spec, each.fallback or each.spec.model
        if not each.is_for(failures[-1].code):
            continue
        _log.warning("conversation %s: %s; asking %s", request.conversation_id, failures[-1].code, name)
        try:
            if each.fallback is not None:
                spec = models.choose_fallback(spec, each.fallback, permit.tenant)
            await models.of(spec)  # a router has to be made before it chooses
            other = await models.routed(spec, request, permit.tenant)
            config = models.settings(other)
            if admit is not None and config is not None:
                await admit(config.model)
            if config is not None and not await permit.try_other(config, request):
                continue
            async with models.using(other, key_env=permit.key_env) as (llm, config):
                _void(request)
                return await _complete(llm, config, request, permit)
        except ModelError as error:
            failures.append(error)
        except (UsageError, HookVeto) as error:
            _log.warning("conversation %s: %s cannot be asked: %s", request.conversation_id, name, error)
            obstacles.append(error)
    return next((error for error in failures if error.retryable), (*obstacles, failures[0])[0])


def _void(request: ModelRequest) -> None:
    """Say that what was shown of the reply so far no longer counts."""
    if request.on_delta is not None:
        request.on_delta(Delta("superseded", ""))


def reply_of(
    completion: Completion, *, iteration: int, seen_id: int, event_id: int, estimated_tokens: int | None = None
) -> ModelReply:
    """Turn a reply into its event; tool call ids that repeat are made unique, so that each result has one call.

    Args:
        estimated_tokens: of the prompt; None where nobody has estimated it.
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
        thinking_blocks=tuple(_kept(_with_ids(completion.thinking_blocks, calls))),
        model=completion.model,
        response_id=completion.response_id,
        stop_reason=completion.stop_reason,
        usage=TokenUsage(**asdict(completion.usage)),
        cost_usd=completion.cost_usd,
        latency_seconds=completion.latency_seconds,
        iteration=iteration,
        seen_id=seen_id,
        estimate=CallEstimate(model=completion.asked, prompt_tokens=estimated_tokens) if is_estimated else None,
        is_usage_estimated=completion.is_usage_estimated or None,
    )


def _with_ids(blocks: Iterable[Mapping[str, Any]], calls: Sequence[ModelToolCall]) -> Iterator[Mapping[str, Any]]:
    """Yield the thoughts of a reply; what is attached to a call without a usable id names its new one."""
    for block in blocks:
        place = block.get("place") if block.get("type") == "call" else None
        if isinstance(place, int) and 0 <= place < len(calls):
            yield {name: value for name, value in block.items() if name != "place"} | {"id": calls[place].id}
        else:
            yield block


def _kept(blocks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what a log can hold of the thoughts of a reply."""
    for block in blocks:
        with contextlib.suppress(ValueError):
            yield to_plain_json(dict(block))


def _failed(
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
