"""The floor of a model call: the same bytes to the same model server with aiohttp and JSON, and nothing else.

A bare exchange writes the body as JSON, posts it, and reads and parses the answer, event by event if it is a stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from broker.runtime.clock import SystemClock

UNSENT_HEADERS = frozenset({"host", "content-length", "accept-encoding", "connection", "transfer-encoding"})
"""Headers of a recorded request that belong to its connection."""
DATA = b"data: "
DONE = b"[DONE]"


class BareExchange:
    """Repeats a request that the model server has recorded."""

    def __init__(self, server_url: str, recorded: Mapping[str, Any]) -> None:
        self._url = server_url + recorded["path"]
        self._body = recorded["body"]
        self._headers = {name: text for name, text in recorded["headers"].items() if name.lower() not in UNSENT_HEADERS}
        self._session = aiohttp.ClientSession()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self) -> None:
        """Make one exchange."""
        body = json.dumps(self._body, ensure_ascii=False, separators=(",", ":")).encode()
        async with self._session.post(self._url, data=body, headers=self._headers) as response:
            content = await response.read()
        assert response.status == 200, content[:200]
        if not self._body.get("stream"):
            json.loads(content)
            return
        for line in content.splitlines():
            if line.startswith(DATA) and not line.endswith(DONE):
                json.loads(line.removeprefix(DATA))

    async def cpu_seconds(self, calls: int) -> float:
        """Return the CPU of one exchange: the mean of so many, one at a time."""
        await self.ask()
        clock = SystemClock()
        began = clock.cpu()
        for _ in range(calls):
            await self.ask()
        return (clock.cpu() - began) / calls
