"""What `deploy/serve-valkey` needs to start one server of several, of which Sentinels choose the primary.

    python -m broker.primary               prints host and port of the primary, as the Sentinels of $SENTINEL_URL say
    python -m broker.primary --candidate   makes the server at $SERVER_URL a candidate, once it has all data

A server asks before it starts: it may have been the primary once, and be replaced since. Until it has copied the data
of the primary, Sentinels must not promote it, so it starts with `replica-priority 0`. The URLs hold passwords, so they
are not arguments, which every program of the machine can read.

Holds: the answer of the latest fail-over counts, of a majority of the Sentinels. Both commands wait as long as needed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence

import redis

from broker.runtime import DeckhandsError
from broker.store import SentinelUrl, find_latest_primary

RETRY_SECONDS = 1.0
PRIORITY = 100
"""The default of servers."""
USAGE = "Usage: python -m broker.primary [--candidate], with SENTINEL_URL=redis+sentinel://… or SERVER_URL=redis://…\n"


async def wait_for_primary(url: SentinelUrl) -> tuple[str, int]:
    """Return host and port of the primary, as soon as a majority of the Sentinels names one."""
    last = ""
    while True:
        try:
            return await find_latest_primary(url)
        except DeckhandsError as error:
            if str(error) != last:
                last = str(error)
                sys.stderr.write(f"{last} Waiting.\n")
        await asyncio.sleep(RETRY_SECONDS)


def make_candidate(url: str) -> None:
    """Let Sentinels promote a server, as soon as it has copied the data of its primary or is the primary.

    The server is the parent of this process; without it, there is nothing to wait for.
    """
    server_id = os.getppid()
    while os.getppid() == server_id:
        try:
            with redis.Redis.from_url(url, decode_responses=True, socket_timeout=RETRY_SECONDS) as server:
                facts = server.info("replication")
                if facts.get("role") == "master" or facts.get("master_link_status") == "up":
                    server.config_set("replica-priority", PRIORITY)
                    return
        except redis.RedisError:
            pass  # it starts, or loads its data
        time.sleep(RETRY_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status: 2 if the command is used in another way."""
    try:
        match list(arguments):
            case ["--candidate"]:
                make_candidate(os.environ["SERVER_URL"])
                return 0
            case []:
                sentinels = SentinelUrl.parse(os.environ["SENTINEL_URL"])
                host, port = asyncio.run(wait_for_primary(sentinels))
                sys.stdout.write(f"{host} {port}\n")
                return 0
    except (ValueError, KeyError):
        pass
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
