"""Claude by Anthropic's own SDK: authentication, connections and errors are the SDK's, the bytes are ours.

Holds: one attempt per call; the SDK never retries.
Does not: import the SDK before a model is created; that costs more than a second of CPU.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from broker.clock import SystemClock
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError, ModelTimeoutError
from controller_worker.llm.llm import Completion, ModelRequest
from controller_worker.llm.messages_wire import MessagesWire, read_reply
from controller_worker.llm.model_table import call_cost_usd, look_up
from controller_worker.llm.parameters import messages_parameters
from controller_worker.llm.provider_errors import model_error

if TYPE_CHECKING:
    import anthropic
    import httpx2

PREFIX = "anthropic/"
CONNECTIONS_LIMIT = 2_000
IDLE_CONNECTION_SECONDS = 30.0
LAST_VERSION_WITH_SAMPLING = "2023-06-01"

_PATH = "/v1/messages"


class AnthropicLLM:
    """The backend for Claude."""

    def __init__(self, config: LLMConfig) -> None:
        """Import the SDK and prepare a client; nothing is sent.

        Raises:
            LLMConfigError: there is no key, or `drop_params` is off and a parameter is set that the model refuses.
        """
        self._config = config
        model = config.model.removeprefix(PREFIX)
        self._secrets = config.secrets
        self._row = look_up(model)
        self._parameters = messages_parameters(config, model)
        self._headers = {"Content-Type": "application/json"}
        if {"temperature", "top_p", "top_k"} & set(self._parameters):
            self._headers["anthropic-version"] = LAST_VERSION_WITH_SAMPLING
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
        return reply.completion(
            cost_usd=call_cost_usd(self._config, self._row, reply.usage),
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
            # The SDK's other client searches all its connections for each request: twice the CPU at 200 in flight.
            http_client=anthropic.DefaultAioHttpClient(
                timeout=timeout,
                limits=httpx2.Limits(max_connections=CONNECTIONS_LIMIT, keepalive_expiry=IDLE_CONNECTION_SECONDS),
                # A redirect would carry prompt and key to wherever it points.
                follow_redirects=False,
            ),
        )
    except anthropic.CredentialsError as error:
        raise LLMConfigError(f"There is no key for {config.model!r}: {error}", remedy="Set LLM_API_KEY.") from error
    if client.api_key is None and client.auth_token is None and client.credentials is None:
        raise LLMConfigError(f"There is no key for {config.model!r}.", remedy="Set LLM_API_KEY.")
    return client
