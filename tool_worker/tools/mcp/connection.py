"""One connection to an MCP server, from the handshake to its end.

The SDK's client asks the server for the newest revision of the protocol that both speak (`server/discover`), and falls
back to the handshake of the older ones. From revision 2026-07-28 on, a server has no sessions: every request names the
version and our capabilities, and changes are announced only to clients that listen for them.

Holds: each session has a separate task, because the SDK requires that one task both starts and ends a session. The
connection knows whether its list of tools may be outdated, even if the server cannot announce changes.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.contract import MAX_DESCRIPTION_CHARS
from broker.tools import (
    LoginNeeded,
    McpServerSpec,
    McpTokens,
    ToolFailed,
    is_allowed,
    make_auth,
    make_login_needed,
    require_login,
)
from tool_worker.tools.mcp.incoming import MAX_TOOLS, SHOWN_NAME_CHARS, IncomingMessages
from tool_worker.tools.mcp.program import open_program_streams

if TYPE_CHECKING:
    from mcp import Client, ClientSession
    from mcp.client.session import ClientRequestContext, IncomingMessage
    from mcp.types import ElicitRequestParams, ErrorData, Tool

    from tool_worker.tools.mcp.http_connection import AnnouncementListener

CONNECT_LIMIT_SECONDS = 30.0
TRUSTED_SECONDS = 1.0
"""For this long after a call, its connection counts as alive; for this long, a list of tools counts as current."""
MAX_TOOL_PAGES = 20
MAX_TOOL_CHARS = 2**16
"""Limit of one tool's JSON; a longer tool could not be offered, see `ToolOffer`."""
MAX_LIST_CHARS = 2**22
"""Limit of all tools of a server together; further tools are ignored."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Between two attempts to listen for announcements."""
SHOWN_CHARS = 500
"""Limit of a server's error text in our messages."""

_NOT_OFFERED = ("title", "execution", "output_schema", "icons", "meta")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgramLaunch:
    """How to start a server's program: the command line, its environment, and its log file.

    Attributes:
        proxy_for: Context that is active while the program runs.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    proxy_for: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


class Announcements:
    """Whether a server has announced a change of its tools.

    Args:
        changed: Set with every announcement.
    """

    def __init__(self, changed: asyncio.Event) -> None:
        self.changed = changed
        self.listening: AnnouncementListener | None = None
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether a change was announced, or an announcement may have been missed."""
        return self._is_set

    def set(self) -> None:
        """Record an announcement, or that one may have been missed."""
        self._is_set = True
        self.changed.set()

    def clear(self) -> None:
        """Clear the record, just before the tools are listed."""
        self._is_set = False

    def is_listening(self) -> bool:
        """Return whether announcements reach us."""
        return self.listening is None or self.listening.is_open

    async def handle_message(self, message: IncomingMessage) -> None:
        """Handle a notification of the server."""
        from mcp.types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self.set()


