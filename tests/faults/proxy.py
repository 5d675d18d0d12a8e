"""A name of the store that can lead to another server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self


class Name:
    """A name that leads to a server: a unix socket whose new connections go to `upstream`, which may change.

    Connections that exist stay with the server that they were made to, as those through a name do.
    """

    def __init__(self, path: Path, upstream: Path) -> None:
        self.upstream = upstream
        self.path = path
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        try:
            store_in, store_out = await asyncio.open_unix_connection(self.upstream)
        except OSError:
            client_out.close()
            return
        ways = [
            asyncio.create_task(self._pass_on(client_in, store_out)),
            asyncio.create_task(self._pass_on(store_in, client_out)),
        ]
        self._tasks.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
            self._tasks.discard(way)
        client_out.transport.abort()
        store_out.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(65536):
                target.write(chunk)
                await target.drain()
