"""OpenAI-compatible servers at a configured address: vLLM, SGLang, llama.cpp, Ollama, LM Studio, gateways.

Calls use aiohttp without an SDK. The openai SDK's `create` walks the whole history to rename fields that need no
renaming. It takes 30 ms of CPU at 41 messages and 1.5 s at 2,000, and blocks all other conversations meanwhile. Its
`post` keeps more memory during a call than the rest of a conversation. litellm adds its own overhead and 250 MB.

Holds: one attempt per call. A request that the server never read, because it had just closed an idle connection, is
sent again and does not count as an attempt. If a server refuses a stream without watchers, the call is repeated once
without streaming, and later calls do not stream. The environment's key for OpenAI is not sent here.
Does not: import aiohttp before a model is created.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from broker.runtime import Clock
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import BadRequestError
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.model_features import find_features
from controller_worker.providers.model_table import look_up
from controller_worker.providers.parameters import make_chat_parameters, may_be_long, split_body_and_headers
from controller_worker.providers.request_size import make_completion
from controller_worker.providers.strict_schemas import Strict, Strictness
from controller_worker.providers.token_calls import TokenCalls
from controller_worker.providers.wires.chat_wire import ChatStream, ChatWire, read_chat_reply
from controller_worker.providers.wires.http_transport import HttpTransport, resend_if_stale
from controller_worker.providers.wires.raw_client import RawClient, is_streamed
from controller_worker.providers.wires.reply import parse_quota_left, parse_reported_usd

COMPATIBLE_PROVIDERS = ("openai", "custom_openai", "hosted_vllm", "litellm_proxy", "lm_studio")
"""litellm's names for servers with Chat Completions at a configured address."""
NO_KEY = "no-key"
COST_HEADER = "x-litellm-response-cost"

_PATH = "/chat/completions"
STREAM = "stream"
_STREAM_REFUSAL = re.compile(r"\bstream", re.IGNORECASE)
"""Matches the refusal of a stream, but not that of an upstream server."""

_log = logging.getLogger(__name__)


class OpenAICompatibleLLM:
    """The backend for a server at `base_url`."""

    def __init__(self, config: LLMConfig, clock: Clock) -> None:
        """Import aiohttp and create a client. Sends no request.

        Raises:
            LLMConfigError: `drop_params` is off and the model refuses a parameter that is set.
        """
        self._config = config
        provider, _, rest = config.model.partition("/")
        model = rest if rest and provider in COMPATIBLE_PROVIDERS else config.model
        features = find_features(config.base_model or model)
        self._row = look_up(config.base_model or model)
        fields, further_headers = split_body_and_headers(make_chat_parameters(config, model))
        self._parameters = {"model": model} | fields
        self._headers = {"Content-Type": "application/json"} | further_headers
        self._is_long = may_be_long(config, fields, self._row)
        self._wire = ChatWire(
            cache_marks=config.caching_prompt and features.prompt_cache,
            thoughts=features.thoughts,
            cache_lifetime=config.cache_lifetime,
        )
        self._strictness = Strictness(config, is_known=features.strict_schemas and not features.is_claude)
        key = config.api_key.get_secret_value() if config.api_key is not None else NO_KEY
        self._transport = HttpTransport(config, key)
        self._client = RawClient(self._transport, config, clock)
        self._clock = clock
        self._token_calls = TokenCalls(config, self._client, self._wire, clock, key)
        self._tokens: MessageMemo[int] = MessageMemo()  # used if the server reports no usage

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        if self._config.sends_cache_key:
            parameters = parameters | {"prompt_cache_key": request.conversation_id}
        sent_headers = self._headers
        if self._config.session_header is not None:
            sent_headers = {**sent_headers, self._config.session_header: request.conversation_id}
        if request.rollout is not None:
            answer, headers, sent_bytes, tokens = await self._token_calls.ask(parameters, request, sent_headers)
            completion = self._make_completion(request, began, answer, headers, sent_bytes)
            return replace(completion, tokens=tokens)
        is_long = self._is_long
        try:
            answer, headers, sent_bytes = await self._ask(parameters, request, sent_headers, is_long=is_long)
        except BadRequestError as error:
            if not is_long or request.on_delta is not None or not _STREAM_REFUSAL.search(str(error)):
                raise
            answer, headers, sent_bytes = await self._ask(parameters, request, sent_headers, is_long=False)
            self._is_long = False
            _log.warning("%s does not accept %r: %s", self._config.model, STREAM, error)
        return self._make_completion(request, began, answer, headers, sent_bytes)

    def _make_completion(
        self, request: ModelRequest, began: float, answer: Any, headers: Mapping[str, str], sent_bytes: int
    ) -> Completion:
        return make_completion(
            read_chat_reply(answer),
            request,
            self._config,
            self._row,
            latency_seconds=self._clock.monotonic() - began,
            sent_bytes=sent_bytes,
            tokens=self._tokens,
            reported_usd=parse_reported_usd(headers.get(COST_HEADER)),
            quota_left=parse_quota_left(headers),
        )

    async def _ask(
        self, parameters: Mapping[str, Any], request: ModelRequest, headers: Mapping[str, str], *, is_long: bool
    ) -> tuple[Any, Mapping[str, str], int]:
        """Return the answer, its headers and the size of the request in bytes."""
        stream = ChatStream if is_streamed(request, is_long=is_long) else None
        streaming = {STREAM: True, "stream_options": {"include_usage": True}} if stream is not None else {}

        async def ask(strict: Strict) -> tuple[Any, Mapping[str, str], int]:
            body = self._wire.write_body({**parameters, **streaming}, request, strict)
            size = len(body)
            asking = self._client.ask(request, _PATH, body, headers, stream=stream)
            del body  # frees the body, which is sent long before the answer arrives
            return *await asking, size

        with self._wire.written.forget_if_slow(request.messages):
            return await self._strictness.ask(request, partial(resend_if_stale, ask))

    async def send(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Make a request other than a call, for `batching`. Raises `ModelError`."""
        return await self._client.request(method, path, headers, content=None if method == "GET" else content)

    async def upload(self, name: str, content: bytes) -> bytes:
        """Upload a batch file and return the provider's description of it. Raises `ModelError`."""
        file = (name, content, "application/jsonl")
        return await self._client.wait_for(self._transport.upload("/files", {"purpose": "batch"}, file))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._token_calls.aclose()
        await self._client.aclose()