class McpConnection:
    """A session with a server.

    Attributes:
        tools: The last list of its tools.
    """

    def __init__(
        self, opened: _StartedSession, announcements: Announcements, end: asyncio.Event, task: asyncio.Task[None]
    ) -> None:
        self.session = opened.session
        self.tools = opened.tools
        self._announcements = announcements
        self._announces = opened.announces
        self._end = end
        self._task = task
        self._calls = 0
        now = asyncio.get_running_loop().time()
        self._last_used = self._listed = now

    @classmethod
    async def connect(
        cls,
        spec: McpServerSpec,
        launch: Callable[[McpServerSpec], ProgramLaunch],
        announcements: Announcements,
        *,
        tokens: McpTokens | None = None,
        limit_seconds: float = CONNECT_LIMIT_SECONDS,
    ) -> McpConnection:
        """Connect to a server and list its tools.

        Args:
            tokens: The logins; needed for a server with `oauth`.

        Raises:
            LoginNeeded: A user has to log in first.
            ToolFailed: The server cannot be reached, or does not answer in time.
        """
        ready: asyncio.Future[_StartedSession] = asyncio.get_running_loop().create_future()
        end = asyncio.Event()
        task = asyncio.create_task(
            _serve(spec, launch, ready, announcements, end, tokens=tokens), name=f"mcp {spec.name}"
        )
        try:
            async with asyncio.timeout(limit_seconds):
                opened = await asyncio.shield(ready)
        except asyncio.CancelledError:
            task.cancel()  # otherwise its program would never be ended
            raise
        except Exception as error:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
            if _is_login_needed(error):
                raise make_login_needed(spec) from error
            why = (
                f"it has not answered for {limit_seconds:g} seconds"
                if isinstance(error, TimeoutError)
                else _describe_error(error)
            )
            raise ToolFailed(f"The MCP server {spec.name} cannot be reached: {why}") from error
        return cls(opened, announcements, end, task)

    @contextmanager
    def mark_in_use(self) -> Iterator[None]:
        """Mark the connection as busy for the duration of a call; a busy server is not pinged."""
        self._calls += 1
        self._last_used = -math.inf  # after a failed call, the connection is not trusted
        try:
            yield
            self._last_used = asyncio.get_running_loop().time()
        finally:
            self._calls -= 1

    def needs_polling(self) -> bool:
        """Return whether the server cannot announce changes of its tools now."""
        return not (self._announces and self._announcements.is_listening())

    async def list_if_changed(self, name: str) -> None:
        """List the tools again if they may have changed.

        Raises:
            ToolFailed: The server does not list them.
        """
        is_old = asyncio.get_running_loop().time() - self._listed >= TRUSTED_SECONDS
        if not self._announcements.is_set() and not (is_old and self.needs_polling()):
            return
        self._announcements.clear()  # first, or an announcement during the listing would be lost
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                found = await _list_all_tools(self.session, name)
        except Exception as error:
            self._announcements.set()
            raise ToolFailed(f"The MCP server {name} did not list its tools: {_describe_error(error)}") from error
        self._listed = asyncio.get_running_loop().time()
        if found != self.tools:
            self.tools = found
            self._announcements.changed.set()

    async def is_alive(self) -> bool:
        """Return whether the session still answers; pings it if it was not used recently."""
        if self._task.done():
            return False
        if self._calls or asyncio.get_running_loop().time() - self._last_used < TRUSTED_SECONDS:
            return True
        version = self.session.protocol_version or ""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                # The revisions without sessions have no ping.
                await (self.session.send_discover(version) if self.is_stateless else self.session.send_ping())
        except Exception:  # noqa: BLE001  (after any error, the connection is unusable)
            return False
        return True

    @property
    def is_stateless(self) -> bool:
        """Whether the server speaks a revision without sessions, 2026-07-28 or later."""
        return self.session.discover_result is not None

    async def aclose(self) -> None:
        """End the session, and the program if there is one."""
        self._end.set()
        done, _ = await asyncio.wait({self._task}, timeout=CONNECT_LIMIT_SECONDS)
        if not done:
            self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task


@dataclass(frozen=True, slots=True)
class _StartedSession:
    """A started session; `announces` is whether the server announces changes of its tools."""

    session: ClientSession
    tools: list[Tool]
    announces: bool


async def _serve(
    spec: McpServerSpec,
    launch: Callable[[McpServerSpec], ProgramLaunch],
    ready: asyncio.Future[_StartedSession],
    announcements: Announcements,
    end: asyncio.Event,
    *,
    tokens: McpTokens | None,
) -> None:
    from mcp import Client

    from tool_worker.tools.mcp.tasks import TasksExtension

    client: Client | None = None

    def version() -> str:
        return client.protocol_version if client is not None else "2025-11-25"

    @asynccontextmanager
    async def open_filtered() -> AsyncIterator[Any]:
        async with _open_transport(spec, launch, announcements, tokens) as (reading, writing):
            yield IncomingMessages(reading, spec.name, version, announcements.set), writing

    try:
        async with AsyncExitStack() as stack:
            opening = Client(
                open_filtered(),
                mode=spec.protocol,
                cache=None,  # a list of tools is current or not by our own rules
                message_handler=announcements.handle_message,
                extensions=[TasksExtension()],
            )
            client = await stack.enter_async_context(opening)
            session = client.session
            if session.discover_result is not None:
                # Declared only where the answers may come later, with a repeated request.
                session._elicitation_callback = _refuse_question  # noqa: SLF001  (the SDK takes it only before it knows)
                session.adopt(session.discover_result)
            capability = client.server_capabilities.tools
            announces = capability is not None and bool(capability.list_changed)
            tools = await _list_all_tools(session, spec.name)
            if announces and session.discover_result is not None:
                listening = asyncio.create_task(_listen(client, announcements), name=f"listen to {spec.name}")
                stack.callback(listening.cancel)
            ready.set_result(_StartedSession(session, tools, announces))
            await end.wait()
    except Exception as error:  # noqa: BLE001  (the edge of the SDK: the caller gets the error)
        if not ready.done():
            ready.set_exception(error)
        else:
            _log.warning("the connection to the MCP server %s broke: %s", spec.name, _describe_error(error))


