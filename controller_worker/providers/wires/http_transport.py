"""Requests to one server with aiohttp: the work of a provider's SDK, with less memory per waiting call.

An SDK holds some twenty objects and fifteen coroutine frames while a call waits. This client keeps only aiohttp's own
state and the unsent part of the body.

Holds: one attempt per request. Redirects are not followed. Proxies come from the environment. Certificates are those
that httpx trusts (`SSL_CERT_FILE`, `SSL_CERT_DIR`, else certifi's). The key is sent to this server only. A refusal is
recognized by its status, even if its body breaks off.
Does not: import aiohttp before a client is created, or limit the time of a whole reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import ServiceUnavailableError
from controller_worker.providers.wires.egress import find_environment_proxy, make_login_header, strip_login
from controller_worker.providers.wires.event_stream import CLOSING_SECONDS
from controller_worker.providers.wires.raw_client import (
    CONNECTIONS_LIMIT,
    IDLE_CONNECTION_SECONDS,
    PIECE_BYTES,
    iterate_pieces,
)

if TYPE_CHECKING:
    from ssl import SSLContext

    import aiohttp

Options = TypeVar("Options")
Answer = TypeVar("Answer")

USER_AGENT = "deckhands"
CHUNK_BYTES = 16 * 1024
REFUSAL_LIMIT_BYTES = 1024 * 1024
"""The part of a refusal's body that is read."""
LOCATION_LIMIT_CHARS = 300
HEADER_LIMIT_BYTES = 64 * 1024
"""Limit of one header. Gateways add cookies and policies longer than aiohttp's default of 8 KiB."""
UNSOLICITED_LIMIT = 10
"""The number of idle connections with unsolicited data that one request may close."""
STALE_LIMIT = 3
"""The number of stale connections that a call may meet before it fails."""
STALE_SECONDS = 5.0
"""If a reused connection fails within this time, the server closed it without reading the request."""


class RequestFailed(Exception):
    """No answer arrived, or the answer broke off. The cause has the reason."""


class ConnectionStale(RequestFailed):
    """The server closed an idle connection between two requests. The second request may be sent again."""


class RequestUnsendable(Exception):
    """The address, the key or the headers are invalid for a request. A retry would fail again."""


