"""Filters an MCP server's messages before the SDK reads them.

Holds: an invalid tool is dropped from its list, and the list is kept. Of many notifications in a second, only the first
are handled. A server that sends too many messages counts as disconnected.
Does not: drop an answer, or the announcement of changed tools.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream
    from mcp.shared.message import SessionMessage

MAX_TOOLS = 1000
"""Limit of one server's tools; further ones are ignored."""
NOTIFICATIONS_PER_SECOND = 200
FLOOD_PER_SECOND = 5000
SHOWN_REASONS = 10
SHOWN_NAME_CHARS = 100

_log = logging.getLogger(__name__)


class IncomingMessages:
    """The stream of a server's messages.

    Args:
        name: Name of the server, for the log.
        version: Returns the negotiated version of the protocol.
        on_change: Called for an announcement of changed tools that is not passed on.
    """

    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        name: str,
        version: Callable[[], str],
        on_change: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._name = name
        self._version = version
        self._on_change = on_change
        self._second = 0.0
        self._count = 0

    @property
    def last_context(self) -> contextvars.Context | None:
        """See `mcp.shared._context_streams`."""
        found: contextvars.Context | None = getattr(self._stream, "last_context", None)
        return found

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message, without invalid tools in a list of tools."""
        while self._is_surplus(item := await self._stream.receive()):
            pass
        return self._filter_message(item)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        while self._is_surplus(item := await self._stream.__anext__()):
            pass
        return self._filter_message(item)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)

    def _is_surplus(self, item: SessionMessage | Exception) -> bool:
        """Count a message, and return whether to skip it.

        Raises:
            anyio.ClosedResourceError: The server sends too many messages.
        """
        import anyio
        from mcp.types import JSONRPCNotification

        now = asyncio.get_running_loop().time()
        if now - self._second >= 1.0:
            self._second = now
            self._count = 0
        self._count += 1
        if self._count > FLOOD_PER_SECOND:
            _log.warning("the MCP server %s sends more than %d messages a second", self._name, FLOOD_PER_SECOND)
            raise anyio.ClosedResourceError
        message = None if isinstance(item, Exception) else item.message
        if self._count <= NOTIFICATIONS_PER_SECOND or not isinstance(message, JSONRPCNotification):
            return False
        if message.method == "notifications/tools/list_changed":
            self._on_change()
        return True

    def _filter_message(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        from mcp.types import JSONRPCResponse

        message = None if isinstance(item, Exception) else item.message
        if isinstance(message, JSONRPCResponse) and isinstance(message.result.get("tools"), list):
            message.result = {**message.result, "tools": self._filter_tools(message.result)}
        return item

    def _filter_tools(self, result: dict[str, Any]) -> list[Any]:
        from mcp.types.methods import validate_server_result
        from pydantic import ValidationError

        listed: list[Any] = result["tools"]
        found, reasons = [], []
        for tool in listed[:MAX_TOOLS]:
            try:
                validate_server_result("tools/list", self._version(), {**result, "tools": [tool]})
            except ValidationError as error:
                first = error.errors(include_input=False, include_url=False)[0]
                name = tool.get("name") if isinstance(tool, dict) else tool
                where = ".".join(map(str, first["loc"][2:]))
                reasons.append(f"{str(name)[:SHOWN_NAME_CHARS]!r} ({where}: {first['msg']})")
                continue
            found.append(tool)
        if len(listed) > MAX_TOOLS:
            _log.warning(
                "the MCP server %s has %d tools; only the first %d are offered", self._name, len(listed), MAX_TOOLS
            )
        for reason in reasons[:SHOWN_REASONS]:
            _log.warning("a tool of the MCP server %s cannot be offered and is left out: %s", self._name, reason)
        if len(reasons) > SHOWN_REASONS:
            _log.warning("%d further tools of %s are left out", len(reasons) - SHOWN_REASONS, self._name)
        return found
