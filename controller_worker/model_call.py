"""One model call of one step: from a request to an event.

Holds: a call ends in a `Completion` or in a `ModelCallFailed`, whatever goes wrong; the same settings share one client;
a key that was refused gives way to the others of its quota, and what a failed model's settings name as fallbacks is
asked at once, each once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import SecretStr

from broker.clock import Clock
from broker.errors import DeckhandsError
from broker.events import (
    EventSource,
    LLMSpec,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    TokenUsage,
    plain_json,
    replace_surrogates,
)
from broker.ids import jitter
from controller_worker.call_gate import CallGate
from controller_worker.gate import BATCH
from controller_worker.hooks import HookVeto
from controller_worker.llm.batching import CallBatched
from controller_worker.llm.config import PRIMARY, LLMConfig
from controller_worker.llm.errors import LLMConfigError, ModelError, RateLimitError
from controller_worker.llm.llm import LLM, Completion, Delta, ModelRequest
from controller_worker.llm.profiles import Profiles
from controller_worker.llm.registry import create_llm, takes_images
from controller_worker.llm.retry import next_wait_seconds
from controller_worker.llm.router import RouterLLM, router_of
from controller_worker.memory.conversation_memory import MAX_MESSAGE_CHARS

ROUTED = "#routed"
"""Behind a profile's name: the model of its own, whatever its router would choose."""

_log = logging.getLogger(__name__)


class Models:
    """The models this worker can call. Address and key come from its environment, never from a conversation.

    A specification's `model` is a profile's name (see `controller_worker.llm.profiles`) or a model's.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._profiles: Profiles | None = None
        self._sights: dict[LLMSpec, bool] = {}
        self._clients: dict[tuple[LLMSpec, str | None], asyncio.Task[tuple[LLM, LLMConfig]]] = {}

    async def of(self, spec: LLMSpec, *, key_env: str | None = None) -> tuple[LLM, LLMConfig]:
        """Return the client for a specification, and its settings.

        Args:
            key_env: the environment variable that holds the key to use; None for the configured one.

        Raises:
            LLMConfigError: no model is configured, or a setting cannot be used.
        """
        client = self._clients.get((spec, key_env))
        if client is None or (client.done() and client.exception() is not None):
            # The first client imports its provider's library, for longer than a heartbeat may be late.
            client = asyncio.create_task(asyncio.to_thread(self._create, spec, key_env))
            self._clients[spec, key_env] = client
        return await asyncio.shield(client)

    def settings(self, spec: LLMSpec) -> LLMConfig | None:
        """Return how a model is asked; None where the settings cannot be used, which the call will say."""
        client = self._clients.get((spec, None))
        if client is not None and client.done() and client.exception() is None:
            return client.result()[1]
        try:
            return self._config(spec)
        except LLMConfigError:
            return None

    async def routed(self, spec: LLMSpec, request: ModelRequest) -> LLMSpec:
        """Return the specification of the model that a router chooses for a request; another one as it is.

        What quotas, budgets and keys count for is then the model that is really asked. A router that cannot choose is
        asked again by the call, which fails.
        """
        config = self.settings(spec)
        if config is None or config.router is None:
            return spec
        try:
            llm, _ = await self.of(spec)
            assert isinstance(llm, RouterLLM)
            name = llm.select(request)
        except Exception:  # noqa: BLE001  (the outer edge: it may be an operator's code)
            return spec
        chosen = (spec.model or "") if name == PRIMARY else name
        return spec.model_copy(update={"model": chosen + ROUTED})

    @property
    def may_batch(self) -> bool:
        """Whether any settings of this worker ask for the provider's batch API."""
        try:
            self._profiles = self._profiles or Profiles.from_env(self._env)
        except LLMConfigError:
            return False  # which the first call will say
        return self._profiles.sets("batch")

    def max_message_chars(self, spec: LLMSpec) -> int:
        """Return how long a text in a prompt may be; the default where the settings cannot be used."""
        config = self.settings(spec)
        return MAX_MESSAGE_CHARS if config is None else config.max_message_chars

    def sees_images(self, spec: LLMSpec) -> bool:
        """Say whether the model, or one that may be asked in its place, takes images."""
        if spec in self._sights:
            return self._sights[spec]
        config = self.settings(spec)
        if config is None:
            return True
        others = [fallback.use for fallback in config.fallbacks]
        others += sorted(config.router.profiles) if config.router is not None else []
        try:
            self._sights[spec] = takes_images(config) or any(
                takes_images(other) for name in others if (other := self.settings(LLMSpec(model=name))) is not None
            )
        except LLMConfigError:
            return True  # which the call will say
        return self._sights[spec]

    async def aclose(self) -> None:
        """Close every client."""
        for client in self._clients.values():
            if client.done() and client.exception() is None:
                await client.result()[0].aclose()

    def _create(self, spec: LLMSpec, key_env: str | None) -> tuple[LLM, LLMConfig]:
        config = self._config(spec)
        if key_env is not None:
            key = self._env.get(key_env, "")
            if not key:
                raise LLMConfigError(f"The quota table names the key {key_env}, which is not set.")
            config = config.model_copy(update={"api_key": SecretStr(key)})
        return self._create_whole(config), config

    def _create_whole(self, config: LLMConfig) -> LLM:
        """Create a model and, if it is a router, those that it may choose."""
        if config.router is None:
            return create_llm(config)
        assert self._profiles is not None
        choices = {name: self._profiles.named(name) for name in sorted(config.router.profiles)}
        router = router_of(config.router, choices)
        return RouterLLM(router, {PRIMARY: create_llm(config)} | {name: create_llm(of) for name, of in choices.items()})

    def _config(self, spec: LLMSpec) -> LLMConfig:
        if self._profiles is None:
            self._profiles = Profiles.from_env(self._env)
        name = spec.model
        is_routed = name is not None and name.endswith(ROUTED)
        if name is not None and is_routed:
            name = name.removesuffix(ROUTED) or None
        config = self._profiles.config(
            name,
            temperature=spec.temperature,
            max_output_tokens=spec.max_output_tokens,
            caching_prompt=spec.caching_prompt,
        )
        return config.model_copy(update={"router": None}) if is_routed else config


