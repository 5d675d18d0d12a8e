"""Every other provider by litellm, and any OpenAI-compatible server by its address.

litellm's openai client walks the whole history to rename fields that need no renaming: 30 ms of CPU at 41 messages,
1.5 s at 2,000, during which no other conversation moves. For OpenAI-compatible servers it is given a client that
sends the values as they are.

Holds: one attempt per call; neither litellm nor its clients retry; litellm fetches nothing at import, prints nothing,
and does not read a `.env` file of the current directory.
Does not: import litellm before a model is created; that costs seconds of CPU and 250 MB.
"""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from broker.clock import SystemClock
from controller_worker.llm.chat_wire import chat_messages, chat_tools, read_chat_reply
from controller_worker.llm.config import LLMConfig, set_litellm_environment
from controller_worker.llm.errors import ModelTimeoutError
from controller_worker.llm.llm import Completion, ModelRequest, Usage
from controller_worker.llm.model_features import features_of, normalised
from controller_worker.llm.model_table import Prices, cost_usd, look_up
from controller_worker.llm.provider_errors import model_error

if TYPE_CHECKING:
    import openai

OPENAI_PREFIX = "openai/"
NO_KEY = "no-key"
CONNECTIONS_LIMIT = 2_000
IDLE_CONNECTIONS_LIMIT = 200
GEMINI_PRO_THINKING_TOKENS = 128

_COST_HEADER = "llm_provider-x-litellm-response-cost"


class LitellmLLM:
    """The backend for everything that litellm speaks."""

    def __init__(self, config: LLMConfig) -> None:
        """Import litellm; nothing is sent."""
        self._config = config
        self._litellm = _import_litellm()
        self._model = _routed_model(self._litellm, config)
        self._features = features_of(self._model)
        self._row = look_up(self._model)
        self._secrets = (config.api_key.get_secret_value(),) if config.api_key is not None else ()
        self._client = _direct_client(config) if self._is_direct() else None
        self._parameters = self._call_parameters()
        self._clock = SystemClock()

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = dict(self._parameters)
        if request.tools:
            parameters["tools"] = chat_tools(request.tools)
        if request.temperature is not None and "temperature" in parameters:
            parameters["temperature"] = request.temperature
        parameters["messages"] = chat_messages(
            request.messages,
            cache_marks=self._config.caching_prompt and self._features.prompt_cache,
            thinking=self._features.is_claude,
        )
        answer = await self._ask(parameters)
        reply = read_chat_reply(answer)
        return Completion(
            text=reply.text,
            tool_calls=reply.tool_calls,
            thinking_blocks=reply.thinking_blocks,
            model=reply.model,
            response_id=reply.response_id,
            stop_reason=reply.stop_reason,
            usage=reply.usage,
            cost_usd=self._cost_usd(answer, reply.usage),
            latency_seconds=self._clock.monotonic() - began,
        )

    async def aclose(self) -> None:
        """Close the connections of this model. Those that litellm holds for all models of a provider stay open."""
        if self._client is not None:
            await self._client.close()

    async def _ask(self, parameters: dict[str, Any]) -> Any:
        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                return await self._litellm.acompletion(**parameters)
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except Exception as error:
            # An outer edge: litellm lets through whatever its hundred providers' code raises.
            raise model_error(error, secrets=self._secrets) from error

    def _is_direct(self) -> bool:
        return self._model.startswith(OPENAI_PREFIX) and self._config.base_url is not None

    def _call_parameters(self) -> dict[str, Any]:
        """Return what every call passes, by OpenHands' rules. None is left out."""
        import httpx

        config, features = self._config, self._features
        parameters: dict[str, Any] = {
            "model": self._model,
            "api_key": config.api_key.get_secret_value() if config.api_key is not None else None,
            "base_url": config.base_url,
            "api_version": config.api_version,
            "custom_llm_provider": config.custom_llm_provider,
            "client": self._client,
            "timeout": httpx.Timeout(
                connect=config.connect_timeout,
                read=config.read_timeout,
                write=config.read_timeout,
                pool=config.total_timeout_seconds,
            ),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": config.seed,
            "max_completion_tokens": config.max_output_tokens,
        }
        if self._is_direct() and parameters["api_key"] is None:
            parameters["api_key"] = NO_KEY
        if self._model.startswith("azure"):
            parameters["max_tokens"] = parameters.pop("max_completion_tokens")
        if self._model.startswith("huggingface/") and config.top_p == 1:
            parameters["top_p"] = 0.9
        if features.reasoning:
            parameters["temperature"] = parameters["top_p"] = None
        elif features.is_claude and config.temperature is not None:
            parameters["top_p"] = None
        if not features.sampling:
            parameters["temperature"] = parameters["top_p"] = parameters["top_k"] = None
        parameters |= self._reasoning_parameters()
        return {name: value for name, value in parameters.items() if value is not None} | {
            "drop_params": config.drop_params,
            "num_retries": 0,
            "max_retries": 0,
            "no-log": True,
        }

    def _reasoning_parameters(self) -> dict[str, Any]:
        effort = self._config.reasoning_effort
        if normalised(self._model) == "gemini-2.5-pro" and effort in (None, "low", "none"):
            budget = {"budget_tokens": GEMINI_PRO_THINKING_TOKENS}
            return {"thinking": budget, "allowed_openai_params": ["thinking"]}
        return {"reasoning_effort": effort} if effort is not None and self._features.reasoning_effort else {}

    def _cost_usd(self, answer: Any, usage: Usage) -> float | None:
        config = self._config
        if config.input_cost_per_token is not None and config.output_cost_per_token is not None:
            return cost_usd(Prices(config.input_cost_per_token, config.output_cost_per_token), usage)
        headers = (getattr(answer, "_hidden_params", None) or {}).get("additional_headers") or {}
        try:
            told = float(headers[_COST_HEADER])
        except (LookupError, TypeError, ValueError):
            return self._row.cost_usd(usage) if self._row is not None else None
        return max(told, 0.0)


