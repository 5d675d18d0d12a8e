"""Claude by Anthropic's own SDK: authentication, connections and errors are the SDK's, the bytes are ours.

Holds: one attempt per call; the SDK never retries.
Does not: import the SDK before a model is created; that costs more than a second of CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from broker.clock import SystemClock
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError, ModelTimeoutError
from controller_worker.llm.event_stream import UNREAD, event_texts, stream_limits, until_headers, whole_reply
from controller_worker.llm.llm import Completion, Delta, ModelRequest
from controller_worker.llm.messages_stream import MessagesStream
from controller_worker.llm.messages_wire import MessagesWire, read_message, read_reply
from controller_worker.llm.model_table import call_cost_usd, look_up
from controller_worker.llm.parameters import body_and_headers, messages_parameters
from controller_worker.llm.provider_errors import StreamedError, model_error
from controller_worker.llm.quota_headers import quota_left
from controller_worker.llm.reply import Reply

if TYPE_CHECKING:
    import anthropic
    import httpx2

PREFIX = "anthropic/"
CONNECTIONS_LIMIT = 2_000
IDLE_CONNECTION_SECONDS = 30.0
LAST_VERSION_WITH_SAMPLING = "2023-06-01"

_PATH = "/v1/messages"
_NO_HEADERS: Mapping[str, str] = {}


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
        self._parameters, further_headers = body_and_headers(messages_parameters(config, model))
        has_sampling = bool({"temperature", "top_p", "top_k"} & set(self._parameters))
        self._version = {"anthropic-version": LAST_VERSION_WITH_SAMPLING} if has_sampling else {}
        self._headers = {"Content-Type": "application/json"} | self._version | further_headers
        self._wire = MessagesWire(caching_prompt=config.caching_prompt)
        self._client = _client(config)
        self._clock = SystemClock()

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        if request.on_delta is not None:
            parameters = parameters | {"stream": True}
        body, headers = self._wire.body(parameters, request), _NO_HEADERS
        if request.carry is not None:
            reply = read_message(await request.carry(body))
        else:
            reply, headers = await self._ask(body, request.on_delta)
        return reply.completion(
            cost_usd=call_cost_usd(self._config, self._row, reply.usage, is_batched=request.carry is not None),
            latency_seconds=self._clock.monotonic() - began,
            quota_left=quota_left(headers),
        )

    async def send(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Make a request of another kind than a call, for `batching`; raises `ModelError`."""
        import httpx2

        options: Any = {"headers": {**headers, **self._version}}
        async with self._errors_told():
            if method == "GET":
                answer = await self._client.get(path, cast_to=httpx2.Response, options=options)
            else:
                answer = await self._client.post(path, cast_to=httpx2.Response, content=content, options=options)
            return answer.content

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _ask(self, body: bytes, on_delta: Callable[[Delta], None] | None) -> tuple[Reply, Mapping[str, str]]:
        import httpx2

        async with self._errors_told():
            if on_delta is not None:
                return await self._stream(body, on_delta)
            response = await self._client.post(
                _PATH, cast_to=httpx2.Response, content=body, options={"headers": self._headers | UNREAD}
            )
            try:
                return read_reply(await whole_reply(response.aiter_bytes())), response.headers
            finally:
                await response.aclose()

    @contextlib.asynccontextmanager
    async def _errors_told(self) -> AsyncIterator[None]:
        """Limit what is done within in time, and tell its errors as our own."""
        import anthropic
        import httpx2

        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                yield
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except (anthropic.AnthropicError, httpx2.HTTPError, StreamedError) as error:
            raise model_error(error, secrets=self._secrets) from error

    async def _stream(self, body: bytes, on_delta: Callable[[Delta], None]) -> tuple[Reply, Mapping[str, str]]:
        import httpx2

        limits = stream_limits(self._config)
        async with until_headers(limits):
            response = await self._client.post(
                _PATH,
                cast_to=httpx2.Response,
                content=body,
                options={"headers": self._headers | UNREAD, "timeout": _timeout(self._config, limits.longest_seconds)},
            )
        try:
            if "json" in response.headers.get("content-type", ""):
                # a gateway that does not stream
                return read_reply(await whole_reply(response.aiter_bytes())), response.headers
            stream = MessagesStream(on_delta)
            async for text in event_texts(response.aiter_bytes(), limits):
                stream.take(text)
            return read_message(stream.reply()), response.headers
        finally:
            await response.aclose()


def _timeout(config: LLMConfig, read_seconds: float) -> httpx2.Timeout:
    import httpx2

    return httpx2.Timeout(
        connect=config.connect_timeout,
        read=read_seconds,
        write=config.read_timeout,
        pool=config.total_timeout_seconds,
    )


def _client(config: LLMConfig) -> anthropic.AsyncAnthropic:
    import anthropic
    import httpx2

    timeout = _timeout(config, config.read_timeout)
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
