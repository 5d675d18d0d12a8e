"""`deckhands serve` as a process, and peers of it that are slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx2

from tests.polling import until

LIMIT_SECONDS = 60.0
NO_MORE: Mapping[str, str] = {}
ROOT = Path(__file__).resolve().parents[2]


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
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server, once it answers; killed by SIGKILL at the end.

    Args:
        limit_seconds: how long peers may take for a head, a body, or to take what is written; None: the usual times.
        options: further options of the command.
    """
    usual = ("deckhands", "serve", "--port", str(port), *options)
    hurried = ("tests.faults.hurried_server", url, str(port), str(limit_seconds))
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *(usual if limit_seconds is None else hurried)),
        env={
            "PATH": os.environ["PATH"],
            "DECKHANDS_URL": url,
            "DECKHANDS_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        stderr=asyncio.subprocess.DEVNULL,
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
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()
