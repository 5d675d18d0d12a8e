"""A server as a program, with short limits for slow peers: `python -m tests.faults.hurried_server URL PORT SECONDS`."""

from __future__ import annotations

import asyncio
import sys

from broker.store.store import open_store
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve


async def main(url: str, port: int, seconds: float) -> None:
    limits = {"head_seconds": seconds, "body_seconds": seconds, "slow_seconds": seconds}
    gateway = Gateway(await open_store(url, patience_seconds=5), options=ServerOptions(port=port, **limits))
    try:
        await serve(gateway, on_ready=lambda _: None)
    finally:
        await gateway.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
