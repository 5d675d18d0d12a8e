"""The health check of a container: `python -m broker.health ROLE`, with a role of `ROLES`.

A running process proves nothing, and replies to pings prove little: a hanging worker may still reply. A heartbeat in
the store proves work, because the working loop itself sends it. The exit status is 0 for healthy, 1 for a lapsed
heartbeat, and 3 for unknown, if the store does not answer or refuses the login; restarting a worker would not help
then.

Holds: a heartbeat's age is measured by the same clock as the heartbeats.
Does not: distinguish several workers of one role on one host; it is for containers, which hold one each.
Keys: reads `deck:{k}:workers`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from broker.runtime import BrokerSettings, DeckhandsError, make_worker_id_prefix
from broker.store import Connection, ShardKeys, connect

HEALTHY, LAPSED, UNKNOWN = 0, 1, 3
WORKER_ROLES = ("controller", "tool", "ingress", "jobs")
STORE_ROLE, MEMBER_ROLE, BEAT_ROLE = "store", "member", "beat"
BEAT_LOCK = "deckhands:beat::lock"
"""In Celery's broker: held by the beat that sends; see `deckhands.operations.jobs.celery_app`."""
ROLES = (*WORKER_ROLES, BEAT_ROLE, STORE_ROLE, MEMBER_ROLE)
REPLY_LIMIT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The result of a check.

    Attributes:
        exit_status: `HEALTHY`, `LAPSED` or `UNKNOWN`.
        reason: one line.
    """

    exit_status: int
    reason: str


async def check_worker(connection: Connection, role: str) -> HealthStatus:
    """Check the heartbeat of this host's worker.

    Args:
        role: `controller`, `tool`, `ingress` or `jobs`.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    prefix = make_worker_id_prefix(role)
    _, now_ms = await connection.call("FCALL", "deck_now", 1, ShardKeys(0).root)
    # A worker sends heartbeats to every shard, so the first shard is enough.
    flat = await connection.call("ZRANGE", ShardKeys(0).workers, 0, -1, "WITHSCORES")
    deadlines = [float(flat[i + 1]) for i in range(0, len(flat), 2) if flat[i].decode().startswith(prefix)]
    if not deadlines:
        return HealthStatus(LAPSED, f"No {role} worker of this host is known to the store.")
    left_ms = max(deadlines) - now_ms
    if left_ms <= 0:
        return HealthStatus(LAPSED, f"The {role} worker's heartbeat lapsed {-left_ms / 1000:.1f} s ago.")
    return HealthStatus(HEALTHY, f"The {role} worker's heartbeat is valid for {left_ms / 1000:.1f} s.")


async def check_store(connection: Connection) -> HealthStatus:
    """Ping the store. It refuses while it loads its data or cannot write to its disk.

    Raises:
        StoreError: it does not answer, or refuses.
    """
    await connection.call("PING")
    return HealthStatus(HEALTHY, "The store serves.")


async def check_member(connection: Connection) -> HealthStatus:
    """Check that one server of several is the primary, or a replica that Sentinels may promote.

    Raises:
        StoreError: it does not answer, or refuses.
    """
    lines = (await connection.call("INFO", "replication")).decode().split("\r\n")
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    if facts.get("role") == "master":
        return HealthStatus(HEALTHY, "The server is the primary.")
    if facts.get("master_link_status") == "up" and facts.get("slave_priority") != "0":
        return HealthStatus(HEALTHY, "The server is a replica that follows the primary.")
    return HealthStatus(LAPSED, "The server is a replica without all data of the primary.")


async def check_beat(connection: Connection) -> HealthStatus:
    """Check in Celery's broker whether a beat is active. Of several beats, any one will do.

    Raises:
        StoreError: the broker does not answer, or refuses.
    """
    if await connection.call("EXISTS", BEAT_LOCK):
        return HealthStatus(HEALTHY, "A beat is active.")
    return HealthStatus(LAPSED, "No beat is active.")


async def check(role: str, url: str) -> HealthStatus:
    """Check a worker of this host, or the store. Store errors are part of the verdict.

    Args:
        role: one of `ROLES`.
        url: the store, as in `DECKHANDS_URL`; for a beat, Celery's broker.
    """
    assert role in ROLES
    connection: Connection | None = None
    try:
        connection = connect(url, reply_timeout_seconds=REPLY_LIMIT_SECONDS)
        if role == STORE_ROLE:
            return await check_store(connection)
        if role == MEMBER_ROLE:
            return await check_member(connection)
        return await (check_beat(connection) if role == BEAT_ROLE else check_worker(connection, role))
    except DeckhandsError as error:
        return HealthStatus(UNKNOWN, str(error))
    finally:
        if connection is not None:
            await connection.aclose()


def main(arguments: Sequence[str]) -> int:
    """Check the given role, print the result on standard output, and return the exit status."""
    if len(arguments) != 1 or arguments[0] not in ROLES:
        verdict = HealthStatus(UNKNOWN, "Usage: python -m broker.health controller|tool|ingress|jobs|beat|store|member")
    else:
        try:
            settings = BrokerSettings.from_env()
            url = settings.celery_url if arguments[0] == BEAT_ROLE else settings.url
            verdict = asyncio.run(check(arguments[0], url))
        except DeckhandsError as error:
            verdict = HealthStatus(UNKNOWN, str(error))
    sys.stdout.write(f"{verdict.reason}\n")
    return verdict.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
