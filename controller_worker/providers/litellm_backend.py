"""All other providers, through litellm.

Holds: a key is sent only to its own address. A call goes to a public address unless the settings name another one (see
`egress`). One attempt per call; neither litellm nor its clients retry. litellm downloads nothing at import, prints
nothing, and does not read a `.env` file in the current directory.
Does not: import litellm before a model is created; that costs seconds of CPU and 250 MB. Does not close the connections
that litellm keeps for all models of a provider.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from broker.runtime import Clock
from controller_worker.providers.anthropic_backend import URL as ANTHROPIC_URL
from controller_worker.providers.config import (
    LLMConfig,
    drop_provider_addresses,
    has_provider_key,
    set_litellm_environment,
)
from controller_worker.providers.errors import LLMConfigError, MalformedReplyError, ModelTimeoutError
from controller_worker.providers.llm import Completion, Delta, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.model_features import find_features, normalise_name
from controller_worker.providers.model_table import find_provider, list_providers, look_up
from controller_worker.providers.openai_backend import COST_HEADER, NO_KEY
from controller_worker.providers.parameters import make_chat_parameters, may_be_long
from controller_worker.providers.request_size import make_completion
from controller_worker.providers.strict_schemas import Strict, Strictness
from controller_worker.providers.wires.chat_wire import ChatStream, ChatWire, read_chat_reply, write_request_fields
from controller_worker.providers.wires.egress import EgressGuard, find_environment_proxy, install_guard
from controller_worker.providers.wires.event_stream import limit_silences, limit_wait_for_headers, make_stream_limits
from controller_worker.providers.wires.litellm_shortcuts import install_shortcuts
from controller_worker.providers.wires.provider_errors import find_choice_failure, to_model_error
from controller_worker.providers.wires.raw_client import ignore_delta, is_streamed, make_timeouts
from controller_worker.providers.wires.reply import parse_quota_left, parse_reported_usd, parse_token_count

if TYPE_CHECKING:
    import httpx

COUNTING_PROVIDER = "openai"
RESPONSES_PREFIX = "responses/"
GEMINI_PRO_THINKING_TOKENS = 128

ADDRESS_REMEDY = "Set its address as base_url in the model's settings."
OLLAMA = ("ollama", "ollama_chat")
LOCAL_PROVIDERS = frozenset(
    {
        *("a2a", "a2a_agent", "aiohttp_openai", "custom", "custom_openai", "docker_model_runner", "gdc", "hosted_vllm"),
        *("infinity", "langflow", "langgraph", "lemonade", "litellm_agent", "litellm_proxy", "llamafile", "lm_studio"),
        *("nvidia_riva", "oobabooga", "ollama", "ollama_chat", "openai_like", "petals", "ragflow", "triton", "vllm"),
        "xinference",
    }
)
"""Self-hosted providers. litellm looks for most of them on this machine."""
ADDRESSED_PROVIDERS = frozenset(
    {
        *("azure", "azure_ai", "azure_text", "bedrock", "bedrock_converse", "bedrock_mantle", "databricks", "oci"),
        *(
            "sagemaker",
            "sagemaker_chat",
            "sagemaker_nova",
            "sap",
            "snowflake",
            "vertex_ai",
            "vertex_ai_beta",
            "watsonx",
        ),
        "watsonx_text",
    }
)
"""Providers with a customer-specific address, whose login comes from the environment."""
WITHOUT_PUBLIC_ADDRESS = LOCAL_PROVIDERS | {"azure", "azure_ai", "azure_text"}
KEY_NAMES = {
    **{
        name: (name,)
        for name in ("cerebras", "deepseek", "fireworks_ai", "groq", "mistral", "openai", "together_ai", "xai")
    },
    "gemini": ("gemini", "google"),
    "openrouter": ("openrouter", "or"),
}
"""Providers at one public address that need a key, with the first words of the variables where litellm looks for it."""
PROXIES_KEPT = 64
"""The number of addresses whose proxy is looked up in the environment only once."""
PROVIDER_HEADER_PREFIX = "llm_provider-"
"""litellm's prefix for the names of a provider's own headers."""


_log = logging.getLogger(__name__)


def is_known_to_litellm(config: LLMConfig) -> bool:
    """Return whether the table of models has the provider or the name of a model; litellm itself knows further ones."""
    first, _, rest = config.model.partition("/")
    is_named = config.custom_llm_provider is not None or (bool(rest) and first in list_providers())
    return is_named or config.base_url is not None or look_up(config.model) is not None


def check_provider(config: LLMConfig, *, has_key: bool) -> None:
    """Reject a model whose provider has no address, or needs a key and finds none. litellm is not imported for it.

    Args:
        has_key: the calls have a key, whatever the environment has.

    Raises:
        LLMConfigError: there is no address or no key.
    """
    provider = find_provider(config.model, config.custom_llm_provider)
    _check_address(config, provider)
    names = () if has_key else KEY_NAMES.get(provider, ())
    if names and config.base_url is None and not any(has_provider_key(name) for name in names):
        remedy = "Set LLM_API_KEY, or the provider's own variable if LLM_MODEL is another model."
        raise LLMConfigError(f"There is no key for {config.model!r}.", remedy=remedy)


class LitellmLLM:
    """The backend for every provider that litellm supports."""

    def __init__(self, config: LLMConfig, clock: Clock) -> None:
        """Import litellm. Sends no request.

        Raises:
            LLMConfigError: the provider is unknown, or has no public address and none is set; or `drop_params` is off
                and the model does not accept a configured parameter.
        """
        self._config = config
        self._litellm = _import_litellm(config)
        model = _route_model(self._litellm, config)
        self._provider = _find_provider(self._litellm, config, model)
        _check_address(config, self._provider)
        features = find_features(config.base_model or model)
        self._secrets = config.secrets
        self._row = look_up(config.base_model or model)
        self._is_long = may_be_long(config, make_chat_parameters(config, model), self._row)
        self._parameters = _make_parameters(config, model) | _find_own_login(self._litellm, config, self._provider)
        self._wire = ChatWire(
            cache_marks=config.caching_prompt and features.prompt_cache,
            thoughts=features.thoughts,
            cache_lifetime=config.cache_lifetime,
        )
        self._strictness = Strictness(config, is_known=features.strict_schemas and not features.is_claude)
        self._find_proxy = lru_cache(PROXIES_KEPT)(find_environment_proxy)
        self._tokens: MessageMemo[int] = MessageMemo()
        self._clock = clock

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        if self._config.sends_cache_key:
            parameters = parameters | {"prompt_cache_key": request.conversation_id}
        on_delta = (request.on_delta or ignore_delta) if is_streamed(request, is_long=self._is_long) else None

        async def ask(strict: Strict) -> tuple[Any, dict[str, Any]]:
            messages = self._wire.write_values(request.messages)
            return await self._ask(parameters | write_request_fields(request, strict), messages, on_delta)

        answer, hidden = await self._strictness.ask(request, ask)
        reply = read_chat_reply(answer)
        headers = hidden.get("additional_headers") or {}
        return make_completion(
            reply,
            request,
            self._config,
            self._row,
            latency_seconds=self._clock.monotonic() - began,
            tokens=self._tokens,
            reported_usd=parse_reported_usd(headers.get(f"{PROVIDER_HEADER_PREFIX}{COST_HEADER}")),
            quota_left=parse_quota_left(headers, prefix=PROVIDER_HEADER_PREFIX),
        )

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Count a prompt of OpenAI's Responses API through litellm. Other providers return None.

        If a provider does not answer, litellm's public function counts with a local tokenizer. Our estimate is cheaper
        and equally good.
        """
        with EgressGuard(self._parameters.get("base_url"), self._find_proxy).within():
            return await self._count(request)

    async def _count(self, request: ModelRequest) -> int | None:
        try:
            model, provider, key, base = self._litellm.get_llm_provider(
                model=self._parameters["model"],
                api_base=self._parameters.get("base_url"),
                api_key=self._parameters.get("api_key"),
            )
            if provider != COUNTING_PROVIDER:
                return None
            known = self._litellm.utils.ProviderConfigManager.get_provider_model_info(
                model=model, provider=self._litellm.LlmProviders(provider)
            )
            found = await known.get_token_counter().count_tokens(
                model_to_use=model.removeprefix(RESPONSES_PREFIX),
                messages=self._wire.write_values(request.messages),
                contents=None,
                deployment={"litellm_params": {"model": model, "api_key": key, "api_base": base}},
                request_model=model,
                tools=write_request_fields(request, self._strictness.of(request)).get("tools"),
            )
        except Exception as error:
            raise to_model_error(error, secrets=self._secrets) from error
        return None if found is None or found.error else parse_token_count(found.total_tokens) or None

    async def aclose(self) -> None:
        """Do nothing: litellm shares its connections among all models of a provider."""

    async def _ask(
        self, parameters: dict[str, Any], messages: list[dict[str, Any]], on_delta: Callable[[Delta], None] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Return the reply and litellm's further fields."""
        limit_seconds = self._config.total_timeout_seconds
        egress = EgressGuard(self._parameters.get("base_url"), self._find_proxy)
        try:
            with egress.within():
                async with asyncio.timeout(limit_seconds):
                    if on_delta is not None:
                        return await self._stream(parameters, messages, on_delta)
                    answer = await self._litellm.acompletion(messages=messages, **parameters)
                    return _require_whole(answer.model_dump()), getattr(answer, "_hidden_params", None) or {}
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except Exception as error:
            # An outer edge: litellm passes on any exception from its hundred providers' code.
            if egress.refused:
                raise LLMConfigError(
                    f"{self._config.model!r} leads to {egress.refused}, which is no public address.",
                    remedy=ADDRESS_REMEDY,
                ) from error
            raise to_model_error(error, secrets=self._secrets, now=self._clock.now()) from error

    async def _stream(
        self, parameters: dict[str, Any], messages: list[dict[str, Any]], on_delta: Callable[[Delta], None]
    ) -> tuple[Any, dict[str, Any]]:
        limits = make_stream_limits(self._config)
        stream = ChatStream(on_delta)
        asked = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "timeout": _timeout(self._config, limits.longest_seconds),
        }
        async with limit_wait_for_headers(limits):
            answer = await self._litellm.acompletion(messages=messages, **parameters | asked)
        try:
            try:
                async for chunk in limit_silences(answer, limits, lambda: _has_ended(answer)):
                    stream.take_chunk(chunk.model_dump())
            except Exception:
                if not _has_ended(answer):
                    raise
                _read_final_chunk(stream, answer)
            if not _has_ended(answer):
                # litellm makes up an end for a stream that was cut off.
                raise MalformedReplyError("The stream has ended before the reply.")
            reply = stream.reply()
            if isinstance(reply["usage"], dict):  # without a reported cost, litellm fills in its own estimate
                reply["usage"]["cost"] = _find_reported_cost(answer)
            return reply, getattr(answer, "_hidden_params", None) or {}
        finally:
            await answer.aclose()