def _import_litellm() -> ModuleType:
    set_litellm_environment()
    import litellm

    litellm.suppress_debug_info = True
    litellm.redact_messages_in_exceptions = True
    litellm.telemetry = False
    litellm.modify_params = True
    module: ModuleType = litellm
    return module


def _routed_model(litellm: ModuleType, config: LLMConfig) -> str:
    """Return the model as litellm routes it: with an address and no provider it is an OpenAI-compatible server's."""
    first, _, rest = config.model.partition("/")
    has_provider = bool(rest) and first in litellm.provider_list
    if config.base_url is None or has_provider or config.custom_llm_provider is not None:
        return config.model
    return OPENAI_PREFIX + config.model


def _direct_client(config: LLMConfig) -> openai.AsyncOpenAI:
    """Return a client that sends and reads plain values, for litellm to use instead of its own."""
    import httpx
    import openai
    from openai.types.chat import ChatCompletion

    class DirectCompletions:
        """What litellm uses of `client.chat.completions.with_raw_response`."""

        def __init__(self, client: openai.AsyncOpenAI) -> None:
            self._client = client
            self.completions = self.with_raw_response = self

        async def create(self, **body: Any) -> Any:
            options: dict[str, Any] = {
                "timeout": body.pop("timeout"),
                "headers": {**(body.pop("extra_headers", None) or {}), "X-Stainless-Raw-Response": "true"},
                "extra_json": body.pop("extra_body", None),
            }
            return await self._client.post(
                "/chat/completions", cast_to=ChatCompletion, body=body, options=cast("openai.RequestOptions", options)
            )

    class DirectOpenAI(openai.AsyncOpenAI):
        @property
        def chat(self) -> Any:
            return DirectCompletions(self)

    return DirectOpenAI(
        api_key=config.api_key.get_secret_value() if config.api_key is not None else NO_KEY,
        base_url=config.base_url,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(
            limits=httpx.Limits(max_connections=2_000, max_keepalive_connections=200)
        ),
    )
