"""The connection to an MCP server that is a program: one JSON-RPC message per line, in both directions.

The SDK's own reader repeatedly joins the parts of a long line, and has no limit: a message of 40 MB costs half a minute
of the worker's event loop, and an endless line costs all of its memory.

Holds: a message costs time in proportion to its length. A message over the limit ends the connection, and pending
requests get the reason as their error. Lines that are not messages are skipped. The program, with all processes of its
session, ends with the connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

MESSAGE_LIMIT_BYTES = 16 * 2**20
ANSWER_TOO_LONG = "the server's message has more than 16 MiB"
FLUSH_SECONDS = 0.5
END_STEPS = (None, signal.SIGTERM, signal.SIGKILL)
"""Signals after the end of the program's input, tried in order; None means to wait for a voluntary exit."""
STEP_SECONDS = 2.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_program_streams(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a program, and yield the streams of its output messages and its input messages.

    Raises:
        OSError: The program cannot be started.
    """
    import anyio

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=log,
        env=dict(environment),
        limit=MESSAGE_LIMIT_BYTES,
        start_new_session=True,
    )
    to_session, from_program = anyio.create_memory_object_stream[Any](0)
    to_program, from_session = anyio.create_memory_object_stream[Any](0)
    pending: set[Any] = set()
    reading = asyncio.create_task(_read(process, to_session, pending))
    writing = asyncio.create_task(_write(process, from_session, to_session, pending))
    try:
        yield from_program, to_program
    finally:
        # Shielded: a cancellation here would leave the program running.
        await asyncio.shield(asyncio.create_task(_end(process, to_program, reading, writing)))
        for stream in (to_session, from_program, to_program, from_session):
            stream.close()


async def _read(process: Process, to_session: MemoryObjectSendStream[Any], pending: set[Any]) -> None:
    """Pass the program's messages to the session. Its end, or a message over the limit, closes the stream.

    Args:
        pending: Ids of requests without an answer yet.
    """
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import CONNECTION_CLOSED, ErrorData, JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

    assert process.stdout is not None
    with to_session, suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                _log.warning(
                    "an MCP server sent a message of more than %d bytes; closing the connection", MESSAGE_LIMIT_BYTES
                )
                why = ErrorData(code=CONNECTION_CLOSED, message=ANSWER_TOO_LONG)
                for request_id in tuple(pending):
                    await to_session.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=why)))
                return
            if not line:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line.decode("utf-8", "replace"), by_name=False)
            except ValueError:
                continue  # stray output of a program
            if isinstance(message, JSONRPCResponse | JSONRPCError):
                pending.discard(message.id)
            await to_session.send(SessionMessage(message))


async def _write(
    process: Process,
    from_session: MemoryObjectReceiveStream[Any],
    to_session: MemoryObjectSendStream[Any],
    pending: set[Any],
) -> None:
    """Pass the session's messages to the program; if its input is closed, also close its output stream."""
    from mcp.types import JSONRPCNotification, JSONRPCRequest

    assert process.stdin is not None
    async with from_session:
        async for sent in from_session:
            if isinstance(sent.message, JSONRPCRequest):
                pending.add(sent.message.id)
            elif isinstance(sent.message, JSONRPCNotification) and sent.message.method == "notifications/cancelled":
                pending.discard((sent.message.params or {}).get("requestId"))
            written = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                process.stdin.write(written.encode("utf-8", "replace") + b"\n")
                await process.stdin.drain()
            except (OSError, RuntimeError):
                to_session.close()
                return


async def _end(
    process: Process, to_program: MemoryObjectSendStream[Any], reading: asyncio.Task[None], writing: asyncio.Task[None]
) -> None:
    assert process.stdin is not None
    to_program.close()
    await asyncio.wait({writing}, timeout=FLUSH_SECONDS)
    writing.cancel()
    reading.cancel()
    await asyncio.wait({reading, writing})
    process.stdin.close()
    for step in END_STEPS:
        if step is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, step)
        if await _wait_for_end(process):
            break
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  (no public method closes the transport)


async def _wait_for_end(process: Process) -> bool:
    deadline = asyncio.get_running_loop().time() + STEP_SECONDS
    # `wait` would also wait for other processes that hold the program's output open.
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return process.returncode is not None
