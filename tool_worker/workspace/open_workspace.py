"""A workspace as a tool uses it: its requests find the host again if the connection or the host was lost.

Holds: an action that is asked for again does not run again unless it may be repeated; the host's journal knows of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tool_worker.errors import HostLost
from tool_worker.workspace.launch.host_connection import ActionStatus, HostConnection, HostResult

OPEN_ATTEMPTS = 3


class OpenWorkspace:
    """A workspace that was opened.

    Args:
        reopen: Opens it again and returns the new connection.

    Attributes:
        is_confined: whether a sandbox keeps its programs from the machine.
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

        Idempotent: an action id is run once in the life of the workspace, `may_repeat` apart. If the host dies while
        it runs, a new one is started and says that the outcome is unknown.
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
        """Ask what is known of an action; see `HostConnection.status`."""
        return await self.connection.status(action_id, fingerprint=fingerprint)

    async def newest(self) -> tuple[int, str] | None:
        """Ask for the highest number under which an action was ever begun, and its fingerprint; None: none was."""
        return (await self.connection.ping()).newest

    async def interrupt(self, action_id: int | None) -> bool:
        """Stop an action; see `HostConnection.interrupt`."""
        return await self.connection.interrupt(action_id)
