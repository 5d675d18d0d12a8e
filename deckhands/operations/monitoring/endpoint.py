"""The metrics over HTTP: an ASGI application with one address, `/metrics`, and a server for it.

Another server can mount `metrics_app` too.

Holds: every request needs the token, also on the loopback, which agents may reach. Requests cause at most one read of
the store per second. Connections are limited, and any request except a short GET gets a 4xx.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from deckhands.operations.monitoring.exposition import CONTENT_TYPE, Exposition

PATH = "/metrics"
MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 16_384
KEEP_ALIVE_SECONDS = 20
STOP_SECONDS = 5

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def metrics_app(exposition: Exposition, *, token: str) -> App:
    """Return the ASGI application that serves metrics.

    Args:
        token: the token that requests must send as `Authorization: Bearer`.
    """
    expected = f"Bearer {token}".encode()

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if scope["path"] != PATH:
            await _answer(send, 404, b"There is only /metrics.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, b"Use GET.\n", (b"allow", b"GET, HEAD"))
        elif not hmac.compare_digest(headers.get(b"authorization", b""), expected):
            await _answer(send, 401, b"The token is missing or wrong.\n", (b"www-authenticate", b"Bearer"))
        else:
            await _answer(send, 200, await exposition.text(), content_type=CONTENT_TYPE.encode())

    return app


async def _answer(
    send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes], content_type: bytes = b"text/plain"
) -> None:
    described = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
    await send({"type": "http.response.body", "body": body})


def make_server(app: App, host: str, port: int) -> uvicorn.Server:
    """Return a server of an application; its `serve` runs it until the process is asked to stop."""
    configuration = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    return uvicorn.Server(configuration)
