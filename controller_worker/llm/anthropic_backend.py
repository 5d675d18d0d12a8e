"""Claude by Anthropic's own SDK: authentication, connections and errors are the SDK's, the bytes are ours.

Holds: one attempt per call; the SDK never retries. Sampling parameters go only to models that take them.
Does not: import the SDK before a model is created; that costs about a second of CPU.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from broker.clock import SystemClock
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError, ModelTimeoutError
from controller_worker.llm.llm import Completion, ModelRequest, Usage
from controller_worker.llm.messages_wire import MessagesWire, read_reply
from controller_worker.llm.model_features import features_of
from controller_worker.llm.model_table import Prices, cost_usd, look_up
from controller_worker.llm.provider_errors import model_error

if TYPE_CHECKING:
    import anthropic
    import httpx2

PREFIX = "anthropic/"
CONNECTIONS_LIMIT = 2_000
IDLE_CONNECTIONS_LIMIT = 200
DEFAULT_MAX_TOKENS = 8_192
MAX_TOKENS_LIMIT = 64_000
LAST_VERSION_WITH_SAMPLING = "2023-06-01"

_PATH = "/v1/messages"
_JSON = {"Content-Type": "application/json"}

logger = logging.getLogger(__name__)


class AnthropicLLM:
    """The backend for Claude."""

    def __init__(self, config: LLMConfig) -> None:
        """Import the SDK and prepare a client; nothing is sent.

        Raises:
            LLMConfigError: there is no key, or `drop_params` is off and a parameter is set that the model refuses.
        """
        self._config = config
        self._model = config.model.removeprefix(PREFIX)
        self._secrets = (config.api_key.get_secret_value(),) if config.api_key is not None else ()
        self._row = look_up(self._model)
        self._parameters, self._headers = _parameters(config, self._model)
        self._wire = MessagesWire(caching_prompt=config.caching_prompt)
        self._client = _client(config)
        self._clock = SystemClock()

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        response = await self._post(self._wire.body(parameters, request))
        reply = read_reply(response.content)
        return Completion(
            text=reply.text,
            tool_calls=reply.tool_calls,
            thinking_blocks=reply.thinking_blocks,
            model=reply.model,
            response_id=reply.response_id,
            stop_reason=reply.stop_reason,
            usage=reply.usage,
            cost_usd=self._cost_usd(reply.usage),
            latency_seconds=self._clock.monotonic() - began,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _post(self, body: bytes) -> httpx2.Response:
        import anthropic
        import httpx2

        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                return await self._client.post(
                    _PATH, cast_to=httpx2.Response, content=body, options={"headers": self._headers}
                )
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except (anthropic.AnthropicError, httpx2.HTTPError) as error:
            raise model_error(error, secrets=self._secrets) from error

    def _cost_usd(self, usage: Usage) -> float | None:
        config = self._config
        if config.input_cost_per_token is not None and config.output_cost_per_token is not None:
            return cost_usd(Prices(config.input_cost_per_token, config.output_cost_per_token), usage)
        return self._row.cost_usd(usage) if self._row is not None else None


def _client(config: LLMConfig) -> anthropic.AsyncAnthropic:
    import anthropic
    import httpx2

    timeout = anthropic.Timeout(
        connect=config.connect_timeout,
        read=config.read_timeout,
        write=config.read_timeout,
        pool=config.total_timeout_seconds,
    )
    key = config.api_key.get_secret_value() if config.api_key is not None else None
    try:
        client = anthropic.AsyncAnthropic(
            api_key=key,
            base_url=config.base_url.rstrip("/").removesuffix("/v1") if config.base_url else None,
            max_retries=0,
            timeout=timeout,
            # Gateways that predate the SDK's second version look for the key here.
            default_headers={"X-Api-Key": key} if key and config.base_url else None,
            http_client=anthropic.DefaultAsyncHttpxClient(
                timeout=timeout,
                limits=httpx2.Limits(
                    max_connections=CONNECTIONS_LIMIT, max_keepalive_connections=IDLE_CONNECTIONS_LIMIT
                ),
            ),
        )
    except anthropic.CredentialsError as error:
        raise LLMConfigError(f"There is no key for {config.model!r}: {error}", remedy="Set LLM_API_KEY.") from error
    if client.api_key is None and client.auth_token is None and client.credentials is None:
        raise LLMConfigError(f"There is no key for {config.model!r}.", remedy="Set LLM_API_KEY.")
    return client


def _parameters(config: LLMConfig, model: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields and headers that every request has."""
    features, row = features_of(model), look_up(model)
    table_limit = row.max_output_tokens if row is not None else None
    default_max_tokens = min(table_limit, MAX_TOKENS_LIMIT) if table_limit is not None else DEFAULT_MAX_TOKENS
    fields: dict[str, Any] = {"model": model, "max_tokens": config.max_output_tokens or default_max_tokens}
    headers = dict(_JSON)
    dropped = {"seed"}
    effort = "low" if config.reasoning_effort == "minimal" else config.reasoning_effort
    thinks = False
    if effort not in (None, "none"):
        if features.reasoning_effort:
            fields["output_config"] = {"effort": effort}
            thinks = features.adaptive_thinking
        else:
            dropped.add("reasoning_effort")
    if thinks:
        fields["thinking"] = {"type": "adaptive"}
    if features.sampling and not thinks:
        headers["anthropic-version"] = LAST_VERSION_WITH_SAMPLING
        fields |= _sampling(config)
        if config.temperature is not None:
            dropped.add("top_p")
    else:
        dropped |= {"temperature", "top_p", "top_k"}
    _tell_dropped(config, model, dropped)
    return fields, headers


def _sampling(config: LLMConfig) -> dict[str, float]:
    """Return the sampling parameters; Claude takes no top_p beside a temperature."""
    top_p = None if config.temperature is not None else config.top_p
    sampling = {"temperature": config.temperature, "top_p": top_p, "top_k": config.top_k}
    return {name: value for name, value in sampling.items() if value is not None}


def _tell_dropped(config: LLMConfig, model: str, dropped: set[str]) -> None:
    """A setting must not silently do nothing."""
    names = sorted(name for name in dropped & config.model_fields_set if getattr(config, name) is not None)
    if not names:
        return
    if not config.drop_params:
        raise LLMConfigError(f"The model {model!r} does not take {', '.join(names)}.", remedy="Unset it.")
    logger.warning("The model %s does not take %s; it is not sent.", model, ", ".join(names))
