"""A call over the transport of a backend, which logs in, connects and raises: aiohttp, or Anthropic's SDK.

Holds: one attempt per request; the time of a whole reply and each silence in it are limited; what fails is an error of
our family; this keeps no body while its answer is waited for.
Does not: know what is sent and what an answer means, or import a client.
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
    read_events,
    stream_limits,
    until_headers,
    whole_reply,
)
from controller_worker.providers.wires.provider_errors import (
    StreamedError,
    failure_of_choice,
    is_failure,
    masked,
    model_error,
)

CONNECTIONS_LIMIT = 10_000
"""Of one client. Fewer than a worker holds conversations, and calls would wait for each other unseen."""
IDLE_CONNECTION_SECONDS = 30.0
PIECE_BYTES = 256 * 1024
"""How much of a body is given to the connection at once."""


class Answer(Protocol):
    """A successful answer, before its body is read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers; names in any case."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield its body."""
        ...

    async def aclose(self) -> None:
        """Give its connection back."""
        ...


class Transport(Protocol):
    """The connections to one provider.

    Attributes:
        failures: what it raises.
        broken: those of them that say that the connection has failed.
    """

    failures: tuple[type[Exception], ...]
    broken: tuple[type[Exception], ...]

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> Answer:
        """Post a body and return the answer; `read_seconds`, if given, limits its silences instead of the settings."""
        ...

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """Make a request and return the body of the answer."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class StreamedReply(Protocol):
    """A reply that comes in events."""

    @property
    def is_whole(self) -> bool:
        """Whether the model has said all of it; its usage may be missing."""
        ...

    def take(self, text: str) -> bool:
        """Take in the text of the next event; return whether it is the last one of the protocol."""
        ...

    def reply(self) -> Any:
        """Return the reply that would have come in one piece, once all events are taken."""
        ...


class RawClient:
    """One client."""

    def __init__(self, transport: Transport, config: LLMConfig, clock: Clock) -> None:
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
        """Return the reply to a call, parsed from JSON or put together from its events, and its headers.

        Args:
            request: what `body` was made of. Its `carry` makes the call instead, if there is one.
            stream: makes the reader of a streamed reply; None: it comes in one piece.

        Raises:
            ModelError: the call failed.
        """
        if request.carry is not None:
            return await request.carry(body), {}
        streamed = stream(request.on_delta or unseen) if stream is not None else None
        limits = stream_limits(self._config)
        async with self._errors_told():
            if streamed is None:
                asking = self.transport.post(path, body, headers)
                del body
                response = await asking
            else:
                asking = self.transport.post(path, body, headers, read_seconds=limits.longest_seconds)
                del body
                async with until_headers(limits):
                    response = await asking
            try:
                if streamed is None:
                    return parsed(await whole_reply(response.chunks())), response.headers
                if "json" in response.headers.get("content-type", ""):  # the first byte may come with the last one
                    limits = StreamLimits(self._config.read_timeout, self._config.read_timeout)
                whole = None
                try:
                    whole = await read_events(response.chunks(), limits, streamed.take, lambda: streamed.is_whole)
                except self._lost:
                    if not streamed.is_whole:
                        raise
                # Servers and gateways that do not stream answer in JSON all the same, under any type.
                return parsed(whole) if whole is not None else streamed.reply(), response.headers
            finally:
                await response.aclose()

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], *, content: bytes | None = None
    ) -> bytes:
        """Make a request of another kind than a call and return the body of the answer; raises `ModelError`."""
        return await self.wait_for(self.transport.request(method, path, headers, content))

    async def wait_for(self, answer: Awaitable[bytes]) -> bytes:
        """Return what the transport answers; raises `ModelError`."""
        async with self._errors_told():
            return await answer

    async def aclose(self) -> None:
        """Close all connections."""
        await self.transport.aclose()

    @contextlib.asynccontextmanager
    async def _errors_told(self) -> AsyncIterator[None]:
        """Limit the time of what is done within, and turn its errors into ours."""
        limit_seconds = self._config.total_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                yield
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was no whole reply within {limit_seconds:g} s.") from error
        except MalformedReplyError as error:  # some servers echo what they were sent
            secrets = self._config.secrets
            shown = masked(error.provider_text, secrets)
            raise MalformedReplyError(masked(error.message, secrets), provider_text=shown) from error.__cause__
        except self._failures as error:
            raise model_error(error, secrets=self._config.secrets, now=self._clock.now()) from error


async def pieces_of(body: bytes) -> AsyncIterator[bytes | memoryview]:
    """Yield a body, which is forgotten once it is sent: the answer takes much longer."""
    if len(body) > PIECE_BYTES:
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    else:
        yield body


def is_streamed(request: ModelRequest, *, is_long: bool) -> bool:
    """Say whether a call asks for a stream: somebody watches, or the reply may be a long one; in a batch none does."""
    return request.carry is None and (request.on_delta is not None or is_long)


def unseen(_: Delta) -> None:
    """Watch a stream for nobody."""


def parsed(content: bytes) -> Any:
    """Return the body of a successful reply, parsed.

    Raises:
        MalformedReplyError: it is not JSON.
        StreamedError: it is an error all the same.
    """
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = content[:SHOWN_BYTES].decode(errors="replace")
        begins = f" It begins with {shown!r}." if shown else ""
        raise MalformedReplyError(f"The reply is not JSON: {error}.{begins}", provider_text=shown) from error
    if isinstance(reply, dict) and is_failure(reply):
        raise StreamedError(reply)
    if isinstance(reply, dict) and (failed := failure_of_choice(reply)) is not None:
        raise failed
    return reply


def timeouts(http: ModuleType, config: LLMConfig, read_seconds: float) -> Any:
    """Return the limits of a client or a request, of the type that the module has for them."""
    return http.Timeout(
        connect=config.connect_timeout,
        read=read_seconds,
        write=config.read_timeout,
        pool=config.total_timeout_seconds,
    )


def connections(http: ModuleType, config: LLMConfig) -> dict[str, Any]:
    """Return how a client of the module keeps its connections."""
    return {
        "timeout": timeouts(http, config, config.read_timeout),
        "limits": http.Limits(max_connections=CONNECTIONS_LIMIT, keepalive_expiry=IDLE_CONNECTION_SECONDS),
        # A redirect would carry prompt and key to wherever it points.
        "follow_redirects": False,
    }
