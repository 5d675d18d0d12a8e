"""Claude, through Anthropic's Messages API.

With a key in the settings, calls use aiohttp without an SDK, as those of `openai_backend` do: the SDK needs twice the
CPU for a call. Without one, Anthropic's SDK finds the login in the environment and makes the requests. The request
bytes are the same.

Holds: one attempt per call. A request that the server never read, because it had just closed an idle connection, is
sent again and does not count as an attempt. The SDK never retries, so a sent body is not kept. A turn that the provider
paused is continued within its call.
Does not: import a client before a model is created; the import of the SDK costs more than a second of CPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from broker.runtime import Clock
from controller_worker.providers.config import LLMConfig, has_custom_headers, may_have_claude_login
from controller_worker.providers.context_management import add_betas, is_compacting
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.llm import CallUsage, Completion, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.model_features import find_features
from controller_worker.providers.model_table import look_up
from controller_worker.providers.parameters import make_messages_parameters, may_be_long, split_body_and_headers
from controller_worker.providers.request_size import make_completion
from controller_worker.providers.strict_schemas import Strict, Strictness
from controller_worker.providers.wires.claude_blocks import continue_turn, is_paused, join_parts
from controller_worker.providers.wires.http_transport import HttpTransport, resend_if_stale
from controller_worker.providers.wires.messages_wire import MessagesStream, MessagesWire, read_message, read_part
from controller_worker.providers.wires.raw_client import (
    ProviderTransport,
    RawClient,
    is_streamed,
    iterate_pieces,
    make_connection_options,
    make_timeouts,
    parse_body,
)
from controller_worker.providers.wires.reply import ParsedReply, parse_quota_left, parse_token_count

PREFIX = "anthropic/"
URL = "https://api.anthropic.com"
VERSION = "2026-10-21"
LAST_VERSION_WITH_SAMPLING = "2023-06-01"
PAUSES_LIMIT = 10
"""A turn with more pauses ends after this many; its content so far is used."""

_PATH = "/v1/messages"
_COUNT_PATH = "/v1/messages/count_tokens"
_COUNTED_FIELDS = ("model", "thinking", "tool_choice", "output_config")
"""Request fields that the counting endpoint accepts, besides the conversation."""
_UNREAD = {"X-Stainless-Raw-Response": "stream"}
"""Makes the SDK return the raw answer before it reads the body."""


class AnthropicLLM:
    """The backend for Claude."""

    def __init__(self, config: LLMConfig, clock: Clock) -> None:
        """Import a client and create it. Sends no request.

        Raises:
            LLMConfigError: there is no key, or `drop_params` is off and the model does not accept a configured
                parameter.
        """
        self._config = config
        model = config.model.removeprefix(PREFIX)
        self._row = look_up(config.base_model or model)
        self._parameters, further_headers = split_body_and_headers(make_messages_parameters(config, model))
        has_sampling = bool({"temperature", "top_p", "top_k"} & set(self._parameters))
        version = {"anthropic-version": LAST_VERSION_WITH_SAMPLING if has_sampling else VERSION}
        self._versions = add_betas(version, config.context_management)
        further_headers = add_betas(further_headers, config.context_management)
        self._headers = {"Content-Type": "application/json"} | version | further_headers
        self._is_long = may_be_long(config, self._parameters, self._row)
        self._wire = MessagesWire(
            caching_prompt=config.caching_prompt,
            cache_lifetime=config.cache_lifetime,
            compacts=is_compacting(self._parameters),
        )
        self._strictness = Strictness(config, is_known=find_features(config.base_model or model).strict_schemas)
        self._client = RawClient(_create_transport(config), config, clock)
        self._clock = clock
        self._tokens: MessageMemo[int] = MessageMemo()  # used if the provider reports no usage

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once, and again while its turn is paused. See `LLM.complete`."""
        began = self._clock.monotonic()
        parameters = self._parameters
        if request.temperature is not None and "temperature" in parameters:
            parameters = parameters | {"temperature": request.temperature}
        messages: list[Any] = []
        asked: list[Completion] = []
        while True:
            message, part, completion = await self._ask(parameters, request)
            messages.append(message)
            asked.append(completion)
            if not is_paused(message) or len(asked) > PAUSES_LIMIT:
                break
            request = continue_turn(request, message)
            parameters = parameters | _find_container(message)
        if len(messages) == 1:
            reply = read_message(message, part=part)
            return replace(completion, tool_calls=reply.tool_calls, latency_seconds=self._clock.monotonic() - began)
        reply = read_message(join_parts(messages), is_joined=True)
        return replace(
            asked[-1],
            text=reply.text,
            tool_calls=reply.tool_calls,
            thinking_blocks=reply.thinking_blocks,
            usage=CallUsage(**{name: sum(getattr(each.usage, name) for each in asked) for name in CallUsage.__slots__}),
            cost_usd=_sum_usd([completion.cost_usd for completion in asked]),
            latency_seconds=self._clock.monotonic() - began,
            is_usage_estimated=any(completion.is_usage_estimated for completion in asked),
        )

    async def _ask(self, parameters: Mapping[str, Any], request: ModelRequest) -> tuple[Any, ParsedReply, Completion]:
        """Return a message, its parts and its completion, even for a message without content."""
        stream = MessagesStream if is_streamed(request, is_long=self._is_long) else None
        if stream is not None:
            parameters = {**parameters, "stream": True}

        async def ask(strict: Strict) -> tuple[Any, Mapping[str, str], int]:
            body = self._wire.write_body(parameters, request, strict)
            size = len(body)
            asking = self._client.ask(request, _PATH, body, self._headers, stream=stream)
            del body  # frees the body, which is sent long before the answer arrives
            return *await asking, size

        with self._wire.written.forget_if_slow(request.messages):
            message, headers, sent_bytes = await self._strictness.ask(request, partial(resend_if_stale, ask))
        part = read_part(message)
        return (
            message,
            part,
            make_completion(
                part,
                request,
                self._config,
                self._row,
                latency_seconds=0.0,
                sent_bytes=sent_bytes,
                tokens=self._tokens,
                quota_left=parse_quota_left(headers),
            ),
        )

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `CountsTokens.count_tokens`."""
        fields = {name: value for name, value in self._parameters.items() if name in _COUNTED_FIELDS}
        body = self._wire.write_body(fields, replace(request, stop=()), self._strictness.of(request))
        answer = parse_body(await self._client.request("POST", _COUNT_PATH, self._headers, content=body))
        return parse_token_count(answer.get("input_tokens")) or None if isinstance(answer, dict) else None

    async def send(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Make a request other than a call, for `batching`. Raises `ModelError`."""
        sent = None if method == "GET" else content
        return await self._client.request(method, path, {**headers, **self._versions}, content=sent)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _find_container(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that keeps a turn in the container in which it has run code."""
    container = message.get("container")
    name = container.get("id") if isinstance(container, Mapping) else None
    return {"container": name} if isinstance(name, str) and name else {}


def _sum_usd(costs: Sequence[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


class SdkAnswer:
    """A successful answer, before its body is read."""

    def __init__(self, response: Any) -> None:
        self.headers: Mapping[str, str] = response.headers
        self._response = response

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        found: AsyncIterator[bytes] = self._response.aiter_bytes()
        return found

    async def aclose(self) -> None:
        """Release the connection."""
        await self._response.aclose()


class SdkTransport:
    """An SDK's client as a `Transport`.

    Args:
        sdk_client: the SDK's asynchronous client, with retries disabled.
        http: the SDK's HTTP module, httpx or a replacement.
        failure: the SDK's exceptions, in addition to those of that module.
        timeout: creates the timeouts of a request from a limit of silences in seconds.
    """

    def __init__(
        self, sdk_client: Any, http: ModuleType, failure: type[Exception], timeout: Callable[[float], Any]
    ) -> None:
        self.sdk_client = sdk_client
        self.failures: tuple[type[Exception], ...] = (failure, http.HTTPError)
        self.broken: tuple[type[Exception], ...] = (http.HTTPError,)
        self._http = http
        self._timeout = timeout

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> SdkAnswer:
        """See `Transport.post`."""
        length = {"Content-Length": str(len(body))}
        pieces = iterate_pieces(body)
        del body
        options: dict[str, Any] = {"headers": {**headers, **_UNREAD, **length}}
        if read_seconds is not None:
            options["timeout"] = self._timeout(read_seconds)
        posted = self.sdk_client.post(path, cast_to=self._http.Response, content=pieces, options=options)
        return SdkAnswer(await posted)

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """See `Transport.request`."""
        asks = {"GET": self.sdk_client.get, "POST": self.sdk_client.post, "DELETE": self.sdk_client.delete}
        sent = {"content": content} if content is not None else {}
        answer = await asks[method](path, cast_to=self._http.Response, options={"headers": dict(headers)}, **sent)
        return bytes(answer.content)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.sdk_client.close()


def _create_transport(config: LLMConfig) -> ProviderTransport:
    # ANTHROPIC_BASE_URL is the address of the environment's key, not of the configured key.
    url = config.base_url.rstrip("/").removesuffix("/v1") if config.base_url else None
    key = config.api_key.get_secret_value() if config.api_key is not None else None
    if key is None and config.base_url is not None:  # a key from the environment is for Anthropic only
        raise LLMConfigError(f"There is no key for {config.model!r} at its own address.", remedy="Set LLM_API_KEY.")
    # Gateways older than the SDK's second version look for the key here.
    headers = {"X-Api-Key": key} if key and config.base_url else {}
    if key and not has_custom_headers():
        return HttpTransport(config.model_copy(update={"base_url": url or URL}), key, headers)
    return _create_sdk_transport(config, key, url, headers)


def _create_sdk_transport(
    config: LLMConfig, key: str | None, url: str | None, headers: Mapping[str, str]
) -> SdkTransport:
    if key is None and not may_have_claude_login():  # the SDK, whose import takes seconds, would find none
        raise LLMConfigError(f"There is no key for {config.model!r}.", remedy="Set LLM_API_KEY.")
    import anthropic
    import httpx2

    options = make_connection_options(httpx2, config)
    try:
        client = anthropic.AsyncAnthropic(
            api_key=key,
            base_url=url or (URL if key else None),
            max_retries=0,
            timeout=options["timeout"],
            default_headers=headers,
            # The SDK's other client searches all its connections for each request: twice the CPU at 200 calls in
            # flight.
            http_client=anthropic.DefaultAioHttpClient(**options),
        )
    except anthropic.CredentialsError as error:
        raise LLMConfigError(f"There is no key for {config.model!r}: {error}", remedy="Set LLM_API_KEY.") from error
    if client.api_key is None and client.auth_token is None and client.credentials is None:
        raise LLMConfigError(f"There is no key for {config.model!r}.", remedy="Set LLM_API_KEY.")
    limited = partial(make_timeouts, httpx2, config)
    return SdkTransport(client, httpx2, anthropic.AnthropicError, limited)
