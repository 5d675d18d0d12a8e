"""A provider's SDK as a transport. The SDK authenticates, connects and raises; the bytes are ours.

Holds: one attempt per request, because the SDK is created without retries. A sent body is therefore not kept.
Does not: import an SDK.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import Any

from controller_worker.providers.wires.raw_client import pieces_of

_UNREAD = {"X-Stainless-Raw-Response": "stream"}
"""Makes the SDK return the raw answer before it reads the body."""


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
    """The connections of one client.

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
        pieces = pieces_of(body)
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
