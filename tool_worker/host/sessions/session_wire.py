"""A session program's side of the line to its workspace host; see `tool_worker.host.session_program`.

Holds: one call at a time; an interrupt reaches the call that runs, and no other.
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
    """Carry out calls until the host closes the line.

    Args:
        call: Returns the result for these arguments; what it raises is the result as well.
        interrupt: Makes the call that runs end soon.
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
