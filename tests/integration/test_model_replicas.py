"""Replicas of a model with real workers and engines: killed, added and removed, with an address that was forged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest_asyncio

from broker.contract import AgentSpec, Limits, ModelCallFailed, ModelReply
from broker.limits import QuotaTable
from deckhands.operations import read_quotas
from deckhands.rollouts import StubEngine, serve_stub
from tests.faults.harness import FaultCluster
from tests.rollout_parts import make_environment

MODEL = "openai/stub"
AGENT = AgentSpec(enable_workspace_skills=False, enable_stuck_detection=False)


class Fleet:
    """Engines of one model, the file that names them, and a cluster that calls them."""

    def __init__(self, cluster: FaultCluster, path: Path) -> None:
        self.cluster, self.path = cluster, path
        self.engines: list[StubEngine] = []
        self.addresses: list[str] = []
        self._stacks: list[AsyncExitStack] = []

    async def add(self, count: int, *, turns: int = 3, seconds_per_token: float = 0.0) -> None:
        """Start engines; they are not in the file yet."""
        for _ in range(count):
            engine, stack = StubEngine(turns, seconds_per_token, tool="think"), AsyncExitStack()
            self.engines.append(engine)
            self.addresses.append(await stack.enter_async_context(serve_stub(engine)))
            self._stacks.append(stack)

    async def stop(self, number: int) -> None:
        """End an engine, with its replies in flight."""
        await self._stacks[number].aclose()

    def write(self, numbers: Sequence[int], *, concurrency: int = 8) -> None:
        """Write the file with these engines."""
        rows = (
            f'[[quota]]\nmodel = "{MODEL}"\nbase_url = "{self.addresses[n]}/v1"\nconcurrency = {concurrency}\n'
            for n in numbers
        )
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(rows))
        new.rename(self.path)

    def start_worker(self, name: str = "c1") -> None:
        # The model's own address has no engine: only replicas can answer.
        environment = make_environment("http://127.0.0.1:9", "chat")
        self.cluster.start_controller(name, DECKHANDS_QUOTAS=str(self.path), **environment)

    async def submit(self, count: int) -> list[str]:
        limits = Limits(max_iterations=200)
        return [
            await self.cluster.client.submit(f"Do it: {n}.", agent=AGENT, limits=limits, model=MODEL)
            for n in range(count)
        ]

    async def finish(self, ids: Sequence[str]) -> None:
        """Wait until all conversations have finished without a failed call that a user would see."""
        for cid in ids:
            await self.cluster.client.watcher.wait(cid)
            assert (await self.cluster.client.summary(cid)).state == "finished"

    async def count_failures(self, ids: Sequence[str]) -> int:
        events = [event for cid in ids for event in await self.cluster.client.events(cid)]
        return sum(isinstance(event, ModelCallFailed) for event in events)

    async def aclose(self) -> None:
        for stack in self._stacks:
            await stack.aclose()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with FaultCluster(tmp_path).running() as cluster:
        made = Fleet(cluster, tmp_path / "quotas.toml")
        try:
            yield made
        finally:
            await made.aclose()


async def test_each_conversation_stays_at_one_replica(fleet: Fleet) -> None:
    await fleet.add(2)
    fleet.write([0, 1])
    fleet.start_worker()
    ids = await fleet.submit(6)
    await fleet.finish(ids)
    answered = [len(engine.truth) for engine in fleet.engines]
    assert sum(answered) == 6 * 4
    assert all(count % 4 == 0 for count in answered), answered


async def test_a_killed_replica_fails_no_call(fleet: Fleet) -> None:
    await fleet.add(2, turns=20, seconds_per_token=0.001)
    fleet.write([0, 1])
    fleet.start_worker()
    ids = await fleet.submit(6)

    async def works() -> bool:
        return all(len(engine.truth) >= 4 for engine in fleet.engines)

    await fleet.cluster.until(works, limit=60, what="replies of both engines")
    await fleet.stop(0)
    await fleet.finish(ids)
    assert await fleet.count_failures(ids) == 0
    replies = [event for cid in ids for event in await fleet.cluster.client.events(cid)]
    assert sum(isinstance(event, ModelReply) for event in replies) == 6 * 21

    async def is_shown() -> bool:
        (quota,) = await read_quotas(fleet.cluster.client.store)
        return "it does not answer" in [key.binds for key in quota.keys]

    await fleet.cluster.until(is_shown, limit=60, what="the replica that does not answer")


async def test_replicas_are_added_and_removed_under_load(fleet: Fleet) -> None:
    await fleet.add(2, turns=40, seconds_per_token=0.001)
    fleet.write([0])
    fleet.start_worker()
    ids = await fleet.submit(4)

    async def works(number: int) -> bool:
        return len(fleet.engines[number].truth) >= 4

    await fleet.cluster.until(lambda: works(0), limit=60, what="replies of the first engine")
    assert not fleet.engines[1].truth
    fleet.write([1])
    await fleet.cluster.until(lambda: works(1), limit=60, what="replies of the added engine")
    await fleet.finish(ids)
    assert await fleet.count_failures(ids) == 0


async def test_an_invalid_file_keeps_the_table_in_force(fleet: Fleet) -> None:
    await fleet.add(1)
    fleet.write([0])
    fleet.start_worker()
    await fleet.finish(await fleet.submit(1))
    fleet.path.write_text('[[quota]]\nmodel = "openai/*"\nbase_url = "http://127.0.0.1:9"\n')

    async def is_refused() -> bool:
        return "the quota table in force stays" in fleet.cluster.log_of("c1")

    await fleet.cluster.until(is_refused, limit=60, what="the refusal of the file")
    await fleet.finish(await fleet.submit(1))


async def test_a_forged_replica_in_the_store_gets_no_prompt(fleet: Fleet) -> None:
    await fleet.add(2)
    fleet.write([0])
    fleet.start_worker()
    await fleet.finish(await fleet.submit(1))
    forged = fleet.addresses[1].partition("://")[2].replace(".", "_").replace(":", "_")
    table = QuotaTable.load_setting(str(fleet.path))
    store, name = fleet.cluster.client.store, table.pools[0].name
    limits = f"{store.find_home(name).quota(name)}:limits"
    key = f"at_{forged}_v1"
    await store.connection.call("HSET", limits, "keys", key, key, table.pools[0].quotas[0].render_limits())
    await fleet.finish(await fleet.submit(2))
    assert not fleet.engines[1].truth