async def ask(
    models: Models,
    spec: LLMSpec,
    request: ModelRequest,
    *,
    attempt: int,
    clock: Clock,
    gate: CallGate | None = None,
    admit: Callable[[str], Awaitable[None]] | None = None,
) -> Completion | ModelCallFailed | ModelCallDeferred:
    """Make one attempt: ask the model and, while it fails, its fallbacks.

    Args:
        attempt: which attempt of this step it is, from 1.
        gate: where the call was granted; None for none.
        admit: told the model before it is asked; raises if it may not be.

    Returns:
        The reply, or what went wrong and when to try again; or that the call was given to a batch.
    """
    try:
        llm, config = await models.of(spec, key_env=None if gate is None else gate.seat.key_env)
        if admit is not None:
            await admit(config.model)
        try:
            return await (llm.complete(request) if gate is None else gate.complete(llm, config, request))
        except ModelError as error:
            others = _others(spec, config, gate) if request.carry is None else []
            answer = await _ask_others(models, others, request, error, gate=gate, admit=admit)
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
                retry_at=None if wait is None else clock.now() + timedelta(seconds=wait),
            )
    except CallBatched:
        return ModelCallDeferred(code=BATCH, content="The call was given to a batch of the provider's.")
    except DeckhandsError as error:
        return _failed(error.code, str(error), last_error_of(error), attempt=attempt)
    except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
        _log.exception("model call of %s", request.conversation_id)
        last_error = last_error_of(error)
        return _failed("unexpected", last_error.partition(": ")[2], last_error, attempt=attempt)


