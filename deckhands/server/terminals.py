"""Terminals for operators: a shell in a conversation's workspace, over a WebSocket.

Holds: only a server that was started with `--terminals` opens any, for keys with the scopes `read`, `write` and
`operate`. The record of operations has who opened one, when, why and how it ended, all input, and the end of each piece
of output; input that would not fit is refused. A terminal ends within `CHECK_SECONDS` when its key is revoked, when the
socket closes, when no key was pressed for half an hour, and when the tool worker is gone.
Does not: hide secrets in what the terminal shows, or in what is recorded. The shell gets none of the conversation's
secrets, but runs as the same user as the agent's commands, and can read those of a running command in `/proc`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, WebSocket
from pydantic import BaseModel, Field
from starlette.websockets import WebSocketDisconnect

from broker.coordination import MOST_BYTES, TerminalLink, TerminalLost, Terminals
from broker.runtime import DeckhandsError, OutcomeUnknown, StoreUnavailable
from deckhands.server.auth.api_keys import Scope
from deckhands.server.conversations import OperableId, ReadableId
from deckhands.server.dependencies import MAX_REASON, GatewayOf, Operator, Reader
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.live import CLOSE_CODES, PROTOCOL, finishes_in_time
from deckhands.server.problems import Problem
from deckhands.server.streams import reserve_stream

routes = APIRouter(prefix="/conversations/{conversation_id}/terminal", tags=["terminals"])

SCOPES = (Scope.READ, Scope.WRITE, Scope.OPERATE)
CHECK_SECONDS = 2.0
"""How often the key of an open terminal is checked."""
RECORD_SECONDS = 2.0
"""Input and output are recorded at the latest after this time."""
RECORDED_INPUT_BYTES = 256 * 2**10
"""How much input of a terminal is recorded; the terminal ends before more is sent."""
ENTRY_BYTES = 256
"""How much each entry of input counts beside its content, for its author, target and time."""
RECORDED_OUTPUT_CHARS = 2_000
"""Of the output of each `RECORD_SECONDS`, the record has so many last characters."""
WRITE_SECONDS = 10.0
TEXT_CHARS = 4_096
MOST_CELLS = 1_000
_RECORDED_AT_ONCE = re.compile(rb"[\r\n\x0f]")
"""Keys with which readline runs a line: Enter, Ctrl-J and Ctrl-O."""
_REPORTS = re.compile(
    rb"(\x1b\[(\?|>|=)?[\d;]*(R|c|n|t|\$y)|\x1b\[[IO]|\x1bP[^\x1b]*\x1b\\|\x1b\][^\x07\x1b]*(\x07|\x1b\\))+"
)
"""Answers that xterm gives by itself: positions, attributes, states, focus, colours."""
_EXIT_CODE = re.compile(rb"-?\d{1,4}")
_Cells = Annotated[int, Query(ge=1, le=MOST_CELLS)]


class TerminalOffer(BaseModel):
    """Whether a terminal may be opened with this key, and why not."""

    is_offered: bool = Field(examples=[False])
    why: str = Field(examples=["The server was started without --terminals."])


class TerminalQuery:
    """The query of a terminal."""

    def __init__(
        self,
        reason: Annotated[str, Query(min_length=1, max_length=MAX_REASON, description="the reason, for the record")],
        columns: _Cells = 80,
        rows: _Cells = 24,
        ticket: Annotated[str, Query(max_length=100)] = "",  # noqa: ARG002  (the guard takes it)
    ) -> None:
        self.reason = reason
        self.columns = columns
        self.rows = rows


@routes.get("", summary="Ask whether a terminal may be opened")
async def offer(gateway: GatewayOf, principal: Reader, _conversation_id: ReadableId) -> TerminalOffer:
    """Say whether this server opens terminals for this key."""
    why = _refusal_of(gateway, principal)
    return TerminalOffer(is_offered=not why, why=why)


def _refusal_of(gateway: Gateway, principal: Principal) -> str:
    if not gateway.options.terminals:
        return "The server was started without --terminals."
    missing = [scope.value for scope in SCOPES if scope not in principal.key.scopes]
    return f"The key lacks the scope {missing[0]}." if missing else ""


@routes.websocket("")
async def terminal(
    socket: WebSocket,
    gateway: GatewayOf,
    principal: Operator,
    conversation_id: OperableId,
    asked: Annotated[TerminalQuery, Depends()],
) -> None:
    """Open a terminal. Binary messages are keys and output; a text `{"columns", "rows"}` is a new size.

    The server's texts are `{"type": "opened"}`, `{"type": "ended", "exit_code"}` and `{"type": "problem", "content"}`.
    """
    await socket.accept(subprotocol=PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", ()) else None)
    try:
        if why := _refusal_of(gateway, principal):
            raise Problem(403, "terminals_off", why, remedy="Ask the operator of the server.")
        reserve_stream(gateway, principal)
        await gateway.record(principal, "terminal", conversation_id, asked.reason)
    except DeckhandsError as error:
        await _close(socket, error)
        return
    record = TerminalRecord(gateway, principal, conversation_id)
    try:
        link = await Terminals(gateway.store).request(conversation_id, columns=asked.columns, rows=asked.rows)
    except BaseException as error:
        await record.end(f"not opened, {error.code if isinstance(error, DeckhandsError) else 'server_stopping'}")
        if not isinstance(error, DeckhandsError):
            raise
        await _close(socket, error)
        return
    session = _TerminalSession(socket, gateway, principal, link, record)
    try:
        await session.run()
    finally:
        await link.aclose()


async def _close(socket: WebSocket, error: DeckhandsError) -> None:
    """Tell the reader why a terminal ends, and close the socket."""
    content = {"code": error.code, "detail": error.message, "remedy": error.remedy, "retryable": error.retryable}
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        told = socket.send_text(json.dumps({"type": "problem", "content": content}))
        if await finishes_in_time(told, WRITE_SECONDS):
            await finishes_in_time(socket.close(CLOSE_CODES.get(error.code, 1011), error.code), WRITE_SECONDS)
            return
    socket.scope.get("state", {}).get("abort", lambda: None)()


class TerminalClosed(DeckhandsError):
    """The terminal ended, for a reason that is no failure."""

    code = "terminal_closed"
    retryable = True


class _TerminalSession:
    """One open terminal: it relays, records and checks until one side ends."""

    def __init__(
        self, socket: WebSocket, gateway: Gateway, principal: Principal, link: TerminalLink, record: TerminalRecord
    ) -> None:
        self._socket = socket
        self._gateway = gateway
        self._principal = principal
        self._link = link
        self._record = record
        self._exit_code: int | None = None
        self._last_key = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Relay until the terminal ends, tell the reader why, and record it."""
        ending: DeckhandsError | None = None
        tasks = [asyncio.create_task(part) for part in (self._pass_keys(), self._pass_output(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(error := task.exception(), DeckhandsError):
                    ending = ending or error
                elif error is not None and not isinstance(error, WebSocketDisconnect | RuntimeError | OSError):
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(DeckhandsError, TimeoutError):
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._link.send("close")
            how = ending.code if ending is not None else "the shell ended" if self._exit_code is not None else "closed"
            await self._record.end(how)
        if ending is not None:
            await _close(self._socket, ending)
        elif self._exit_code is not None:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                told = self._socket.send_text(json.dumps({"type": "ended", "exit_code": self._exit_code}))
                if await finishes_in_time(told, WRITE_SECONDS):
                    await finishes_in_time(self._socket.close(1000), WRITE_SECONDS)

    async def _pass_keys(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] != "websocket.receive":
                return
            if (keys := message.get("bytes")) is not None:
                if not _REPORTS.fullmatch(keys):
                    self._last_key = asyncio.get_running_loop().time()
                await self._record.add_input(keys)
                for start in range(0, len(keys), MOST_BYTES):
                    await self._link.send("keys", keys[start : start + MOST_BYTES])
            elif (size := _parse_size(message.get("text") or "")) is not None:
                await self._link.send("size", b"%d %d" % size)

    async def _pass_output(self) -> None:
        await self._write(self._socket.send_text(json.dumps({"type": "opened"})))
        while True:
            message = await self._link.receive()
            if message.kind == "output":
                self._record.add_output(message.content)
                await self._write(self._socket.send_bytes(message.content))
            elif message.kind == "ended":
                self._exit_code = int(message.content) if _EXIT_CODE.fullmatch(message.content) else -1
                return
            elif message.kind == "failed":
                raise TerminalLost(message.content.decode("utf-8", "replace"), remedy="Open another terminal.")

    async def _write(self, writing: Awaitable[Any]) -> None:
        if not await finishes_in_time(writing, WRITE_SECONDS):
            raise TerminalClosed("The page reads nothing from the terminal.", remedy="Open another one.")

    async def _watch(self) -> None:
        """Check the key, and record, until the terminal has to end."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._gateway.is_stopping.wait()
            if self._gateway.is_stopping.is_set():
                raise TerminalClosed("The server is stopping.", remedy="Open another terminal.")
            idle_seconds = self._gateway.options.terminal_idle_seconds
            if asyncio.get_running_loop().time() - self._last_key > idle_seconds:
                raise TerminalClosed(f"No key was pressed for {idle_seconds / 60:g} minutes.", remedy="Open another.")
            # What fails is tried again next time; meanwhile the store passes nothing on.
            with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
                await self._gateway.recheck(self._principal)
                await self._record.write()


class TerminalRecord:
    """What the record of operations gets of one terminal.

    Holds: input is recorded whole, before it is sent if it has a key that runs a line, and otherwise at the latest
    `RECORD_SECONDS` after it. In an encrypted conversation, it is encrypted with the key of the conversation.
    """

    def __init__(self, gateway: Gateway, principal: Principal, conversation_id: str) -> None:
        self._gateway = gateway
        self._principal = principal
        self._conversation_id = conversation_id
        self._input = bytearray()
        self._output = bytearray()
        self._input_bytes = self._output_bytes = self._omitted_bytes = self._entries = 0
        self._turn = asyncio.Lock()

    async def add_input(self, keys: bytes) -> None:
        """Note input before it is sent; a line is recorded at once.

        Raises:
            TerminalClosed: no more input of this terminal can be recorded.
        """
        if self._input_bytes + len(keys) + ENTRY_BYTES * (self._entries + 1) > RECORDED_INPUT_BYTES:
            raise TerminalClosed(
                f"Of one terminal, {RECORDED_INPUT_BYTES:,} bytes of input are recorded.", remedy="Open another one."
            )
        self._input_bytes += len(keys)
        self._input += keys
        if _RECORDED_AT_ONCE.search(keys) or len(self._input) > TEXT_CHARS:
            async with self._turn:
                await self._write_input()

    def add_output(self, output: bytes) -> None:
        """Note output."""
        self._output_bytes += len(output)
        self._output += output
        extra = len(self._output) - RECORDED_OUTPUT_CHARS
        if extra > 0:
            del self._output[:extra]
            self._omitted_bytes += extra

    async def write(self) -> None:
        """Record what was noted since. Idempotent: what the store refuses is kept for the next time."""
        async with self._turn:
            await self._write_input()
            shown, omitted, until = bytes(self._output), self._omitted_bytes, self._output_bytes
            if shown:
                await self._add("terminal.output", (f"[{omitted:,} bytes before] " if omitted else "") + escape(shown))
                # What came meanwhile stays, and has pushed out some of what is recorded now.
                left = min(self._output_bytes - until, len(self._output))
                self._omitted_bytes = self._output_bytes - until - left
                del self._output[: len(self._output) - left]

    async def _write_input(self) -> None:
        typed = bytes(self._input)
        if typed:
            await self._add("terminal.input", escape(typed))
            del self._input[: len(typed)]
            self._entries += 1

    async def end(self, how: str) -> None:
        """Record the rest, and how the terminal ended. If the store refuses, it is lost."""
        with contextlib.suppress(DeckhandsError):
            await self.write()
            text = f"{how}; {self._input_bytes:,} bytes of input, {self._output_bytes:,} of output"
            await self._gateway.record(self._principal, "terminal.end", self._conversation_id, text)

    async def _add(self, action: str, text: str) -> None:
        cipher = await self._gateway.store.encryption.find_cipher(self._conversation_id)
        if cipher is not None:
            sealed = cipher.encrypt(text.encode(), f"{action} {self._conversation_id}")
            text = SEALED + base64.b64encode(sealed).decode()
        await self._gateway.record(self._principal, action, self._conversation_id, text)


SEALED = "encrypted:"


async def reveal(gateway: Gateway, action: str, target: str, text: str) -> str:
    """Return the text of an entry of the record, decrypted if it is encrypted and its key still exists."""
    if not text.startswith(SEALED) or action not in ("terminal.input", "terminal.output"):
        return text
    try:
        cipher = await gateway.store.encryption.find_cipher(target)
        if cipher is not None:
            return cipher.decrypt(base64.b64decode(text.removeprefix(SEALED)), f"{action} {target}").decode()
    except (DeckhandsError, ValueError):
        pass
    return "[encrypted; its key is gone]"


def escape(content: bytes) -> str:
    r"""Return text in which control characters are spelt out, such as `\r` and `\x1b`."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() and char != "\\" else _spell(char) for char in text)


def _spell(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _parse_size(text: str) -> tuple[int, int] | None:
    """Return the columns and rows of a message; None if it is something else."""
    try:
        found = json.loads(text)
        columns, rows = found["columns"], found["rows"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    is_size = all(type(one) is int and 0 < one <= MOST_CELLS for one in (columns, rows))
    return (columns, rows) if is_size else None
