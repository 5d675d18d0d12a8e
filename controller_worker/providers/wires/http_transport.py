"""Requests to one server by aiohttp: what a provider's SDK does around them, without what it keeps meanwhile.

An SDK holds some twenty objects and fifteen frames of coroutines for as long as a call waits; this holds what aiohttp
does, and of a body only what is not sent yet.

Holds: one attempt per request; redirects are not followed; proxies are those of the environment, and certificates those
that httpx trusts (`SSL_CERT_FILE`, `SSL_CERT_DIR`, else certifi's); a key is sent to this server only; a refused answer
is known by its status, even if its body breaks off.
Does not: import aiohttp before a client is made, or limit the time of a whole reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.wires.environment_proxy import environment_proxy, login_of, without_login
from controller_worker.providers.wires.event_stream import CLOSING_SECONDS
from controller_worker.providers.wires.raw_client import CONNECTIONS_LIMIT, IDLE_CONNECTION_SECONDS, pieces_of

if TYPE_CHECKING:
    import aiohttp

AGENT = "deckhands"
CHUNK_BYTES = 16 * 1024
REFUSAL_LIMIT_BYTES = 1024 * 1024
"""How much is read of the body of a refused answer."""
LOCATION_LIMIT_CHARS = 300
HEADER_LIMIT_BYTES = 64 * 1024
"""Of one header: gateways add cookies and policies that are longer than aiohttp's 8 KiB."""
UNASKED_LIMIT = 10
"""How many connections on which something came while they were idle are closed for one request."""
STALE_SECONDS = 5.0
"""How soon a used connection has to fail for its server to have closed it before it read the request."""


class RequestFailed(Exception):
    """No answer has come, or it has broken off; the cause says why."""


class ConnectionStale(RequestFailed):
    """The server has closed a connection between two requests; the second one may be sent again."""


class RequestUnsendable(Exception):
    """No request can be made of the address, the key or the headers; it would fail again."""


