"""A receiver of webhooks, which answers as a test wants and keeps every request."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from broker.contract.events import ConversationCreated
from deckhands.client.client import Client
from tests.polling import until
from tests.unit.deckhands.sample_log import command, output, reply, state, user


@dataclass
class Receiver:
    """The received requests, in order.

    Attributes:
        answer: the status of the answer to a body.
    """

    answer: Callable[[dict[str, Any]], int] = lambda _: 204
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    def states(self, conversation_id: str) -> list[str]:
        """The states of a conversation that have arrived, each once for each id."""
        seen: dict[str, str] = {}
        for headers, body in self.requests:
            data = json.loads(body)["data"]
            if data["conversation_id"] == conversation_id:
                seen.setdefault(headers["webhook-id"], data["state"])
        return list(seen.values())

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append(({name.lower(): value for name, value in request.headers.items()}, body))
        status = self.answer(json.loads(body))
        return web.Response(status=status, headers={"Location": "/elsewhere"} if 300 <= status < 400 else {})

    async def arrived(self, number: int) -> None:
        await until(lambda: len(self.requests) >= number, limit=60.0, what=f"{number} requests")


async def begin_worked(client: Client, name: str, **created: Any) -> None:
    """Create a conversation, and append an agent's events until it has finished."""
    first = ConversationCreated(conversation_id=name, title=f"Title of {name}", **created)
    await client.log.create(first, [user("do it")], key=f"begin:{name}")
    work = [state("running"), command("make test"), output(4), reply(), state("finished")]
    await client.log.append(name, work, key=f"work:{name}")


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()
