"""A connection to one MCP server, by the official SDK, which is imported when the first server is reached.

Holds: one connection serves all calls of a worker; the next call replaces a broken one; a server that is
started runs in a separate sandbox, without a workspace, and ends with its connection.
Does not: sample from models, ask people or offer directories to a server; it gets calls and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.runtime.child import last_lines
from broker.tools.custom_tools import ToolFailed
from tool_worker.mcp.config import McpServerSpec
from tool_worker.mcp.program import program_streams

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.client.session import IncomingMessage
    from mcp.types import CallToolResult, Tool

CONNECT_LIMIT_SECONDS = 30.0
TRUSTED_SECONDS = 1.0
"""How long after a call its connection is taken for alive."""
MAX_TOOL_PAGES = 20
LAST_LINES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the program of a server is started: the command line, its environment, and where its messages go.

    Attributes:
        proxy_for: is open while the program runs.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    proxy_for: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


class McpServer:
    """One server.

    Args:
        launch: Says how to start its program; asked before each start, and only for servers that are started.

    Attributes:
        changed: set when it may have other tools than it had.
    """

    def __init__(self, spec: McpServerSpec, launch: Callable[[McpServerSpec], Launch]) -> None:
        self.spec = spec
        self._launch = launch
        self.changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._connection: _Connection | None = None
        self._was_reached = False
        self._log: Path | None = None

    async def tools(self) -> list[Tool]:
        """Return the tools that the server has now.

        Raises:
            ToolFailed: it cannot be reached.
        """
        connection = await self._open()
        if connection.notifications.is_set():
            await connection.ask_again(self.spec.name)
        return connection.tools

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            ToolFailed: the server cannot be reached; nothing was called.
            MCPError: it refused, broke off, or has not answered in time.
        """
        connection = await self._open()
        with connection.in_use():
            return await connection.session.call_tool(name, arguments, read_timeout_seconds=self.spec.timeout)

    def last_words(self) -> str:
        """Return the last lines that its program has written to its log; empty: none."""
        try:
            return last_lines(self._log, limit=LAST_LINES).strip() if self._log is not None else ""
        except OSError:
            return ""

    async def aclose(self) -> None:
        """End the connection, and the program if it was started.  Idempotent."""
        async with self._turn:
            if self._connection is not None:
                await self._connection.aclose()
                self._connection = None

    async def _open(self) -> _Connection:
        async with self._turn:
            if self._connection is not None and not await self._connection.is_alive():
                await self._connection.aclose()
                self._connection = None
            if self._connection is None:
                notifications = _Notifications(self.changed)
                self._connection = await _Connection.made(
                    lambda: _transport(self.spec, self._launched), self.spec.name, notifications
                )
                if self._was_reached:  # it may be another version by now
                    self.changed.set()
                self._was_reached = True
            return self._connection

    def _launched(self, spec: McpServerSpec) -> Launch:
        self._log = None
        launch = self._launch(spec)
        self._log = launch.log
        return launch


class _Notifications:
    """Whether a server has announced other tools; also sets the event of those who wait for it."""

    def __init__(self, changed: asyncio.Event) -> None:
        self._changed = changed
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.set()

    def clear(self) -> None:
        self._is_set = False

    async def take(self, message: IncomingMessage) -> None:
        """Take in what a server says by itself."""
        from mcp.types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self.set()


