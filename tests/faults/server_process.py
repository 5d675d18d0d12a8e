"""`deckhands serve` as a process, and peers of it that are slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx2

from tests.forked_programs import ForkedProgram
from tests.polling import until

LIMIT_SECONDS = 60.0
NO_MORE: Mapping[str, str] = {}


class ServerProcess:
    """A server's process, with those parts of `asyncio.subprocess.Process` that tests use."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self._program = ForkedProgram(module, *arguments, environment=environment, output=None)
        self.pid = self._program.pid
        self.send_signal = self._program.send_signal
        self.kill = self._program.kill

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._program.poll()

    async def wait(self) -> int:
        """Wait until it ends and return its exit status."""
        return await asyncio.to_thread(self._program.wait)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.asynccontextmanager
async def server(
    url: str,
    home: Path,
    port: int,
    *,
    limit_seconds: float | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = NO_MORE,
) -> AsyncIterator[ServerProcess]:
    """A server, once it answers; killed by SIGKILL at the end.

    Args:
        limit_seconds: how long peers may take for a head, a body, or to take what is written; None: the usual times.
        options: further options of the command.
    """
    usual = ("deckhands", "serve", "--port", str(port), *options)
    hurried = ("tests.faults.hurried_server", url, str(port), str(limit_seconds))
    running = ServerProcess(
        *(usual if limit_seconds is None else hurried),
        environment={"PATH": os.environ["PATH"], "DECKHANDS_URL": url, "DECKHANDS_HOME": str(home), **environment},
    )
    try:
        async with httpx2.AsyncClient() as client:

            async def answers() -> bool:
                assert running.returncode is None, f"the server has ended with {running.returncode}"
                with contextlib.suppress(httpx2.HTTPError):
                    return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
                return False

            await until(answers, limit=LIMIT_SECONDS, what="server")
        yield running
    finally:
        running.kill()
        await running.wait()