def _require_whole(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a complete reply. Raise the error that came with a partial one."""
    if (failed := find_choice_failure(reply)) is not None:
        raise failed
    return reply


def _has_ended(answer: Any) -> bool:
    """Return whether the reply has a stop reason. Gemini and litellm put it in different places."""
    return answer.received_finish_reason is not None or answer.intermittent_finish_reason is not None


def _find_reported_cost(answer: Any) -> Any:
    """Return the cost reported by the provider; None without one."""
    said = (getattr(getattr(chunk, "usage", None), "cost", None) for chunk in reversed(answer.chunks))
    return next((cost for cost in said if cost is not None), None)


def _read_final_chunk(stream: ChatStream, answer: Any) -> None:
    """Read litellm's final chunk, which it holds back until the connection ends. A complete reply does not need it."""
    if not stream.is_whole:
        stream.take_chunk(answer.finish_reason_handler().model_dump())
    usage = next((found for chunk in reversed(answer.chunks) if (found := getattr(chunk, "usage", None))), None)
    if usage is not None:
        stream.take_chunk({"usage": usage.model_dump()})


def _import_litellm(config: LLMConfig) -> ModuleType:
    set_litellm_environment()
    for name in drop_provider_addresses(list_providers()):
        _log.warning("The environment variable %s has no effect: set the address as base_url of an entry.", name)
    is_first = "litellm" not in sys.modules
    import litellm

    if is_first:
        # a million permanent objects: a full garbage collection would pause every conversation to scan them
        gc.freeze()
    import httpx

    install_guard(httpx)
    install_shortcuts()
    litellm.suppress_debug_info = True
    litellm.redact_messages_in_exceptions = True
    litellm.telemetry = False
    # litellm downloads images for providers that accept no image URLs. It may not do so from the controller's network.
    litellm.user_url_validation = True
    litellm.user_url_allowed_hosts = []
    litellm.modify_params = config.modify_params
    module: ModuleType = litellm
    return module


def _route_model(litellm: ModuleType, config: LLMConfig) -> str:
    """Return the model as litellm routes it.

    A model with an address and no provider belongs to an OpenAI-compatible server.
    """
    first, _, rest = config.model.partition("/")
    has_provider = config.custom_llm_provider is not None or (bool(rest) and first in litellm.provider_list)
    return config.model if has_provider or config.base_url is None else f"openai/{config.model}"


def _find_provider(litellm: ModuleType, config: LLMConfig, model: str) -> str:
    """Return litellm's provider of a model; litellm knows some names without one, and some with a path.

    Raises:
        LLMConfigError: litellm knows no provider for this name.
    """
    if config.custom_llm_provider is None and model.partition("/")[0] not in litellm.provider_list:
        try:
            return str(litellm.get_llm_provider(model=model)[1])
        except Exception:  # noqa: BLE001  (its own text does not say what to do here)
            raise LLMConfigError(
                f"No provider is known for the model {config.model!r}.",
                remedy="Write PROVIDER/NAME, such as anthropic/claude-sonnet-4-5, or set LLM_BASE_URL.",
            ) from None
    return find_provider(model, config.custom_llm_provider)


def _check_address(config: LLMConfig, provider: str) -> None:
    """Reject a self-hosted provider without an address in the settings.

    Raises:
        LLMConfigError: the address is missing; litellm would look for the server on this machine.
    """
    has_address = config.base_url or (provider in OLLAMA and config.ollama_base_url)
    if provider in WITHOUT_PUBLIC_ADDRESS and not has_address:
        raise LLMConfigError(
            f"The provider {provider} of {config.model!r} has no public address.", remedy=ADDRESS_REMEDY
        )


def _find_own_login(litellm: ModuleType, config: LLMConfig, provider: str) -> dict[str, Any]:
    """Return credentials that keep the environment's keys from other addresses if the settings have no key.

    litellm uses OPENAI_API_KEY for many providers without a key, and a provider's key for any address.
    """
    if config.api_key is not None:
        pinned = {"anthropic": ANTHROPIC_URL}
        return {"base_url": pinned[provider]} if provider in pinned and config.base_url is None else {}
    is_foreign = provider in litellm.openai_compatible_providers and not has_provider_key(provider)
    has_own_address = config.base_url is not None and provider not in ADDRESSED_PROVIDERS
    is_openai = provider in ("openai", "text-completion-openai") and config.base_url is None
    return {"api_key": NO_KEY} if (is_foreign and not is_openai) or has_own_address else {}


def _make_parameters(config: LLMConfig, model: str) -> dict[str, Any]:
    """Return the parameters of every call besides messages and tools, by OpenHands' rules."""
    fields = make_chat_parameters(config, model)
    if model.startswith("azure") and "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    if model.startswith("huggingface/") and fields.get("top_p") == 1:
        fields["top_p"] = 0.9
    if find_features(config.base_model or model).thoughts == "items":
        further = {"include": ["reasoning.encrypted_content"]} | (fields.get("extra_body") or {})
        fields["extra_body"] = further
    if normalise_name(model) == "gemini-2.5-pro" and config.reasoning_effort in (None, "low", "none"):
        fields.pop("reasoning_effort", None)
        fields["thinking"] = {"type": "enabled", "budget_tokens": GEMINI_PRO_THINKING_TOKENS}
        fields["allowed_openai_params"] = ["thinking"]
    return _make_address(config, model) | fields | {
        "model": model,
        "timeout": _timeout(config, config.read_timeout),
        "drop_params": config.drop_params,
        "num_retries": 0,
        "max_retries": 0,
        "no-log": True,
    }  # fmt: skip


def _timeout(config: LLMConfig, read_seconds: float) -> httpx.Timeout:
    import httpx

    limits: httpx.Timeout = make_timeouts(httpx, config, read_seconds)
    return limits


def _make_address(config: LLMConfig, model: str) -> dict[str, Any]:
    """Return the provider's address and credentials."""
    is_ollama = model.startswith(("ollama/", "ollama_chat/"))
    keys = {
        "api_key": config.api_key,
        "aws_access_key_id": config.aws_access_key_id,
        "aws_secret_access_key": config.aws_secret_access_key,
    }
    names = {"HTTP-Referer": config.openrouter_site_url, "X-Title": config.openrouter_app_name}
    headers = {name: value for name, value in names.items() if value is not None}
    fields: dict[str, Any] = {
        **{name: key.get_secret_value() for name, key in keys.items() if key is not None},
        "aws_region_name": config.aws_region_name,
        "base_url": config.base_url or (config.ollama_base_url if is_ollama else None),
        "api_version": config.api_version,
        "custom_llm_provider": config.custom_llm_provider,
        "extra_headers": headers if headers and model.startswith("openrouter/") else None,
    }
    return {name: value for name, value in fields.items() if value is not None}