async def _refuse_question(context: ClientRequestContext, params: ElicitRequestParams) -> ErrorData:  # noqa: ARG001
    from mcp.types import INVALID_REQUEST, ErrorData

    return ErrorData(code=INVALID_REQUEST, message="Ask in the answer to a request.")


async def _listen(client: Client, announcements: Announcements) -> None:
    """Listen for changed tools by a separate subscription, which the revisions without sessions require."""
    from mcp import MCPError
    from mcp.client.subscriptions import SubscriptionLost

    from tool_worker.tools.mcp.http_connection import AnnouncementListener

    announcements.listening = listener = AnnouncementListener(announcements.set)
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            async with client.listen(tools_list_changed=True) as subscription:
                if not subscription.honored.tools_list_changed:
                    return  # the server is asked instead
                listener.mark_open()
                pause = FIRST_PAUSE_SECONDS
                async for _ in subscription:
                    announcements.set()
        except (MCPError, SubscriptionLost, TimeoutError) as error:
            _log.info("a subscription to an MCP server has ended: %s", _describe_error(error))
        finally:
            listener.mark_closed()
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _list_all_tools(session: ClientSession, name: str) -> list[Tool]:
    from mcp.types import PaginatedRequestParams

    found: list[Tool] = []
    chars = 0
    cursor: str | None = None
    for _ in range(MAX_TOOL_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        for number, tool in enumerate(map(_trim, page.tools)):
            size = len(tool.model_dump_json())
            if size > MAX_TOOL_CHARS:
                _log.warning("the tool %r of %s is too long and is left out", tool.name[:SHOWN_NAME_CHARS], name)
                continue
            chars += size
            if len(found) == MAX_TOOLS or chars > MAX_LIST_CHARS:
                text = "the MCP server %s has too many tools: %d further tools of a page are left out"
                _log.warning(text, name, len(page.tools) - number)
                return found
            found.append(tool)
        cursor = page.next_cursor
        if not cursor:
            break
    return found


def _trim(tool: Tool) -> Tool:
    """Return a tool without the fields that an offer does not use."""
    description = (tool.description or "")[: 2 * MAX_DESCRIPTION_CHARS]  # cleaned and cut later
    return tool.model_copy(update=dict.fromkeys(_NOT_OFFERED) | {"description": description})


@asynccontextmanager
async def _open_transport(
    spec: McpServerSpec,
    launch: Callable[[McpServerSpec], ProgramLaunch],
    announcements: Announcements,
    tokens: McpTokens | None,
) -> AsyncIterator[Any]:
    """Yield the two message streams of a server."""
    if spec.command:
        started = launch(spec)
        with started.log.open("w", encoding="utf-8", errors="replace") as log:
            async with started.proxy_for(), open_program_streams(started.command, started.environment, log) as streams:
                yield streams
    elif spec.type == "sse":
        from mcp.client.sse import sse_client

        from tool_worker.tools.mcp.http_connection import SILENCE_SECONDS, make_limited_client

        async with sse_client(
            spec.url,
            headers=dict(spec.headers),
            timeout=spec.timeout,
            sse_read_timeout=max(SILENCE_SECONDS, spec.timeout),
            httpx_client_factory=make_limited_client,
        ) as streams:
            yield streams
    else:
        from mcp.client.streamable_http import streamable_http_client

        from tool_worker.tools.mcp.http_connection import AnnouncementListener, StreamableClient

        announcements.listening = AnnouncementListener(announcements.set)
        await require_login(spec, tokens)
        auth = make_auth(spec, tokens) if spec.oauth is not None and tokens is not None else None
        may_ask = partial(is_allowed, spec)
        async with (
            StreamableClient(spec.headers, spec.timeout, announcements.listening, auth, may_ask) as client,
            # The client limits the size, as of every answer.
            streamable_http_client(spec.url, http_client=client, max_sse_event_size=None) as streams,
        ):
            yield streams


def _is_login_needed(error: BaseException) -> bool:
    from tool_worker.tools.mcp.http_connection import LOGIN_NEEDED

    error = _unwrap(error)
    return isinstance(error, LoginNeeded) or getattr(error, "data", None) == LOGIN_NEEDED


def _unwrap(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe_error(error: BaseException) -> str:
    """Return the text of an error; unwraps exception groups."""
    error = _unwrap(error)
    return f"{type(error).__name__}: {error}"[:SHOWN_CHARS]
