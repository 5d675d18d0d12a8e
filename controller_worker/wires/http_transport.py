"""Requests to one server by aiohttp: what a provider's SDK does around them, without what it keeps meanwhile.

An SDK holds some twenty objects and fifteen frames of coroutines for as long as a call waits; this holds what aiohttp
does, and of a body only what is not sent yet.

Holds: one attempt per request; redirects are not followed; proxies are those of the environment, and certificates those
that httpx trusts (`SSL_CERT_FILE`, `SSL_CERT_DIR`, else certifi's); a key is sent to this server only.
Does not: import aiohttp before a client is made, or limit the time of a whole reply.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from controller_worker.llm.config import LLMConfig
from controller_worker.wires.event_stream import whole_reply
from controller_worker.wires.raw_client import CONNECTIONS_LIMIT, IDLE_CONNECTION_SECONDS

if TYPE_CHECKING:
    import aiohttp

AGENT = "deckhands"
CHUNK_BYTES = 16 * 1024
PIECE_BYTES = 256 * 1024
"""How much of a body is given to the connection at once."""


class RequestFailed(Exception):
    """No answer has come, or it has broken off; the cause says why."""


class AnswerRefused(Exception):
    """An answer whose status is no success, with what `provider_errors` reads of it."""

    def __init__(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        text = _decoded(content, response.charset).strip()
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            super().__init__(text or f"Error code: {response.status}")
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
            raise RequestFailed(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        """Give its connection back, or up if the body was not read to its end."""
        self._response.release()
        with contextlib.suppress(*self._raised):  # of a body that nobody wants
            await self._response.wait_for_close()


class HttpTransport:
    """The connections to the server of a configuration, which log in with its key."""

    failures: tuple[type[Exception], ...] = (RequestFailed, AnswerRefused)
    broken: tuple[type[Exception], ...] = (RequestFailed,)

    def __init__(self, config: LLMConfig, key: str) -> None:
        """Import aiohttp and read what the environment says of proxies and certificates; nothing is sent.

        Raises:
            OSError: there are no certificates where the environment says.
        """
        import aiohttp
        import httpx
        from aiohttp.http_exceptions import HttpProcessingError

        assert config.base_url is not None
        address = urlsplit(config.base_url)
        self.base_url = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self._headers = {"Accept": "application/json", "User-Agent": AGENT, "Authorization": _login(address, key)}
        self._proxy, login = _without_login(environment_proxy(config.base_url))
        to_proxy = {"Proxy-Authorization": login} if login else {}
        is_tunnelled = address.scheme == "https"
        self._to_proxy = to_proxy if is_tunnelled else {}
        self._headers |= {} if is_tunnelled else to_proxy
        self._ssl = httpx.create_ssl_context()
        self._config = config
        self._aiohttp = aiohttp
        self._raised = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
        self._session: aiohttp.ClientSession | None = None
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, read_seconds: float | None = None
    ) -> HttpAnswer:
        """See `Transport.post`."""
        size, pieces = len(body), _pieces(body)
        del body
        sent = self._with_own({**headers, "Content-Length": str(size)})
        return await self._ask("POST", path, pieces, sent, read_seconds)

    async def request(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> bytes:
        """See `Transport.request`."""
        pieces = _pieces(content) if content is not None else None
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
        self, method: str, path: str, data: Any, headers: Mapping[str, str], read_seconds: float | None = None
    ) -> HttpAnswer:
        session = self._session or self._open()
        try:
            response = await session.request(
                method,
                self.base_url + path,
                data=data,
                headers=headers,
                allow_redirects=False,  # it would carry prompt and key to wherever it points
                proxy=self._proxy,
                proxy_headers=self._to_proxy or None,
                timeout=self._timeout(read_seconds or self._config.read_timeout),
            )
        except self._raised as error:
            is_late = isinstance(error, TimeoutError)
            raise RequestFailed("Request timed out." if is_late else "Connection error.") from error
        answer = HttpAnswer(response, self._raised)
        if not 200 <= response.status < 300:
            raise AnswerRefused(response, await _whole(answer, is_bounded=True))
        return answer

    def _open(self) -> aiohttp.ClientSession:
        """Make the session, which wants a running loop."""
        connector = self._aiohttp.TCPConnector(
            limit=CONNECTIONS_LIMIT, keepalive_timeout=IDLE_CONNECTION_SECONDS, ssl=self._ssl
        )
        self._session = self._aiohttp.ClientSession(connector=connector)
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


def environment_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for an address (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`), or None."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _without_login(proxy: str | None) -> tuple[str | None, str]:
    """Return a proxy's address as errors may show it, and its login; empty: none."""
    if proxy is None or "@" not in proxy:
        return proxy, ""
    address = urlsplit(proxy)
    shown = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
    return shown, _login(address, "") if address.username else ""


def _login(address: SplitResult, key: str) -> str:
    if address.username is None:
        return f"Bearer {key}"
    pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


async def _pieces(body: bytes) -> AsyncIterator[bytes | memoryview]:
    """Yield a body, which is forgotten once it is sent: the answer takes much longer."""
    if len(body) > PIECE_BYTES:
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    else:
        yield body


async def _whole(answer: HttpAnswer, *, is_bounded: bool = False) -> bytes:
    """Return a body and give the connection back; results of a batch may have any size."""
    try:
        return await whole_reply(answer.chunks()) if is_bounded else b"".join([part async for part in answer.chunks()])
    finally:
        await answer.aclose()


def _decoded(content: bytes, charset: str | None) -> str:
    try:
        return content.decode(charset or "utf-8", "replace")
    except LookupError:  # a charset that nobody knows
        return content.decode("utf-8", "replace")
