"""A call over a backend's transport (aiohttp or Anthropic's SDK), which authenticates, connects and reports errors.

Holds: one attempt per request. The whole reply and each silence in it have a time limit. Every failure is one of our
errors. The request body is not kept while the answer is pending.
Does not: know the content of requests and answers, or import a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from broker.runtime import Clock
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import MalformedReplyError, ModelTimeoutError
from controller_worker.providers.llm import Delta, ModelRequest
from controller_worker.providers.wires.event_stream import (
    SHOWN_BYTES,
    StreamLimits,
    limit_wait_for_headers,
    make_stream_limits,
    read_events,
    read_whole_reply,
)
from controller_worker.providers.wires.provider_errors import (
    StreamedError,
    find_choice_failure,
    is_failure,
    mask_secrets,
    to_model_error,
)

CONNECTIONS_LIMIT = 10_000
"""Per client. With fewer connections than conversations per worker, calls would silently queue."""
IDLE_CONNECTION_SECONDS = 30.0
PIECE_BYTES = 256 * 1024
"""The size of a piece of a request body."""


class TransportAnswer(Protocol):
    """A successful answer, before its body is read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; names in any case."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        ...

    async def aclose(self) -> None:
        """Release the connection."""
        ...


class ProviderTransport(Protocol):
    """The connections to one provider.

    Attributes:
        failures: the exceptions that it raises.
        broken: those of them that mean a failed connection.
    """

    failures: tuple[type[Exception], ...]
    broken: tuple[type[Exception], ...]

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> TransportAnswer:
        """Post a body and return the answer. `read_seconds` overrides the limit of silences in the settings."""
        ...

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """Make a request and return the body of the answer."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class StreamedReply(Protocol):
    """A reply that arrives as events."""

    @property
    def is_whole(self) -> bool:
        """Whether the model has sent the complete reply; its usage may still be missing."""
        ...

    def take(self, text: str) -> bool:
        """Process the text of the next event. Return whether it is the last one of the protocol."""
        ...

    def reply(self) -> Any:
        """Return the assembled reply after the last event, as a call without streaming would return it."""
        ...


class RawClient:
    """Makes calls over one transport."""

    def __init__(self, transport: ProviderTransport, config: LLMConfig, clock: Clock) -> None:
        self.transport = transport
        self._failures: tuple[type[Exception], ...] = (*transport.failures, StreamedError)
        self._lost: tuple[type[Exception], ...] = (ModelTimeoutError, *transport.broken)
        self._config = config
        self._clock = clock

    async def ask(
        self,
        request: ModelRequest,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        stream: Callable[[Callable[[Delta], None]], StreamedReply] | None,
    ) -> tuple[Any, Mapping[str, str]]:
        """Return the reply of a call, parsed from JSON or assembled from events, and its headers.

        Args:
            request: the source of `body`. If it has a `carry`, that function makes the call instead.
            stream: creates the reader of a streamed reply; None for a reply in one piece.

        Raises:
            ModelError: the call failed.
        """
        if request.carry is not None:
            return await request.carry(body), {}
        streamed = stream(request.on_delta or ignore_delta) if stream is not None else None
        limits = make_stream_limits(self._config)
        async with self._convert_errors():
            if streamed is None:
                asking = self.transport.post(path, body, headers)
                del body
                response = await asking
            else:
                asking = self.transport.post(path, body, headers, read_seconds=limits.longest_seconds)
                del body
                async with limit_wait_for_headers(limits):
                    response = await asking
            try:
                if streamed is None:
                    return parse_body(await read_whole_reply(response.chunks())), response.headers
                if "json" in response.headers.get("content-type", ""):  # the server may send the whole reply at once
                    limits = StreamLimits(self._config.read_timeout, self._config.read_timeout)
                whole = None
                try:
                    whole = await read_events(response.chunks(), limits, streamed.take, lambda: streamed.is_whole)
                except self._lost:
                    if not streamed.is_whole:
                        raise
                # Servers and gateways without streaming still answer in JSON, with any content type.
                return parse_body(whole) if whole is not None else streamed.reply(), response.headers
            finally:
                await response.aclose()

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], *, content: bytes | None = None
    ) -> bytes:
        """Make a request other than a call and return the body of the answer. Raises `ModelError`."""
        return await self.wait_for(self.transport.request(method, path, headers, content))

    async def wait_for(self, answer: Awaitable[bytes]) -> bytes:
        """Await an answer of the transport. Raises `ModelError`."""
        async with self._convert_errors():
            return await answer

    async def aclose(self) -> None:
        """Close all connections."""
        await self.transport.aclose()

    @contextlib.asynccontextmanager
    async def _convert_errors(self) -> AsyncIterator[None]:
        """Limit the total time of the block and convert its errors to ours."""
        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                yield
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except MalformedReplyError as error:  # some servers echo the request
            secrets = self._config.secrets
            shown = mask_secrets(error.provider_text, secrets)
            raise MalformedReplyError(mask_secrets(error.message, secrets), provider_text=shown) from error.__cause__
        except self._failures as error:
            raise to_model_error(error, secrets=self._config.secrets, now=self._clock.now()) from error


async def iterate_pieces(body: bytes) -> AsyncIterator[bytes | memoryview]:
    """Yield a body in pieces. Its memory is freed once it is sent, because the answer takes much longer."""
    if len(body) > PIECE_BYTES:
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    else:
        yield body


def is_streamed(request: ModelRequest, *, is_long: bool) -> bool:
    """Return whether a call is streamed: a client watches, or the reply may be long. Batched calls never are."""
    return request.carry is None and (request.on_delta is not None or is_long)


def ignore_delta(_: Delta) -> None:
    """Ignore a piece: the stream has no watcher."""


def parse_body(content: bytes) -> Any:
    """Parse the body of a successful reply.

    Raises:
        MalformedReplyError: it is not JSON.
        StreamedError: it contains an error despite its status.
    """
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = content[:SHOWN_BYTES].decode(errors="replace")
        begins = f" It begins with {shown!r}." if shown else ""
        raise MalformedReplyError(f"The reply is not JSON: {error}.{begins}", provider_text=shown) from error
    if isinstance(reply, dict) and is_failure(reply):
        raise StreamedError(reply)
    if isinstance(reply, dict) and (failed := find_choice_failure(reply)) is not None:
        raise failed
    return reply


def make_timeouts(http: ModuleType, config: LLMConfig, read_seconds: float) -> Any:
    """Return the timeouts of a client or a request, as an object of the given HTTP module."""
    return http.Timeout(
        connect=config.connect_timeout,
        read=read_seconds,
        write=config.read_timeout,
        pool=config.total_timeout_seconds,
    )


def make_connection_options(http: ModuleType, config: LLMConfig) -> dict[str, Any]:
    """Return the connection options of a client of the given HTTP module."""
    return {
        "timeout": make_timeouts(http, config, config.read_timeout),
        "limits": http.Limits(max_connections=CONNECTIONS_LIMIT, keepalive_expiry=IDLE_CONNECTION_SECONDS),
        # A redirect would carry prompt and key to any address.
        "follow_redirects": False,
    }
