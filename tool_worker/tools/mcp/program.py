"""The line to an MCP server that is a program: one JSON-RPC message a line, both ways.

The SDK's own joins what it has read of a line to what comes, again and again, and has no limit: a message of 40 MB
costs half a minute of the worker's event loop, and one without an end all of its memory.

Holds: a message costs time in proportion to its length; one that is too long ends the connection, and those who wait
for an answer read why; what is not a message is passed over; the program, and all that it has started in its session,
ends with the connection.
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
"""What a program gets after its input has ended, each if the one before does not help; None: a while to end itself."""
STEP_SECONDS = 2.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def program_streams(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a program and yield the streams of messages from it and to it.

    Raises:
        OSError: it cannot be started.
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
    asked: set[Any] = set()
    reading = asyncio.create_task(_read(process, to_session, asked))
    writing = asyncio.create_task(_write(process, from_session, to_session, asked))
    try:
        yield from_program, to_program
    finally:
        # Nothing in here is undone by a cancel: the program would be left behind.
        await asyncio.shield(asyncio.create_task(_end(process, to_program, reading, writing)))
        for stream in (to_session, from_program, to_program, from_session):
            stream.close()


async def _read(process: Process, to_session: MemoryObjectSendStream[Any], asked: set[Any]) -> None:
    """Pass the program's messages on; its end, or a message that is too long, closes the stream.

    Args:
        asked: the ids of requests that have no answer yet.
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
                _log.warning("an MCP server sent a message of more than %d bytes; it is ended", MESSAGE_LIMIT_BYTES)
                why = ErrorData(code=CONNECTION_CLOSED, message=ANSWER_TOO_LONG)
                for request_id in tuple(asked):
                    await to_session.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=why)))
                return
            if not line:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line.decode("utf-8", "replace"), by_name=False)
            except ValueError:
                continue  # what a program prints by mistake
            if isinstance(message, JSONRPCResponse | JSONRPCError):
                asked.discard(message.id)
            await to_session.send(SessionMessage(message))


async def _write(
    process: Process,
    from_session: MemoryObjectReceiveStream[Any],
    to_session: MemoryObjectSendStream[Any],
    asked: set[Any],
) -> None:
    """Pass the session's messages on; if the program takes none, its stream to us is closed as well."""
    from mcp.types import JSONRPCNotification, JSONRPCRequest

    assert process.stdin is not None
    async with from_session:
        async for sent in from_session:
            if isinstance(sent.message, JSONRPCRequest):
                asked.add(sent.message.id)
            elif isinstance(sent.message, JSONRPCNotification) and sent.message.method == "notifications/cancelled":
                asked.discard((sent.message.params or {}).get("requestId"))
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
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  (there is no other way)


async def _wait_for_end(process: Process) -> bool:
    deadline = asyncio.get_running_loop().time() + STEP_SECONDS
    # `wait` would also wait for others that have the program's output open.
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return process.returncode is not None
