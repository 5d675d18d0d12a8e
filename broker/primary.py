"""Commands for `deploy/serve-valkey`, which starts one server of a group whose primary is chosen by Sentinels.

    python -m broker.primary HOST PORT MS  prints the role of the server at this address: `primary`, or `replica HOST
                                           PORT`; MS is the time after which Sentinels replace a silent primary
    python -m broker.primary --candidate   makes the server a candidate, once it has all data

A server asks before it starts, because it may be a former primary that was replaced. The URL of the Sentinels, or of
the server, is read from standard input: it contains a password, and every program of the machine can read arguments.

Holds:
- The primary is the one of the latest fail-over that a majority of the Sentinels knows. While a fail-over is in
  progress, there is none.
- A server without data does not start as the primary of a group that has data: the others would copy nothing.
- A primary that returns waits until the Sentinels would have replaced it: replicas may have writes that are missing in
  its file.
- Sentinels promote a replica only after it has copied the data of the primary: it starts with `replica-priority 0`.

Both commands wait as long as needed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import redis

from broker.runtime import DeckhandsError
from broker.store import NamedPrimary, SentinelUrl, find_latest_primary

RETRY_SECONDS = 1.0
FAIL_OVER_SECONDS = 3.0
"""How long Sentinels may take to promote a replica after they have found that the primary is down."""
PRIORITY = 100
"""The default of servers."""
DATA = "appendonlydir"
USAGE = "Usage: python -m broker.primary HOST PORT MS|--candidate, with a URL on standard input\n"


async def wait_for_primary(url: SentinelUrl) -> NamedPrimary:
    """Return the primary, as soon as a majority of the Sentinels names one."""
    last = ""
    while True:
        try:
            return await find_latest_primary(url)
        except DeckhandsError as error:
            if str(error) != last:
                last = str(error)
                sys.stderr.write(f"{last} Waiting.\n")
        await asyncio.sleep(RETRY_SECONDS)


async def choose_role(url: SentinelUrl, own: tuple[str, int], *, has_data: bool, down_after_seconds: float) -> str:
    """Return the role of a server: `primary`, or `replica HOST PORT`.

    Args:
        own: the server's address, as the Sentinels know it.
        has_data: it has an append-only file.
        down_after_seconds: how long a primary may be silent before the Sentinels replace it.
    """
    named = await wait_for_primary(url)
    if named.address == own and named.has_history:
        await asyncio.sleep(down_after_seconds + FAIL_OVER_SECONDS)
        named = await wait_for_primary(url)
    if named.address == own and named.has_history and not has_data:
        sys.stderr.write(
            "The Sentinels name this server as the primary, and it has no data. Bring its volume back, or choose "
            "another server, see docs/kubernetes.md. Waiting.\n"
        )
        while named.address == own:
            await asyncio.sleep(RETRY_SECONDS)
            named = await wait_for_primary(url)
    return "primary" if named.address == own else f"replica {named.address[0]} {named.address[1]}"


async def make_candidate(url: str) -> None:
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
        await asyncio.sleep(RETRY_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Run the command in the arguments, and return the exit status; 2 if the arguments are invalid."""
    url = sys.stdin.readline().strip()
    try:
        match list(arguments):
            case ["--candidate"]:
                asyncio.run(make_candidate(url))
                return 0
            case [host, port, milliseconds]:
                role = choose_role(
                    SentinelUrl.parse(url),
                    (host, int(port)),
                    has_data=Path(DATA).is_dir(),
                    down_after_seconds=int(milliseconds) / 1000,
                )
                sys.stdout.write(f"{asyncio.run(role)}\n")
                return 0
    except (ValueError, KeyError):
        pass
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