class AnswerRefused(Exception):
    """An answer with an error status, with the fields that `provider_errors` reads."""

    def __init__(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        text = _decode(content, response.charset).strip()
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            super().__init__(_find_redirect(response) or text or f"Error code: {response.status}")
            self.body: Any = text
        else:
            super().__init__(f"Error code: {response.status} - {body}")
            self.body = body.get("error", body) if isinstance(body, dict) else body
        self.status_code = response.status
        self.request = response.request_info
        self.response = response


class HttpAnswer:
    """A successful answer, before its body is read."""

    def __init__(self, response: aiohttp.ClientResponse, raised: tuple[type[Exception], ...]) -> None:
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._raised = raised

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body.

        Raises:
            RequestFailed: the body broke off.
        """
        try:
            async for chunk in self._response.content.iter_chunked(CHUNK_BYTES):
                yield chunk
        except self._raised as error:
            is_late = isinstance(error, TimeoutError)
            raise RequestFailed("Request timed out." if is_late else "The reply has broken off.") from error

    async def aclose(self) -> None:
        """Release the connection; close it if the body was not read to its end."""
        self._response.release()
        with contextlib.suppress(*self._raised):  # from an unread body
            await self._response.wait_for_close()


class _Connection:
    """The state of a request's connection."""

    __slots__ = ("is_reused",)

    def __init__(self) -> None:
        self.is_reused = False


_CONNECTION: ContextVar[_Connection | None] = ContextVar("deckhands_model_connection", default=None)
"""What is known about the connection of the current task's request."""


class HttpTransport:
    """Connections to the configured server, authenticated with the configured key."""

    failures: tuple[type[Exception], ...] = (RequestFailed, RequestUnsendable, AnswerRefused)
    broken: tuple[type[Exception], ...] = (RequestFailed,)

    def __init__(self, config: LLMConfig, key: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Import aiohttp and read proxies and certificates from the environment. Sends no request.

        Args:
            headers: further headers of every request.

        Raises:
            OSError: the certificates that the environment names do not exist.
            LLMConfigError: the environment's proxy is invalid.
        """
        import aiohttp
        import httpx
        from aiohttp.http_exceptions import HttpProcessingError

        assert config.base_url is not None
        address = urlsplit(config.base_url)
        netloc = address.netloc.rpartition("@")[2]
        self.base_url = address._replace(netloc=netloc, query="", fragment="").geturl().rstrip("/")
        self._query = address.query
        self._headers = {
            "Accept": "application/json",
            "User-Agent": USER_AGENT,
            "Authorization": make_login_header(address) or f"Bearer {key}",
            **headers,
        }
        self._proxy, login = strip_login(find_environment_proxy(config.base_url))
        to_proxy = {"Proxy-Authorization": login} if login else {}
        is_tunnelled = address.scheme == "https"
        self._to_proxy = to_proxy if is_tunnelled else {}
        if not is_tunnelled:
            self._headers |= to_proxy
        needs_certificates = is_tunnelled or (self._proxy or "").startswith("https:")
        self._ssl: SSLContext | bool = httpx.create_ssl_context() if needs_certificates else True  # 20 ms of CPU
        self._config = config
        self._aiohttp = aiohttp
        self._raised = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
        self._closed_by_server = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
        self._content_class = _make_content_class(aiohttp)
        self._posted: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})  # the headers of the last call, and all
        self._session: aiohttp.ClientSession | None = None
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> HttpAnswer:
        """See `Transport.post`.

        Raises:
            ConnectionStale: the server closed a reused connection without an answer.
        """
        if headers is not self._posted[0]:
            self._posted = headers, self._add_own_headers(headers)
        _, sent = self._posted
        if len(body) > PIECE_BYTES:
            content, sent = iterate_pieces(body), {**sent, "Content-Length": str(len(body))}
        else:
            content = self._content_class(body)
        del body
        connection = _Connection()
        _CONNECTION.set(connection)
        began = asyncio.get_running_loop().time()
        try:
            return await self._ask("POST", path, content, sent, read_seconds=read_seconds)
        except RequestFailed as error:
            is_early = asyncio.get_running_loop().time() - began < STALE_SECONDS
            if connection.is_reused and is_early and isinstance(error.__cause__, self._closed_by_server):
                raise ConnectionStale(str(error)) from error.__cause__
            raise

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """See `Transport.request`."""
        pieces = iterate_pieces(content) if content is not None else None
        length = {"Content-Length": str(len(content))} if content is not None else {}
        return await _read_whole(await self._ask(method, path, pieces, self._add_own_headers({**headers, **length})))

    async def upload(self, path: str, fields: Mapping[str, str], file: tuple[str, bytes, str]) -> bytes:
        """Send a form with a file (name, content, type) and return the body of the answer. Raises `failures`."""
        form, (name, content, content_type) = self._aiohttp.FormData(), file
        for field, value in fields.items():
            form.add_field(field, value)
        form.add_field("file", io.BytesIO(content), filename=name, content_type=content_type)
        return await _read_whole(await self._ask("POST", path, form, self._headers))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _add_own_headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Add our headers unless the request sets them; a gateway may need another login."""
        names = {name.lower() for name in headers}
        own = {name: value for name, value in self._headers.items() if name.lower() not in names}
        return {**own, **headers}

    async def _ask(
        self,
        method: str,
        path: str,
        data: Any,
        headers: Mapping[str, str],
        *,
        read_seconds: float | None = None,
    ) -> HttpAnswer:
        session = self._session or self._open_session()
        try:
            response = await session.request(
                method,
                self._make_url(path),
                data=data,
                headers=headers,
                allow_redirects=False,  # a redirect would carry prompt and key to any address
                proxy=self._proxy,
                proxy_headers=self._to_proxy or None,
                timeout=self._timeout(read_seconds or self._config.read_timeout),
            )
        except self._raised as error:
            # An untrusted certificate raises both errors; it may be replaced soon.
            if isinstance(error, ValueError) and not isinstance(error, OSError):  # before anything was sent
                raise RequestUnsendable("The request is invalid. Check address, key and headers.") from error
            is_late = isinstance(error, TimeoutError)
            raise RequestFailed("Request timed out." if is_late else "Connection error.") from error
        answer = HttpAnswer(response, self._raised)
        if not 200 <= response.status < 300:
            raise AnswerRefused(response, await _read_refusal(answer))
        return answer

    def _make_url(self, path: str) -> str:
        """Return the URL of a request. The base address's query is part of each."""
        return self.base_url + path + (("&" if "?" in path else "?") + self._query if self._query else "")

    def _open_session(self) -> aiohttp.ClientSession:
        """Create the session, which needs a running loop."""
        connector = _connector_class(self._aiohttp)(
            limit=CONNECTIONS_LIMIT, keepalive_timeout=IDLE_CONNECTION_SECONDS, ssl=self._ssl
        )
        self._session = self._aiohttp.ClientSession(
            connector=connector,
            max_line_size=HEADER_LIMIT_BYTES,
            max_field_size=HEADER_LIMIT_BYTES,
        )
        return self._session

    def _timeout(self, read_seconds: float) -> aiohttp.ClientTimeout:
        if read_seconds not in self._timeouts:
            self._timeouts[read_seconds] = self._aiohttp.ClientTimeout(
                total=None,
                connect=self._config.total_timeout_seconds,
                sock_connect=self._config.connect_timeout,
                sock_read=read_seconds,
            )
        return self._timeouts[read_seconds]


async def resend_if_stale(ask: Callable[[Options], Awaitable[Answer]], options: Options) -> Answer:
    """Make a call. Repeat it if its connection was stale, because the server has not read it."""
    stale = 0
    while True:
        try:
            return await ask(options)
        except ServiceUnavailableError as error:
            stale += 1
            if stale > STALE_LIMIT or not isinstance(error.__cause__, ConnectionStale):
                raise


def _make_content_class(aiohttp: Any) -> Any:
    """Return the class of request bodies that are sent in one piece."""

    class Content(aiohttp.BytesPayload):  # type: ignore[misc]
        _value: bytes

        async def write_with_length(self, writer: Any, _content_length: int | None) -> None:
            """Send the body and free its memory, because the answer takes much longer."""
            body, self._value = self._value, b""
            await writer.write(body)

    return Content


def _connector_class(aiohttp: Any) -> Any:
    """Return our class of connection pools."""

    class Connector(aiohttp.TCPConnector):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._used: WeakSet[Any] = WeakSet()

        async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109
            """Return a connection, but none with unsolicited data, which would be mistaken for the answer."""
            connection = await super().connect(req, traces, timeout)
            for _ in range(UNSOLICITED_LIMIT):
                if not connection.protocol.should_close:
                    break
                connection.close()
                connection = await super().connect(req, traces, timeout)
            if (asked := _CONNECTION.get()) is not None:
                asked.is_reused = connection.protocol in self._used
            self._used.add(connection.protocol)
            connection.add_callback(partial(asyncio.get_running_loop().call_soon, _abort, connection.transport))
            return connection

    return Connector


def _abort(transport: asyncio.Transport) -> None:
    """Close a connection that was abandoned while its server was not reading the body."""
    if transport.is_closing() and transport.get_write_buffer_size():
        transport.abort()


async def _read_whole(answer: HttpAnswer) -> bytes:
    """Return a body and release the connection. A batch's results may have any size."""
    try:
        return b"".join([part async for part in answer.chunks()])
    finally:
        await answer.aclose()


async def _read_refusal(answer: HttpAnswer) -> bytes:
    """Return the body of a refusal.

    If it breaks off or never ends, return its beginning, because the status is enough.
    """
    parts = []
    size = 0
    try:
        with contextlib.suppress(RequestFailed, TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                async for part in answer.chunks():
                    parts.append(part)
                    size += len(part)
                    if size >= REFUSAL_LIMIT_BYTES:
                        break
    finally:
        await answer.aclose()
    return b"".join(parts)


def _find_redirect(response: aiohttp.ClientResponse) -> str:
    """Return the target of a redirect without credentials and query; empty if it is not a redirect."""
    if not 300 <= response.status < 400:
        return ""
    with contextlib.suppress(ValueError):
        there = urlsplit(response.headers.get("Location", ""))
        shown = there._replace(netloc=there.netloc.rpartition("@")[2], query="", fragment="").geturl()
        if shown:
            return f"Redirected to {shown[:LOCATION_LIMIT_CHARS]}, and redirects are not followed."
    return ""


def _decode(content: bytes, charset: str | None) -> str:
    try:
        return content.decode(charset or "utf-8", "replace")
    except (LookupError, UnicodeError):  # an unknown charset, or one without replacement characters
        return content.decode("utf-8", "replace")
