"""A session program's end of the connection to its workspace host; see `tool_worker.host.session_program`.

Holds: calls run one at a time; an interrupt reaches only the running call.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

SESSION_FD = 3
LINE_LIMIT_BYTES = 64 * 2**20

Result = dict[str, Any]


async def serve(call: Callable[[dict[str, Any]], Awaitable[Result]], interrupt: Callable[[], Awaitable[None]]) -> None:
    """Serve calls until the host closes the connection.

    Args:
        call: Returns the result for the given arguments; an exception becomes an error result.
        interrupt: Makes the running call end soon.
    """
    line = socket.socket(fileno=SESSION_FD)
    reader, writer = await asyncio.open_connection(sock=line, limit=LINE_LIMIT_BYTES)
    running: asyncio.Task[None] | None = None
    number = 0

    async def answer(number: int, arguments: dict[str, Any]) -> None:
        try:
            result = await call(arguments)
        except Exception as error:  # noqa: BLE001  (the edge of the program: a defect is the answer to this call)
            result = {"content": f"ERROR: {type(error).__name__}: {error}", "is_error": True}
        writer.write(json.dumps({"call": number, "result": result}).encode("ascii") + b"\n")
        await writer.drain()

    while received := await reader.readline():
        message = json.loads(received)
        if "call" in message:
            number = message["call"]
            running = asyncio.create_task(answer(number, message["arguments"]))
        elif message.get("interrupt") == number and running is not None and not running.done():
            await interrupt()
