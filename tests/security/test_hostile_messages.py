"""Whatever arrives by Celery's broker is answered or dropped with a line in the log, and ends no worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis
from celery import Celery

from broker.celery.app import RESTORE_SECONDS
from tests.faults.harness import FaultCluster, Worker, steps
from tests.polling import until
from tests.security.hostile_messages import (
    CLASSICS,
    TASK,
    UNDER_WAY,
    hostile_commands,
    hostile_tasks,
    plain_command,
    plain_message,
    to_bytes,
)
from tests.stores import RealServer, emptied

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = ("controller", "tool")
COMMAND_CHANNEL = "/1.celery.pidbox"
UNACKED, UNACKED_INDEX = "deckhands.tool:unacked", "deckhands.tool:unacked_index"
KEYS = ("deckhands.tool", UNACKED, "_kombu.binding.celery.pidbox")
SEED = 20261123


class Crew:
    """One worker of each kind, and an attacker with write access to their broker."""

    def __init__(self, cluster: FaultCluster, broker: RealServer) -> None:
        self.cluster = cluster
        self.url = f"redis+socket://{broker.socket}?virtual_host=1"  # without a password, so no command may end one
        self.broker = redis.Redis.from_url(broker.url, db=1)
        self.asking = Celery("asking", broker=self.url, set_as_current=False)
        self.processes: dict[str, Worker] = {}

    async def start(self) -> None:
        self.processes = {
            "controller": self.cluster.start_controller(DECKHANDS_CELERY_URL=self.url),
            "tool": self.cluster.start_tool(DECKHANDS_CELERY_URL=self.url),
        }
        await self.until_served()

    def push(self, entry: str | bytes) -> None:
        for role in ROLES:
            self.broker.lpush(f"deckhands.{role}", to_bytes(entry))

    async def drained(self) -> None:
        """Wait until both queues are empty."""

        def are_empty() -> bool:
            assert all(worker.poll() is None for worker in self.processes.values()), self.ends()
            return not any(self.broker.llen(f"deckhands.{role}") for role in ROLES)

        await until(are_empty, limit=120.0, what="empty queues")

    def stats(self) -> dict[str, Any]:
        answers = self.asking.control.inspect(timeout=5.0, limit=2).stats() or {}
        return {name.partition("-")[0]: stats for name, stats in answers.items()}

    def ends(self) -> str:
        return "".join(
            self.cluster.log_of(name)[-1500:] for name, worker in self.cluster.workers.items() if worker.poll()
        )

    async def until_served(self) -> None:
        """Push a good message for each worker, and wait until the original processes have handled both."""
        before = {role: _runs(stats) for role, stats in self.stats().items()}
        self.push(plain_message())

        def are_served() -> bool:
            assert all(worker.poll() is None for worker in self.processes.values()), self.ends()
            stats = self.stats()
            return len(stats) == 2 and all(_runs(found) > before.get(role, 0) for role, found in stats.items())

        await until(are_served, limit=60.0, what="service of both workers")
        pids = {role: stats["pid"] for role, stats in self.stats().items()}
        assert pids == {role: worker.pid for role, worker in self.processes.items()}


def _runs(stats: dict[str, Any]) -> int:
    return int(stats["total"].get(TASK, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crew(tmp_path_factory: pytest.TempPathFactory, valkey_server: RealServer) -> AsyncIterator[Crew]:
    await emptied(valkey_server.url)
    async with FaultCluster(tmp_path_factory.mktemp("crew")).running() as cluster:
        crew = Crew(cluster, valkey_server)
        await crew.start()
        yield crew
        crew.broker.close()


async def test_one_malformed_message_or_command_ends_no_worker(crew: Crew) -> None:
    # Running work that cannot be put back is forgotten, a while later.
    for number, forged in enumerate(UNDER_WAY):
        crew.broker.zadd(UNACKED_INDEX, {f"forged-{number}": 1 + number})
        crew.broker.hset(UNACKED, f"forged-{number}", forged)
    for classic in CLASSICS:
        crew.push(classic)
        crew.broker.publish(COMMAND_CHANNEL, to_bytes(classic))
        await crew.drained()
    is_forgotten = lambda: not crew.broker.exists(UNACKED, UNACKED_INDEX)  # noqa: E731
    await until(is_forgotten, limit=2 * RESTORE_SECONDS, what="an end of what cannot be put back")
    await crew.until_served()


async def test_key_of_another_type_is_reported_and_ends_no_worker(crew: Crew) -> None:
    kept = []
    for key in KEYS:
        if crew.broker.exists(key):
            crew.broker.rename(key, f"kept:{key}")
            kept.append(key)
        crew.broker.set(key, "no list, no hash and no set")
    crew.broker.publish(COMMAND_CHANNEL, plain_command("ping"))
    (cid,) = await crew.cluster.submit(steps(1))
    await crew.cluster.settle([cid])
    await until(lambda: "WRONGTYPE" in crew.cluster.log_of("t1"), what="a line about a key")
    crew.broker.delete(*KEYS)
    for key in kept:
        crew.broker.rename(f"kept:{key}", key)
    await crew.until_served()


@pytest.mark.parametrize(
    "count", [pytest.param(1_000, id="some"), pytest.param(6_000, id="many", marks=pytest.mark.slow)]
)
async def test_no_hostile_message_or_command_ends_a_worker(crew: Crew, count: int) -> None:
    tasks, commands = hostile_tasks(SEED, count), hostile_commands(SEED + 1, count)
    print(f"seed {SEED}")
    for task, command in zip(tasks, commands, strict=True):
        crew.push(task)
        crew.broker.publish(COMMAND_CHANNEL, to_bytes(command))
    await crew.drained()
    await crew.until_served()
    assert crew.broker.hlen(UNACKED) == 0
