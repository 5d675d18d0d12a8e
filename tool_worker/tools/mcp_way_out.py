"""The way out of the sandbox of an MCP server's program that may reach some hosts of the network.

Holds: the proxy is there before the program begins, and ends with its connection, or with the tool worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tool_worker.egress.gate import EGRESS_PORT, EgressGate, start_proxy
from tool_worker.sandbox.sandbox import Sandbox, interpreter
from tool_worker.spawning import bind_for_all

START_LIMIT_SECONDS = 30.0


def led_out(sandbox: Sandbox, address: Path, program: Sequence[str]) -> list[str]:
    """Return the command that leads a program out by way of a socket, and becomes it."""
    leader = f"{sandbox.code_root}/tool_worker/host/lead_out.py"
    return [interpreter(), "-I", "-S", leader, str(EGRESS_PORT), str(address), *program]


@asynccontextmanager
async def way_out(
    address: Path, gate: EgressGate, allow: Sequence[str], *, log: Path, name: str
) -> AsyncIterator[None]:
    """Serve one program that leads itself out by way of this address, while the block lasts.

    The address is there, as a file, from the beginning of the block.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ours, theirs = socket.socketpair()
    with listening, ours, theirs:
        address.parent.mkdir(mode=0o700, exist_ok=True)
        bind_for_all(listening, address)  # whoever the program runs as; nobody else gets into the folder
        listening.listen(1)
        listening.setblocking(False)
        started: list[int] = []

        async def start() -> None:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                program, _ = await asyncio.get_running_loop().sock_accept(listening)
            with program:
                lent = await asyncio.to_thread(_taken, program)
                try:
                    settings = gate.settings(allow)
                    started.append(start_proxy(theirs.fileno(), lent, settings, log=log, name=name))
                finally:
                    os.close(lent)
                program.send(b".")

        starting = asyncio.create_task(start(), name=f"way out of {name}")
        try:
            yield
        finally:
            starting.cancel()
            with suppress(asyncio.CancelledError, OSError, TimeoutError):
                await starting
            for pid in started:
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, pid, 0)
            await asyncio.to_thread(address.unlink, missing_ok=True)


def _taken(program: socket.socket) -> int:
    program.settimeout(START_LIMIT_SECONDS)
    _, descriptors, _, _ = socket.recv_fds(program, 1, 1)
    if not descriptors:
        raise ConnectionAbortedError("the program sent no socket")
    return descriptors[0]
