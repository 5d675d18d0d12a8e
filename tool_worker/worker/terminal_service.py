"""Terminals for operators: a shell in a workspace of this node, linked to the server that asked for it.

Holds: a request starts at most one shell. The shell has the workspace's sandbox, network and limits, and none of the
conversation's secrets. It ends when the server closes it or falls silent, when the workspace's host ends, and with this
worker.
Does not: open a terminal in a workspace without a sandbox, where it would be a shell on the node itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from broker.coordination import MOST_BYTES, TerminalLink, TerminalLost, Terminals, parse_size, was_answered
from broker.runtime import CorruptEntry, DeckhandsError, StoreRefused, make_extra
from tool_worker.errors import HostLost, HostRefused, WorkspaceLost, WorkspaceRefused
from tool_worker.workspace import HostConnection, HostFolder, Workspaces

TERMINALS_LIMIT = 32
"""How many terminals this worker serves at a time."""

_FULL_SECONDS = 0.1
"""How long input waits before it is offered again to a program that reads none."""
_FAREWELL_SECONDS = 2.0

_log = logging.getLogger(__name__)


class TerminalService:
    """The terminals of one tool worker.

    Args:
        root: Directory of the node's workspaces.
        limit: How many it serves at a time.
    """

    def __init__(
        self, terminals: Terminals, root: Path, workspaces: Workspaces, *, limit: int = TERMINALS_LIMIT
    ) -> None:
        self._limit = limit
        self._terminals = terminals
        self._root = root.absolute()
        self._workspaces = workspaces
        self._serving: set[asyncio.Task[None]] = set()

    def start(self, conversation_id: str, token: str) -> None:
        """Serve a request in a separate task, so that it takes no concurrency slot. Idempotent."""
        task = asyncio.create_task(self._serve(conversation_id, token), name=f"terminal {conversation_id}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def aclose(self) -> None:
        """End all terminals."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, conversation_id: str, token: str) -> None:
        try:
            accepted = await self._terminals.accept(conversation_id, token)
            if accepted is None:
                return
            asked, link = accepted
            try:
                await self._open(conversation_id, asked.columns, asked.rows, link)
            except asyncio.CancelledError:
                with contextlib.suppress(DeckhandsError, TimeoutError):
                    async with asyncio.timeout(_FAREWELL_SECONDS):
                        await link.send("failed", b"The tool worker has stopped, and with it the shell.")
                raise
            finally:
                await link.aclose()
        except StoreRefused as error:
            if not was_answered(error):
                _log.warning("a terminal failed: %s", error, extra=make_extra(conversation_id))
        except (DeckhandsError, OSError) as error:  # the server sees that nothing more comes
            _log.warning("a terminal ended: %s", error, extra=make_extra(conversation_id))

    async def _open(self, conversation_id: str, columns: int, rows: int, link: TerminalLink) -> None:
        try:
            connection = await self._connect(conversation_id)
            number = await connection.open_terminal(columns, rows)
        except (DeckhandsError, OSError) as error:
            text = f"{error.message} {error.remedy}" if isinstance(error, DeckhandsError) else str(error)
            await link.send("failed", text.strip().encode()[:MOST_BYTES])
            return
        try:
            await link.send("opened")
            await _relay(connection, number, link)
        except (HostLost, HostRefused) as error:
            await link.send("failed", f"The workspace's processes have ended. {error}".encode()[:MOST_BYTES])
        finally:
            with contextlib.suppress(HostLost, HostRefused):  # it has ended already
                await connection.close_terminal(number)

    async def _connect(self, conversation_id: str) -> HostConnection:
        """Return a connection to the workspace's host.

        Raises:
            WorkspaceLost: The workspace is not on this node.
            WorkspaceRefused: No sandbox confines it, or too many terminals are open.
        """
        if len(self._serving) > self._limit:
            raise WorkspaceRefused(f"This tool worker serves {self._limit} terminals already. Close one.")
        folder = HostFolder(self._root, conversation_id)
        if not folder.exists or folder.read_binding() is None:
            raise WorkspaceLost("The workspace is not on this node yet.", remedy="Try again after the next action.")
        opened = await self._workspaces.open(conversation_id)
        if not opened.is_confined:
            raise WorkspaceRefused(
                "No sandbox confines this workspace, so a terminal would be a shell on the node itself.",
                remedy="Run single commands with `POST /conversations/ID/execute`, or give the tool workers a sandbox.",
            )
        return opened.connection


async def _relay(connection: HostConnection, number: int, link: TerminalLink) -> None:
    """Pass input and output on until one side ends."""
    tasks = [
        asyncio.create_task(_pass_output(connection, number, link)),
        asyncio.create_task(_pass_input(connection, number, link)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_output(connection: HostConnection, number: int, link: TerminalLink) -> None:
    while True:
        output = await connection.read_terminal(number)
        for start in range(0, len(output.content), MOST_BYTES):
            await link.send("output", output.content[start : start + MOST_BYTES])
        if output.exit_code is not None:
            await link.send("ended", str(output.exit_code).encode())
            return


async def _pass_input(connection: HostConnection, number: int, link: TerminalLink) -> None:
    try:
        while True:
            message = await link.receive()
            if message.kind == "keys":
                await _write_keys(connection, number, message.content, link)
            elif message.kind == "size" and (size := parse_size(message.content)) is not None:
                await connection.resize_terminal(number, *size)
            elif message.kind == "close":
                return
    except (TerminalLost, CorruptEntry) as error:
        _log.info("a terminal ended: %s", error)


async def _write_keys(connection: HostConnection, number: int, keys: bytes, link: TerminalLink) -> None:
    """Write input, once the program has read enough of the earlier input; nothing if the terminal ends before."""
    while not link.is_over:
        try:
            await connection.write_terminal(number, keys)
        except HostRefused as error:
            if error.code != "terminal_full":
                raise
            await asyncio.sleep(_FULL_SECONDS)
        else:
            return
