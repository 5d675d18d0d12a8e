"""A workspace as a tool uses it: its requests reconnect if the connection or the host was lost.

Holds: a repeated request does not run its action again unless it may be repeated; the host's journal prevents it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tool_worker.errors import HostLost
from tool_worker.workspace.launch.host_connection import ActionStatus, HostConnection, HostResult

OPEN_ATTEMPTS = 3


class OpenWorkspace:
    """An opened workspace.

    Args:
        reopen: Opens the workspace again and returns the new connection.

    Attributes:
        is_confined: Whether a sandbox isolates its programs from the machine.
    """

    def __init__(
        self,
        conversation_id: str,
        connection: HostConnection,
        reopen: Callable[[], Awaitable[HostConnection]],
        *,
        is_confined: bool,
    ) -> None:
        self.conversation_id = conversation_id
        self.connection = connection
        self.is_confined = is_confined
        self._reopen = reopen

    async def run(
        self,
        action_id: int,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        may_repeat: bool = False,
        fingerprint: str = "",
    ) -> HostResult:
        """Run an action; see `HostConnection.run`.

        Idempotent: an action id runs once in the lifetime of the workspace, unless `may_repeat`. If the host dies
        during the action, a new host is started and reports the outcome as unknown.
        """
        for _ in range(OPEN_ATTEMPTS - 1):
            try:
                return await self.connection.run(
                    action_id, tool, arguments, may_repeat=may_repeat, fingerprint=fingerprint
                )
            except HostLost:
                self.connection = await self._reopen()
        return await self.connection.run(action_id, tool, arguments, may_repeat=may_repeat, fingerprint=fingerprint)

    async def status(self, action_id: int, *, fingerprint: str = "") -> ActionStatus:
        """Return the host's record of an action; see `HostConnection.status`."""
        return await self.connection.status(action_id, fingerprint=fingerprint)

    async def find_newest(self) -> tuple[int, str] | None:
        """Return the highest action id that ever started here, with its fingerprint; None if none did."""
        return (await self.connection.ping()).newest

    async def interrupt(self, action_id: int | None) -> bool:
        """Stop an action; see `HostConnection.interrupt`."""
        return await self.connection.interrupt(action_id)