class _Connection:
    """A session in a separate task, because the SDK requires that the task that begins a session also ends it."""

    def __init__(
        self,
        session: ClientSession,
        tools: list[Tool],
        notifications: _Notifications,
        end: asyncio.Event,
        task: asyncio.Task[None],
    ) -> None:
        self.session = session
        self.tools = tools
        self.notifications = notifications
        self._end = end
        self._task = task
        self._calls = 0
        self._last_used = asyncio.get_running_loop().time()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a call, so that a server that is busy with it is not asked whether it lives."""
        self._calls += 1
        self._last_used = -math.inf  # a call that fails leaves a connection that is not trusted
        try:
            yield
            self._last_used = asyncio.get_running_loop().time()
        finally:
            self._calls -= 1

    @classmethod
    async def made(cls, transport: Callable[[], Any], name: str, notifications: _Notifications) -> _Connection:
        ready: asyncio.Future[tuple[ClientSession, list[Tool]]] = asyncio.get_running_loop().create_future()
        end = asyncio.Event()
        task = asyncio.create_task(_serve(transport, ready, notifications, end), name=f"mcp {name}")
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                session, tools = await asyncio.shield(ready)
        except asyncio.CancelledError:
            task.cancel()  # or its program would be left to nobody
            raise
        except Exception as error:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
            why = _first_cause(error)
            raise ToolFailed(f"The MCP server {name} cannot be reached: {type(why).__name__}: {why}") from error
        return cls(session, tools, notifications, end, task)

    async def ask_again(self, name: str) -> None:
        """Ask which tools there are now.

        Raises:
            ToolFailed: the server does not say.
        """
        self.notifications.clear()  # before, or a notification that comes meanwhile would be lost
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                self.tools = await _all_tools(self.session)
        except Exception as error:
            self.notifications.set()
            why = _first_cause(error)
            raise ToolFailed(f"The MCP server {name} did not list its tools: {type(why).__name__}: {why}") from error

    async def is_alive(self) -> bool:
        """Say whether the session still answers; one that has rested for a while is asked."""
        if self._task.done():
            return False
        if self._calls or asyncio.get_running_loop().time() - self._last_used < TRUSTED_SECONDS:
            return True
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                await self.session.send_ping()
        except Exception:  # noqa: BLE001  (whatever it is, the connection is of no use)
            return False
        return True

    async def aclose(self) -> None:
        self._end.set()
        done, _ = await asyncio.wait({self._task}, timeout=CONNECT_LIMIT_SECONDS)
        if not done:
            self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task


async def _serve(
    transport: Callable[[], Any],
    ready: asyncio.Future[tuple[ClientSession, list[Tool]]],
    notifications: _Notifications,
    end: asyncio.Event,
) -> None:
    from mcp import ClientSession

    try:
        async with AsyncExitStack() as stack:
            streams = await stack.enter_async_context(transport())
            opening = ClientSession(streams[0], streams[1], message_handler=notifications.take)
            session = await stack.enter_async_context(opening)
            await session.initialize()
            ready.set_result((session, await _all_tools(session)))
            await end.wait()
    except Exception as error:  # noqa: BLE001  (the edge of the SDK: it becomes the answer to the caller)
        if not ready.done():
            ready.set_exception(error)
        else:
            _log.warning("an MCP connection broke: %s", _first_cause(error))


async def _all_tools(session: ClientSession) -> list[Tool]:
    from mcp.types import PaginatedRequestParams

    found: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_TOOL_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return found


@asynccontextmanager
async def _transport(spec: McpServerSpec, launch: Callable[[McpServerSpec], Launch]) -> AsyncIterator[Any]:
    """Yield the streams of a server, both ways."""
    if spec.command:
        started = launch(spec)
        with started.log.open("w", encoding="utf-8", errors="replace") as log:
            async with started.proxy_for(), program_streams(started.command, started.environment, log) as streams:
                yield streams
    elif spec.type == "sse":
        from mcp.client.sse import sse_client

        from tool_worker.mcp.http_connection import bounded_client

        async with sse_client(
            spec.url, headers=dict(spec.headers), timeout=spec.timeout, httpx_client_factory=bounded_client
        ) as streams:
            yield streams
    else:
        from mcp.client.streamable_http import streamable_http_client

        from tool_worker.mcp.http_connection import bounded_client

        async with (
            bounded_client(spec.headers, timeout=spec.timeout) as client,
            streamable_http_client(spec.url, http_client=client) as streams,
        ):
            yield streams


def _first_cause(error: BaseException) -> BaseException:
    """Return what is inside of groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
