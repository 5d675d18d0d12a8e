"""A proxy between one worker and the store, which can delay or block the traffic.

Holds: bytes stay in order. While the link is cut, connections stay open and new ones are accepted, as with a network
that drops packets. It ends with its process, so it leaves nothing to undo.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

CHUNK_BYTES = 65_536
SCHEMES = ("redis", "unix")


class StoreProxy:
    """A socket that leads to the store.

    Args:
        url: URL of the store.
        path: the socket to listen on.

    Attributes:
        delay_seconds: how late each piece is delivered.
    """

    def __init__(self, url: str, path: Path) -> None:
        self._upstream = urlsplit(url)
        self._path = path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.delay_seconds = 0.0

    @staticmethod
    def supports(url: str) -> bool:
        """Return whether a proxy can serve this store, which must be one server without TLS."""
        return urlsplit(url).scheme in SCHEMES

    @property
    def url(self) -> str:
        """URL of the store through the proxy, with the same login."""
        login = self._upstream.netloc.rpartition("@")[0]
        return urlunsplit(("unix", f"{login}@" if login else "", quote(str(self._path)), "", ""))

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def cut(self) -> None:
        """Block the traffic."""
        self._open.clear()

    def join(self) -> None:
        """Let the traffic pass again, with the current delay. Idempotent."""
        self._open.set()

    def restore(self) -> None:
        """Pass everything on without a delay. Idempotent."""
        self.delay_seconds = 0.0
        self.join()

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            if self._upstream.scheme == "unix":
                store_in, store_out = await asyncio.open_unix_connection(unquote(self._upstream.path))
            else:
                host, port = self._upstream.hostname or "127.0.0.1", self._upstream.port or 6379
                store_in, store_out = await asyncio.open_connection(host, port)
        except OSError:
            client_out.close()
            return
        ways = [
            asyncio.create_task(self._pass_on(client_in, store_out)),
            asyncio.create_task(self._pass_on(store_in, client_out)),
        ]
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
                self._tasks.discard(way)
            client_out.transport.abort()
            store_out.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, chunk = await in_flight.get()
                    await asyncio.sleep(max(0.0, due - loop.time()))
                    await self._open.wait()
                    target.write(chunk)
                    await target.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while chunk := await source.read(CHUNK_BYTES):
                await self._open.wait()
                in_flight.put_nowait((loop.time() + self.delay_seconds, chunk))
        except OSError:
            pass
        finally:
            delivering.cancel()
