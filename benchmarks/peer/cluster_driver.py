"""Add entries to streams of a cluster with one client: `cluster_driver.py CLIENT HOST:PORT PASSWORD STREAMS CALLS`.

CLIENT is `deckhands`, `redis-py` or `valkey-glide`; each is imported only when it is chosen, so that one of them is
enough. One task for each stream adds so many entries of 200 bytes, one after the other. Prints a line of JSON: the
version of the client, and the seconds and the CPU seconds of this process, with all its threads.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

PAYLOAD = b"x" * 200
WARM_UP = 50
Add = Callable[[str], Awaitable[Any]]


async def connect_deckhands(host: str, port: int, password: str) -> Add:
    """Connect with the connection of Deckhands."""
    from broker.store.cluster import connect

    connection = connect(f"redis+cluster://:{password}@{host}:{port}")
    return lambda stream: connection.call("XADD", stream, "*", "e", PAYLOAD)


async def connect_redis_py(host: str, port: int, password: str) -> Add:
    """Connect with redis-py's client for clusters."""
    from redis.asyncio.cluster import RedisCluster

    client = RedisCluster(host=host, port=port, password=password)
    await client.initialize()
    return lambda stream: client.execute_command("XADD", stream, "*", "e", PAYLOAD)


async def connect_valkey_glide(host: str, port: int, password: str) -> Add:
    """Connect with valkey-glide."""
    import glide  # type: ignore[import-not-found]

    login = glide.ServerCredentials(password=password)
    settings = glide.GlideClusterClientConfiguration([glide.NodeAddress(host, port)], credentials=login)
    client = await glide.GlideClusterClient.create(settings)
    return lambda stream: client.custom_command(["XADD", stream, "*", "e", PAYLOAD])


CLIENTS = {
    "deckhands": (connect_deckhands, "deckhands"),
    "redis-py": (connect_redis_py, "redis"),
    "valkey-glide": (connect_valkey_glide, "valkey-glide"),
}


async def measure(client: str, place: str, password: str, streams: int, calls: int) -> dict[str, Any]:
    """Add the entries, and return what that has used."""
    connect, package = CLIENTS[client]
    host, _, port = place.rpartition(":")
    add = await connect(host, int(port), password)

    async def add_entries(number: int, count: int) -> None:
        for _ in range(count):
            await add(f"bench:{{{number}}}")

    await asyncio.gather(*(add_entries(number, WARM_UP) for number in range(streams)))
    began, used = time.monotonic(), time.process_time()
    await asyncio.gather(*(add_entries(number, calls) for number in range(streams)))
    return {
        "version": version(package),
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - used,
        "calls": streams * calls,
    }


if __name__ == "__main__":
    chosen, place, password, streams, calls = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(chosen, place, password, int(streams), int(calls)))), flush=True)
