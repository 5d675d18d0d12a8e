"""Helpers for tests of the browser: a small web site, and a hand that acts in the browser of a workspace."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from broker.contract.browser_events import BrowseInteractiveAction, BrowserOutputObservation, BrowseURLAction
from broker.contract.events import Observation
from tool_worker.tools.registry import find_tool
from tool_worker.workspace.launch.session_programs import find_session_programs
from tool_worker.workspace.workspaces import OpenWorkspace

LIMIT_SECONDS = 90.0
PROGRAMS = find_session_programs(["browser"])
SETTINGS: dict[str, Any] = {"programs": PROGRAMS}


class Site:
    """A web site on this machine.

    Attributes:
        pages: path → its HTML; anything else is not found.
        asked: the requested paths, in order.
        forms: the bodies sent to `/form`.
        held: set when a client waits at `/never`, which answers when `released` is set; then also the download
            `/endless` ends.
            `/flood` is one that never ends while it is read.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.pages: dict[str, str] = {}
        self.asked: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.held = asyncio.Event()
        self.released = asyncio.Event()
        self.port = 0

    def url(self, path: str = "/", host: str = "") -> str:
        return f"http://{host or self.address}:{self.port}{path}"

    def page(self, path: str, body: str) -> str:
        self.pages[path] = f"<!doctype html><title>{path}</title>{body}"
        return self.url(path)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        self.asked.append(path)
        if path == "/never":
            self.held.set()
            await self.released.wait()
        if path == "/form":
            sent = await request.post()
            self.forms.append(
                {
                    name: value if isinstance(value, str) else f"{value.filename}: {value.file.read().decode()}"  # type: ignore[union-attr]
                    for name, value in sent.items()
                }
            )
            return web.Response(text="<title>thanks</title>Thank you.", content_type="text/html")
        if path in ("/endless", "/flood"):
            endless = web.StreamResponse(headers={"Content-Disposition": f"attachment; filename={path[1:]}.bin"})
            await endless.prepare(request)
            await endless.write(bytes(1000))
            with suppress(ConnectionError):
                while path == "/flood":
                    await endless.write(bytes(1 << 20))
            await self.released.wait()
            return endless
        if path.endswith(".pdf"):
            return web.Response(body=b"%PDF-1.4\n%", content_type="application/pdf")
        if path.endswith(".csv"):
            headers = {"Content-Disposition": 'attachment; filename="../numbers.csv"'}
            return web.Response(body=b"1,2\n", content_type="text/csv", headers=headers)
        if path not in self.pages:
            return web.Response(status=404, text="not found")
        return web.Response(text=self.pages[path], content_type="text/html")


@asynccontextmanager
async def opened_site(address: str = "127.0.0.1") -> AsyncIterator[Site]:
    site = Site(address)
    runner = web.ServerRunner(web.Server(site.answer), shutdown_timeout=0)
    await runner.setup()
    socket_site = web.TCPSite(runner, address, 0)
    await socket_site.start()
    site.port = runner.addresses[0][1]
    try:
        yield site
    finally:
        site.released.set()
        await runner.cleanup()


class Surfer:
    """Acts in the browser of a workspace under its own action ids."""

    def __init__(self, workspace: OpenWorkspace, ids: itertools.count[int] | None = None) -> None:
        self.workspace = workspace
        self.ids = ids or itertools.count(1)
        self.latest = ""

    async def any(self, actions: str, *, timeout: float | None = None) -> Observation:
        """Carry out actions and return whatever comes of it."""
        return await self._done(BrowseInteractiveAction(browser_actions=actions, timeout=timeout))

    async def __call__(self, actions: str, *, timeout: float | None = None) -> BrowserOutputObservation:
        shown = await self.any(actions, timeout=timeout)
        assert isinstance(shown, BrowserOutputObservation), shown
        assert not shown.error, shown.last_browser_action_error
        return shown

    async def until(self, text: str) -> BrowserOutputObservation:
        """Look until the page shows this text: on a slow machine it may take its time."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while text not in (shown := await self("noop(100)")).content:
                pass
        return shown

    async def failing(self, actions: str, *, timeout: float | None = None) -> str:
        """Carry out actions that do not work, and return why."""
        shown = await self.any(actions, timeout=timeout)
        assert isinstance(shown, BrowserOutputObservation), shown
        assert shown.error
        assert shown.last_browser_action_error in shown.content
        return shown.last_browser_action_error

    async def read(self, url: str) -> Observation:
        return await self._done(BrowseURLAction(url=url))

    async def bash(self, command: str) -> str:
        result = await self.workspace.run(next(self.ids), "bash", {"command": command})
        return str(result.value["content"])

    def bid(self, line: str) -> str:
        """Return the id of the one element whose line in the latest tree holds this text."""
        found = re.findall(rf"^\t*\[(\w+)\] .*{re.escape(line)}.*$", self.latest, re.MULTILINE)
        assert len(found) == 1, f"{line!r} is there {len(found)} times:\n{self.latest}"
        return str(found[0])

    async def _done(self, action: BrowseInteractiveAction | BrowseURLAction) -> Observation:
        tool = find_tool(action.kind)
        request = tool.request(action)
        async with asyncio.timeout(LIMIT_SECONDS):
            result = await self.workspace.run(next(self.ids), request.tool, request.arguments)  # type: ignore[union-attr]
        observation = tool.observe(action, result.value)
        self.latest = observation.content
        return observation
