"""A tool worker's connection to a workspace host.

Holds: requests of many actions share one connection; when it breaks, each of them raises `HostLost`.
Does not: start hosts or retry, see `workspaces`. The host is not trusted: its answers are validated, and a host that
breaks the protocol is treated as lost.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tool_worker.errors import HostLost, HostRefused, WorkspaceUnavailable
from tool_worker.host import protocol
from tool_worker.host.protocol import FINGERPRINT_LIMIT_CHARS
from tool_worker.workspace.launch.shell_state import ShellState

ANSWER_LIMIT_SECONDS = 30.0
"""Time limit for requests that a host answers immediately."""
TERMINAL_BYTES = 64 * 2**10
"""The longest output of a terminal that is taken from a host at once."""


@dataclass(frozen=True, slots=True)
class HostResult:
    """The outcome of an action.

    Attributes:
        value: The tool's result, see `protocol`; empty if the outcome is unknown.
        is_unknown: An earlier host started the action and died before it recorded the outcome.
        is_replayed: The result was already recorded; nothing ran.
        is_other: Another action was started under this number; nothing ran.
    """

    action_id: int
    value: Mapping[str, Any]
    is_unknown: bool = False
    is_replayed: bool = False
    is_other: bool = False


@dataclass(frozen=True, slots=True)
class ActionStatus:
    """A host's record of an action.

    Attributes:
        state: `recorded`, `running`, `unknown`, `never_started` or `other`.
        result: Result of a recorded action.
        is_certain: False if the machine was rebooted since, so that a `never_started` action may have started before.
    """

    state: str
    result: HostResult | None = None
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class HostReport:
    """The condition of a host.

    Attributes:
        workspace: Path of the workspace, as its programs see it.
        running: Actions that are running or queued.
        newest: The highest action id that ever started, with its fingerprint; None if none did.
        is_shell_busy: Whether a command runs in the shell, answered or not.
        has_egress: Whether a proxy is attached to it.
    """

    workspace: str
    running: tuple[int, ...]
    is_shell_busy: bool
    has_egress: bool
    newest: tuple[int, str] | None


@dataclass(frozen=True, slots=True)
class TerminalOutput:
    """Output of an operator's terminal.

    Attributes:
        exit_code: Exit code of its shell; None while it runs.
    """

    content: bytes
    exit_code: int | None


class HostConnection:
    """An open connection; created by `attach`.

    Attributes:
        checked_at, gap_id: Result of comparing its journal with the log, see `steps.journal`.
    """

    def __init__(self, conversation_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.conversation_id = conversation_id
        self.checked_at = self.gap_id = 0
        self.last_used = asyncio.get_running_loop().time()
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._receiver = asyncio.create_task(self._receive(), name=f"host {conversation_id}")

    @classmethod
    async def attach(cls, conversation_id: str, connected: socket.socket) -> HostConnection:
        """Use a connected socket, and check that a host of this version answers.

        Raises:
            HostLost, WorkspaceUnavailable: See `ping`.
        """
        reader, writer = await asyncio.open_unix_connection(sock=connected, limit=protocol.FRAME_LIMIT_BYTES)
        connection = cls(conversation_id, reader, writer)
        try:
            await connection.ping()
        except BaseException:
            await connection.detach()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return not self._receiver.done()

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending."""
        return not self._waiting

    async def run(
        self,
        action_id: int,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        may_repeat: bool = False,
        fingerprint: str = "",
    ) -> HostResult:
        """Run an action, attach to it if it is already running, or get its recorded result.

        Idempotent: an action id runs once in the lifetime of the workspace.

        Args:
            may_repeat: Whether to run it again if its outcome is unknown.
            fingerprint: Tells it apart from another action with its number, see `compute_fingerprint`.

        Raises:
            HostRefused: The host did not start the action.
            HostLost: The connection broke, or the host stopped answering; the next host's journal shows whether the
                action started.
        """
        request = {"op": "run", "action_id": action_id, "tool": tool, "arguments": dict(arguments)}
        request |= {"may_repeat": may_repeat, "fingerprint": fingerprint}
        reply = await self._ask(request, limit_seconds=None)
        if reply.get("state") == protocol.OTHER:
            return HostResult(action_id, {}, is_other=True)
        if reply.get("state") == protocol.UNKNOWN:
            return HostResult(action_id, {}, is_unknown=True)
        return _parse_result(action_id, reply)

    async def status(self, action_id: int, *, fingerprint: str = "") -> ActionStatus:
        """Return the host's record of an action.

        Raises:
            HostLost: See `run`.
        """
        reply = await self._ask({"op": "status", "action_id": action_id, "fingerprint": fingerprint})
        state = reply.get("state")
        if state == protocol.RECORDED:
            return ActionStatus(state, _parse_result(action_id, reply))
        if state not in (protocol.RUNNING, protocol.UNKNOWN, protocol.NEVER_STARTED, protocol.OTHER):
            raise HostLost(f"The host answered with the state {state!r}.")
        return ActionStatus(state, is_certain=reply.get("is_certain") is True)

    async def interrupt(self, action_id: int | None) -> bool:
        """Stop an action within a second; without an id, the shell's current command. Return whether anything ran.

        Callers that wait for the action get its result as usual.

        Raises:
            HostLost: See `run`.
        """
        return (await self._ask({"op": "interrupt", "action_id": action_id})).get("was_running") is True

    async def retire(self, *, may_kill: bool) -> bool:
        """End the host if it is idle; return whether it is ending.

        Args:
            may_kill: Whether a host with background jobs counts as idle; a host with an action in progress never does.

        Raises:
            HostLost: See `run`.
        """
        return (await self._ask({"op": "retire", "may_kill": may_kill})).get("closing") is True

    async def ping(self) -> HostReport:
        """Check that the host answers, and return its condition.

        Raises:
            HostLost: The host does not answer.
            WorkspaceUnavailable: The host has another version of the protocol.
        """
        reply = await self._ask({"op": "ping"})
        version = reply.get("protocol")
        running = reply.get("running")
        if version != protocol.PROTOCOL_VERSION or not isinstance(running, list):
            raise WorkspaceUnavailable(
                f"The host of {self.conversation_id} speaks version {version!r} of the protocol.",
                remedy="Close the workspace: another host will be started.",
            )
        is_busy, has_egress = (reply.get(name) is True for name in ("is_shell_busy", "has_egress"))
        newest = _parse_newest(reply.get("newest"))
        return HostReport(str(reply.get("workspace")), tuple(running), is_busy, has_egress, newest)

    async def capture_shell(self) -> ShellState | None:
        """Return the state of the shell; None while an action is in progress, and from hosts of earlier versions.

        Raises:
            HostLost: See `run`.
        """
        with suppress(HostRefused):
            return ShellState.parse((await self._ask({"op": "capture"})).get("shell"))
        return None

    async def open_terminal(self, columns: int, rows: int) -> int:
        """Start a shell for an operator, and return the number of its terminal. It ends with this connection.

        Raises:
            HostRefused: The workspace has too many terminals, or its host is of an older version.
            HostLost: See `run`.
        """
        reply = await self._ask_terminal("open", columns=columns, rows=rows)
        number = reply.get("terminal")
        if not isinstance(number, int):
            raise HostLost("The host answered without the number of a terminal.")
        return number

    async def read_terminal(self, number: int) -> TerminalOutput:
        """Wait for output of a terminal, and return it.

        Raises:
            HostRefused: There is no such terminal.
            HostLost: See `run`.
        """
        reply = await self._ask({"op": "terminal", "what": "read", "terminal": number}, limit_seconds=None)
        exit_code = reply.get("exit_code")
        try:
            content = base64.b64decode(str(reply.get("output")), validate=True)
        except (ValueError, binascii.Error) as error:
            raise HostLost("The host answered with output that is not in base64.") from error
        return TerminalOutput(content[:TERMINAL_BYTES], exit_code if isinstance(exit_code, int) else None)

    async def write_terminal(self, number: int, keys: bytes) -> None:
        """Send input to the program of a terminal.

        Raises:
            HostRefused: The program does not read its input, or there is no such terminal.
            HostLost: See `run`.
        """
        await self._ask_terminal("write", terminal=number, input=base64.b64encode(keys).decode())

    async def resize_terminal(self, number: int, columns: int, rows: int) -> None:
        """Set the size of a terminal. Raises as `write_terminal` does."""
        await self._ask_terminal("resize", terminal=number, columns=columns, rows=rows)

    async def close_terminal(self, number: int) -> None:
        """End the shell of a terminal. Raises as `write_terminal` does."""
        await self._ask_terminal("close", terminal=number)

    async def _ask_terminal(self, what: str, **fields: int | str) -> dict[str, Any]:
        return await self._ask({"op": "terminal", "what": what, **fields})

    async def detach(self) -> None:
        """Close the connection; actions continue in the host. Idempotent."""
        self._receiver.cancel()
        with suppress(asyncio.CancelledError):
            await self._receiver
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _ask(
        self, message: dict[str, Any], *, limit_seconds: float | None = ANSWER_LIMIT_SECONDS
    ) -> dict[str, Any]:
        """Send a request and return its reply; without a limit, wait as long as the host answers pings."""
        loop = asyncio.get_running_loop()
        self.last_used = loop.time()
        if not self.is_open:
            raise HostLost(f"The connection to the host of {self.conversation_id} is closed.")
        number = next(self._numbers)
        line = protocol.encode({"request": number, **message})
        if len(line) > protocol.FRAME_LIMIT_BYTES:
            raise HostRefused("too_large", f"A request may have {protocol.FRAME_LIMIT_BYTES} bytes.", retryable=False)
        reply = self._waiting[number] = loop.create_future()
        try:
            self._writer.write(line)
            while not (await asyncio.wait({reply}, timeout=limit_seconds or ANSWER_LIMIT_SECONDS))[0]:
                if limit_seconds is not None:
                    raise HostLost(f"The host of {self.conversation_id} did not answer for {limit_seconds:g} seconds.")
                await self.ping()
        finally:
            del self._waiting[number]
            reply.cancel()
            self.last_used = loop.time()
        answer: dict[str, Any] = reply.result()
        error = answer.get("error")
        if isinstance(error, dict):
            raise HostRefused(str(error.get("code")), str(error.get("message")), retryable=bool(error.get("retryable")))
        return answer

    async def _receive(self) -> None:
        reason = "The host ended"
        try:
            while line := await self._reader.readline():
                reply = protocol.decode(line)
                number = reply.get("request")
                waiting = self._waiting.get(number) if isinstance(number, int) else None
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (OSError, ValueError, protocol.ProtocolError) as error:
            reason = f"The connection to the host broke ({error})"
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(HostLost(f"{reason} while {self.conversation_id} was waiting for it."))


def _parse_newest(found: object) -> tuple[int, str] | None:
    match found:
        case [int(action_id), str(fingerprint)] if action_id > 0:
            return action_id, fingerprint[:FINGERPRINT_LIMIT_CHARS]
    return None


def _parse_result(action_id: int, reply: dict[str, Any]) -> HostResult:
    value = reply.get("result")
    if not isinstance(value, dict):
        raise HostLost("The host answered without a result.")
    return HostResult(action_id, value, is_replayed=reply.get("is_replayed") is True)