def _others(spec: LLMSpec, config: LLMConfig, gate: CallGate | None) -> list[tuple[Callable[[str], bool], LLMSpec]]:
    """Return what to ask when a call fails, and for which errors: the same with its other keys, then the fallbacks."""
    further_keys = 0 if gate is None else gate.key_count(config) - 1
    others: list[tuple[Callable[[str], bool], LLMSpec]] = [(_is_rate_limit, spec)] * further_keys
    return others + [(each.is_for, spec.model_copy(update={"model": each.use})) for each in config.fallbacks]


def _is_rate_limit(code: str) -> bool:
    return code == RateLimitError.code


async def _ask_others(
    models: Models,
    others: Sequence[tuple[Callable[[str], bool], LLMSpec]],
    request: ModelRequest,
    failure: ModelError,
    *,
    gate: CallGate | None,
    admit: Callable[[str], Awaitable[None]] | None,
) -> Completion | DeckhandsError:
    """Ask each that is for the error of the one before it, that may be called and whose quota has room.

    Returns:
        The first reply; or the first error that may pass, because an attempt is worth repeating if any of them is; or
        why a fallback could not be used at all; or the model's own error.
    """
    failures, obstacles = [failure], list[DeckhandsError]()
    for is_for, spec in others:
        if not is_for(failures[-1].code):
            continue
        _log.warning("conversation %s: %s; asking %s", request.conversation_id, failures[-1].code, spec.model)
        try:
            other = await models.routed(spec, request)
            config = models.settings(other)
            if admit is not None and config is not None:
                await admit(config.model)
            if gate is not None and config is not None and not await gate.has_other_seat(config, request):
                continue
            llm, config = await models.of(other, key_env=None if gate is None else gate.seat.key_env)
            _void(request)
            return await (llm.complete(request) if gate is None else gate.complete(llm, config, request))
        except ModelError as error:
            failures.append(error)
        except (LLMConfigError, HookVeto) as error:
            _log.warning("conversation %s: %s cannot be asked: %s", request.conversation_id, spec.model, error)
            obstacles.append(error)
    return next((error for error in failures if error.retryable), (*obstacles, failures[0])[0])


def _void(request: ModelRequest) -> None:
    """Say that what was shown of the reply so far counts no more."""
    if request.on_delta is not None:
        request.on_delta(Delta("superseded", ""))


def last_error_of(error: Exception) -> str:
    """Return an error as OpenHands shows it; of one that nobody foresaw only its name (1.11)."""
    if isinstance(error, DeckhandsError):
        return f"{type(error).__name__}: {error}"
    return (
        f"RuntimeError: There was an unexpected error while running the agent: {type(error).__name__}. "
        "You can ask the agent to try again."
    )


def reply_of(completion: Completion, *, iteration: int, seen_id: int, event_id: int) -> ModelReply:
    """Turn a reply into its event; tool call ids that repeat are made unique, so that each result has one call."""
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
        thinking_blocks=tuple(_kept(completion.thinking_blocks)),
        model=completion.model,
        response_id=completion.response_id,
        stop_reason=completion.stop_reason,
        usage=TokenUsage(
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            cache_read_tokens=completion.usage.cache_read_tokens,
            cache_write_tokens=completion.usage.cache_write_tokens,
        ),
        cost_usd=completion.cost_usd,
        latency_seconds=completion.latency_seconds,
        iteration=iteration,
        seen_id=seen_id,
    )


def _kept(blocks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what a log can hold of the thoughts of a reply."""
    for block in blocks:
        with contextlib.suppress(ValueError):
            yield plain_json(dict(block))


def _failed(
    code: str, content: str, last_error: str, *, attempt: int, retry_at: datetime | None = None
) -> ModelCallFailed:
    return ModelCallFailed(
        code=code,
        content=replace_surrogates(content),
        last_error=replace_surrogates(last_error),
        attempt=attempt,
        retry_at=retry_at,
    )