class AnswerRefused(Exception):
    """An answer whose status is no success, with what `provider_errors` reads of it."""

    def __init__(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        text = _decoded(content, response.charset).strip()
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            super().__init__(_redirection(response) or text or f"Error code: {response.status}")
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
        """Yield its body.

        Raises:
            RequestFailed: it has broken off.
        """
        try:
            async for chunk in self._response.content.iter_chunked(CHUNK_BYTES):
                yield chunk
        except self._raised as error:
            is_late = isinstance(error, TimeoutError)
            raise RequestFailed("Request timed out." if is_late else "The reply has broken off.") from error

    async def aclose(self) -> None:
        """Give its connection back, or up if the body was not read to its end."""
        self._response.release()
        with contextlib.suppress(*self._raised):  # of a body that nobody wants
            await self._response.wait_for_close()


class _Connection:
    """What is known of the connection of a request."""

    __slots__ = ("is_reused",)

    def __init__(self) -> None:
        self.is_reused = False


class HttpTransport:
    """The connections to the server of a configuration, which log in with its key."""

    failures: tuple[type[Exception], ...] = (RequestFailed, RequestUnsendable, AnswerRefused)
    broken: tuple[type[Exception], ...] = (RequestFailed,)

    def __init__(self, config: LLMConfig, key: str) -> None:
        """Import aiohttp and read what the environment says of proxies and certificates; nothing is sent.

        Raises:
            OSError: there are no certificates where the environment says.
            LLMConfigError: the proxy of the environment cannot be used.
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
            "User-Agent": AGENT,
            "Authorization": login_of(address) or f"Bearer {key}",
        }
        self._proxy, login = without_login(environment_proxy(config.base_url))
        to_proxy = {"Proxy-Authorization": login} if login else {}
        is_tunnelled = address.scheme == "https"
        self._to_proxy = to_proxy if is_tunnelled else {}
        self._headers |= {} if is_tunnelled else to_proxy
        self._ssl = httpx.create_ssl_context()
        self._config = config
        self._aiohttp = aiohttp
        self._raised = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
        self._closed_by_server = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
        self._session: aiohttp.ClientSession | None = None
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> HttpAnswer:
        """See `Transport.post`.

        Raises:
            ConnectionStale: the connection was used before, and its server has closed it without an answer.
        """
        size, pieces, connection = len(body), pieces_of(body), _Connection()
        del body
        sent = self._with_own({**headers, "Content-Length": str(size)})
        began = asyncio.get_running_loop().time()
        try:
            return await self._ask("POST", path, pieces, sent, read_seconds=read_seconds, connection=connection)
        except RequestFailed as error:
            is_early = asyncio.get_running_loop().time() - began < STALE_SECONDS
            if connection.is_reused and is_early and isinstance(error.__cause__, self._closed_by_server):
                raise ConnectionStale(str(error)) from error.__cause__
            raise

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """See `Transport.request`."""
        pieces = pieces_of(content) if content is not None else None
        length = {"Content-Length": str(len(content))} if content is not None else {}
        return await _whole(await self._ask(method, path, pieces, self._with_own({**headers, **length})))

    async def upload(self, path: str, fields: Mapping[str, str], file: tuple[str, bytes, str]) -> bytes:
        """Send a form with a file (name, content, type) and return the body of the answer; raises `failures`."""
        form, (name, content, content_type) = self._aiohttp.FormData(), file
        for field, value in fields.items():
            form.add_field(field, value)
        form.add_field("file", io.BytesIO(content), filename=name, content_type=content_type)
        return await _whole(await self._ask("POST", path, form, self._headers))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _with_own(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers of a request with ours, unless they are set: a gateway may want another login."""
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
        connection: _Connection | None = None,
    ) -> HttpAnswer:
        session = self._session or self._open()
        try:
            response = await session.request(
                method,
                self._address(path),
                data=data,
                headers=headers,
                allow_redirects=False,  # it would carry prompt and key to wherever it points
                proxy=self._proxy,
                proxy_headers=self._to_proxy or None,
                timeout=self._timeout(read_seconds or self._config.read_timeout),
                trace_request_ctx=connection,
            )
        except self._raised as error:
            # A certificate that is not trusted is both errors, and may be another one soon.
            if isinstance(error, ValueError) and not isinstance(error, OSError):  # before anything was sent
                raise RequestUnsendable("The request cannot be made. Check address, key and headers.") from error
            is_late = isinstance(error, TimeoutError)
            raise RequestFailed("Request timed out." if is_late else "Connection error.") from error
        answer = HttpAnswer(response, self._raised)
        if not 200 <= response.status < 300:
            raise AnswerRefused(response, await _refusal(answer))
        return answer

    def _address(self, path: str) -> str:
        """Return where a request goes; the query of the base address is part of each."""
        return self.base_url + path + (("&" if "?" in path else "?") + self._query if self._query else "")

    def _open(self) -> aiohttp.ClientSession:
        """Make the session, which wants a running loop."""
        connector = _connector_class(self._aiohttp)(
            limit=CONNECTIONS_LIMIT, keepalive_timeout=IDLE_CONNECTION_SECONDS, ssl=self._ssl
        )
        tracing = self._aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(partial(_note, is_reused=True))
        tracing.on_connection_create_start.append(partial(_note, is_reused=False))
        self._session = self._aiohttp.ClientSession(
            connector=connector,
            trace_configs=[tracing],
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


async def _note(_session: Any, context: Any, _parameters: Any, *, is_reused: bool) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.is_reused = is_reused


def _connector_class(aiohttp: Any) -> Any:
    """Return the class of our pools of connections."""

    class Connector(aiohttp.TCPConnector):  # type: ignore[misc]
        async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109
            """Connect, by no connection on which something came unasked: it would be taken for the answer."""
            connection = await super().connect(req, traces, timeout)
            for _ in range(UNASKED_LIMIT):
                if not connection.protocol.should_close:
                    break
                connection.close()
                connection = await super().connect(req, traces, timeout)
            connection.add_callback(partial(asyncio.get_running_loop().call_soon, _cut, connection.transport))
            return connection

    return Connector


def _cut(transport: asyncio.Transport) -> None:
    """Cut a connection that was given up while a server that reads nothing was sent a body."""
    if transport.is_closing() and transport.get_write_buffer_size():
        transport.abort()


async def _whole(answer: HttpAnswer) -> bytes:
    """Return a body and give the connection back; results of a batch may have any size."""
    try:
        return b"".join([part async for part in answer.chunks()])
    finally:
        await answer.aclose()


async def _refusal(answer: HttpAnswer) -> bytes:
    """Return the body of a refused answer, or its beginning if it breaks off or never ends: the status counts."""
    parts, size = [], 0
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


def _redirection(response: aiohttp.ClientResponse) -> str:
    """Return where a redirection points, without a login and a query; empty if it is none."""
    if not 300 <= response.status < 400:
        return ""
    with contextlib.suppress(ValueError):
        there = urlsplit(response.headers.get("Location", ""))
        shown = there._replace(netloc=there.netloc.rpartition("@")[2], query="", fragment="").geturl()
        if shown:
            return f"Redirected to {shown[:LOCATION_LIMIT_CHARS]}, and redirects are not followed."
    return ""


def _decoded(content: bytes, charset: str | None) -> str:
    try:
        return content.decode(charset or "utf-8", "replace")
    except (LookupError, UnicodeError):  # a charset that nobody knows, or that has no replacements
        return content.decode("utf-8", "replace")
