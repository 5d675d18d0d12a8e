"""OpenAI-compatible servers, by their address: vLLM, SGLang, llama.cpp, Ollama, LM Studio, gateways.

The openai SDK authenticates, connects and raises; the bytes are ours. Its own `create` walks the whole history to
rename fields that need no renaming: 30 ms of CPU at 41 messages, 1.5 s at 2,000, during which no other conversation
moves; litellm adds its own to that, and a quarter of a gigabyte.

Holds: one attempt per call; the SDK never retries. A key of the environment that is meant for OpenAI is not sent here.
Does not: import the SDK before a model is created; that costs a second of CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from broker.clock import SystemClock
from controller_worker.llm.chat_stream import ChatStream
from controller_worker.llm.chat_wire import ChatWire, read_chat_reply
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import MalformedReplyError, ModelTimeoutError
from controller_worker.llm.event_stream import UNREAD, event_texts, stream_limits, until_headers, whole_reply
from controller_worker.llm.llm import Completion, Delta, ModelRequest
from controller_worker.llm.model_features import features_of
from controller_worker.llm.model_table import call_cost_usd, look_up
from controller_worker.llm.parameters import body_and_headers, chat_parameters
from controller_worker.llm.provider_errors import StreamedError, model_error
from controller_worker.llm.quota_headers import quota_left

if TYPE_CHECKING:
    import httpx
    import openai

COMPATIBLE_PROVIDERS = ("openai", "custom_openai", "hosted_vllm", "litellm_proxy", "lm_studio")
"""Names of litellm's for servers that speak Chat Completions at an address of their own."""
NO_KEY = "no-key"
CONNECTIONS_LIMIT = 2_000
IDLE_CONNECTION_SECONDS = 30.0
COST_HEADER = "x-litellm-response-cost"
LARGEST_COST_USD = 10_000.0
"""No call costs more."""

_PATH = "/chat/completions"
_NO_HEADERS: Mapping[str, str] = {}


class OpenAICompatibleLLM:
    """The backend for a server at `base_url`."""

    def __init__(self, config: LLMConfig) -> None:
        """Import the SDK and prepare a client; nothing is sent.

        Raises:
            LLMConfigError: `drop_params` is off and a parameter is set that the model refuses.
        """
        self._config = config
        provider, _, rest = config.model.partition("/")
        model = rest if rest and provider in COMPATIBLE_PROVIDERS else config.model
        features = features_of(model)
        self._secrets = config.secrets
        self._row = look_up(model)
        fields, further_headers = body_and_headers(chat_parameters(config, model))
        self._parameters = {"model": model} | fields
        self._headers = {"Content-Type": "application/json"} | further_headers
        self._wire = ChatWire(cache_marks=config.caching_prompt and features.prompt_cache, is_claude=features.is_claude)
        self._client = _client(config)
        self._clock = SystemClock()

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        if request.on_delta is not None:
            parameters = parameters | {"stream": True, "stream_options": {"include_usage": True}}
        body, headers = self._wire.body(parameters, request), _NO_HEADERS
        if request.carry is not None:
            answer = await request.carry(body)
        else:
            answer, headers = await self._ask(body, request.on_delta)
        reply = read_chat_reply(answer)
        told = told_cost_usd(headers)
        return reply.completion(
            cost_usd=call_cost_usd(self._config, self._row, reply.usage, is_batched=request.carry is not None)
            if told is None
            else told,
            latency_seconds=self._clock.monotonic() - began,
            quota_left=quota_left(headers),
        )

    async def send(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Make a request of another kind than a call, for `batching`; raises `ModelError`."""
        import httpx

        options: Any = {"headers": dict(headers)}
        async with self._errors_told():
            if method == "GET":
                answer = await self._client.get(path, cast_to=httpx.Response, options=options)
            else:
                ask = self._client.post if method == "POST" else self._client.delete
                answer = await ask(path, cast_to=httpx.Response, content=content, options=options)
            return answer.content

    async def upload(self, name: str, content: bytes) -> bytes:
        """Upload a file for a batch and return what is said about it; raises `ModelError`."""
        import httpx

        async with self._errors_told():
            answer = await self._client.post(
                "/files",
                cast_to=httpx.Response,
                body={"purpose": "batch"},
                files=[("file", (name, content, "application/jsonl"))],
                options={"headers": {"Content-Type": "multipart/form-data"}},
            )
            return answer.content

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _ask(self, body: bytes, on_delta: Callable[[Delta], None] | None) -> tuple[Any, Mapping[str, str]]:
        import httpx

        async with self._errors_told():
            if on_delta is not None:
                return await self._stream(body, on_delta)
            response = await self._client.post(
                _PATH, cast_to=httpx.Response, content=body, options={"headers": self._headers | UNREAD}
            )
            try:
                return _parsed(await whole_reply(response.aiter_bytes())), response.headers
            finally:
                await response.aclose()

    @contextlib.asynccontextmanager
    async def _errors_told(self) -> AsyncIterator[None]:
        """Limit what is done within in time, and tell its errors as our own."""
        import httpx
        import openai

        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                yield
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except (openai.OpenAIError, httpx.HTTPError, StreamedError) as error:
            raise model_error(error, secrets=self._secrets) from error

    async def _stream(self, body: bytes, on_delta: Callable[[Delta], None]) -> tuple[Any, Mapping[str, str]]:
        import httpx

        limits = stream_limits(self._config)
        async with until_headers(limits):
            response = await self._client.post(
                _PATH,
                cast_to=httpx.Response,
                content=body,
                options={"headers": self._headers | UNREAD, "timeout": _timeout(self._config, limits.longest_seconds)},
            )
        try:
            if "json" in response.headers.get("content-type", ""):
                # a server that does not stream
                return _parsed(await whole_reply(response.aiter_bytes())), response.headers
            stream = ChatStream(on_delta)
            async for text in event_texts(response.aiter_bytes(), limits):
                stream.take(text)
            return stream.reply(), response.headers
        finally:
            await response.aclose()


def told_cost_usd(headers: Mapping[str, str], name: str = COST_HEADER) -> float | None:
    """Return what a gateway says that the call cost, or None if it does not say."""
    try:
        cost = float(headers[name])
    except (LookupError, TypeError, ValueError):
        return None
    return cost if 0.0 <= cost <= LARGEST_COST_USD else None


def _parsed(content: bytes) -> Any:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = content[:200].decode(errors="replace")
        raise MalformedReplyError(f"The reply is no JSON: {error}.", provider_text=shown) from error
    if isinstance(answer, dict) and answer.get("error") and not answer.get("choices"):
        raise StreamedError(answer)
    return answer


def _timeout(config: LLMConfig, read_seconds: float) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(
        connect=config.connect_timeout,
        read=read_seconds,
        write=config.read_timeout,
        pool=config.total_timeout_seconds,
    )


def _client(config: LLMConfig) -> openai.AsyncOpenAI:
    import httpx
    import openai

    timeout = _timeout(config, config.read_timeout)
    return openai.AsyncOpenAI(
        api_key=config.api_key.get_secret_value() if config.api_key is not None else NO_KEY,
        base_url=config.base_url,
        max_retries=0,
        timeout=timeout,
        # The SDK's other client searches all pairs of its connections for each request: 20 ms at 200 in flight.
        http_client=openai.DefaultAioHttpClient(
            timeout=timeout,
            limits=httpx.Limits(max_connections=CONNECTIONS_LIMIT, keepalive_expiry=IDLE_CONNECTION_SECONDS),
            # A redirect would carry prompt and key to wherever it points.
            follow_redirects=False,
        ),
    )
