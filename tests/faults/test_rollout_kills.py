"""A rollout run whose workers, driver and trainer are killed, while the engine swaps weights in mid-reply.

Each group is delivered once, with the tokens that the engine sampled, and none of them is too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.contract import TERMINAL_STATES, AgentState
from deckhands.client import Segment
from deckhands.evaluation import LABEL
from deckhands.rollouts import RolloutRun, RolloutSpec, StubEngine, serve_stub
from tests.faults.harness import FaultCluster
from tests.polling import unhurried, until
from tests.rollout_parts import Rollouts, count_mismatches, make_prompts

GROUPS, GROUP_SIZE, TURNS = 10, 4, 4
MAX_STALENESS = 2
KILLS_OF_WORKERS = 4
TRAINER = """
import asyncio, json, sys
from deckhands import Client
from deckhands.rollouts import RolloutRun

async def main(url, name, out):
    async with await Client.connect(url) as client:
        run = await RolloutRun.open(client, name)
        async for group in run.groups(drives=False):
            rows = [one.trajectory.as_json() for one in group.rollouts]
            version = (await run.load_state()).version
            with open(out, "a") as file:
                file.write(json.dumps({"id": group.id, "min": group.min_version, "at": version, "rows": rows}) + "\\n")
            await group.ack()

asyncio.run(main(*sys.argv[1:]))
"""

ARMED = (
    "import runpy; from broker.runtime import BrokerSettings; from broker.runtime.failpoints import arm;"
    "arm(BrokerSettings.from_env()); runpy.run_module('deckhands', run_name='__main__', alter_sys=True)"
)
"""The command `deckhands` with failpoints."""


@pytest_asyncio.fixture
async def rollouts(tmp_path: Path) -> AsyncIterator[Rollouts]:
    engine = StubEngine(turns=TURNS, tool="think", seconds_per_token=0.0005)
    async with serve_stub(engine) as address, FaultCluster(tmp_path).running() as cluster:
        found = Rollouts(cluster, engine, address)
        for name in ("c1", "c2"):
            found.start(name=name)
        yield found


class Program:
    """A process that is started again whenever it was killed."""

    def __init__(self, *command: str, environment: dict[str, str], log: Path) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, stdout=out, stderr=out
            )

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def end(self) -> int:
        assert self._process is not None
        return await self._process.wait()


async def test_kills_lose_and_double_no_group_and_no_token(rollouts: Rollouts, tmp_path: Path) -> None:
    client, engine = rollouts.client, rollouts.engine
    spec = RolloutSpec(
        prompts=tuple(make_prompts(GROUPS)),
        model="openai/stub",
        group_size=GROUP_SIZE,
        max_staleness=MAX_STALENESS,
        retries=20,
        window=GROUPS,
        at_once=16,
    )
    run = await RolloutRun.start(client, spec, directory=tmp_path / "run")
    out, script = tmp_path / "groups.jsonl", tmp_path / "trainer.py"
    out.touch()
    script.write_text(TRAINER)
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    environment = {**os.environ, "DECKHANDS_URL": url, "DECKHANDS_HOME": str(tmp_path / "home")}
    attach = ("-m", "deckhands", "rollouts", "attach", run.name, "--directory", str(tmp_path / "run"))
    driver = Program(sys.executable, *attach, environment=environment, log=tmp_path / "driver.log")
    trainer = Program(
        sys.executable, str(script), url, run.name, str(out), environment=environment, log=tmp_path / "trainer.log"
    )
    await driver.start()
    await trainer.start()

    async def replies(number: int) -> None:
        await until(lambda: len(engine.truth) >= number, what=f"{number} replies", limit=120)

    async def swap() -> None:
        """Update the weights in the middle of replies."""
        version = engine.policy.version + 1
        await rollouts.set_weights(version)
        await run.weights_changed(version)

    for number in range(KILLS_OF_WORKERS):
        await replies(20 * (number + 1))
        name = f"c{1 + number % 2}"
        rollouts.cluster.kill(name)
        rollouts.start(name=name)
        if number == 1:
            await driver.kill()
            await driver.start()
        if number in (0, 2):
            await swap()
    await until(lambda: out.read_text().count("\n") >= 2, what="groups at the trainer", limit=120)
    await trainer.kill()
    await swap()  # groups with tokens of the first policy are too old now
    await driver.kill()
    await driver.start()
    await trainer.start()
    async with asyncio.timeout(unhurried(240)):
        assert await trainer.end() == 0, (tmp_path / "trainer.log").read_text()
        assert await driver.end() == 0, (tmp_path / "driver.log").read_text()

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    delivered = {one["id"]: one for one in lines}  # one that was written and not acknowledged comes again
    groups = await run.list_groups()
    dropped = {one["group"] for one in await run.list_events() if one["kind"] == "dropped"}
    given_up = [one for one in await run.list_events() if one["kind"] == "given_up"]
    assert len({one["id"] for one in groups}) == len(groups), "doubled"
    assert {one["instance"] for one in groups if one["id"] not in dropped} == {f"prompt-{n}" for n in range(GROUPS)}
    assert set(delivered) == {one["id"] for one in groups} - dropped, "lost"
    assert given_up == []
    assert all(one["at"] - one["min"] <= MAX_STALENESS for one in lines), "over-stale"
    truth: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in engine.truth:
        truth[tuple(row["prompt"])].append(row)
    segments = [
        Segment.from_json(segment) for one in delivered.values() for row in one["rows"] for segment in row["segments"]
    ]
    assert len(segments) == GROUPS * GROUP_SIZE, "a trajectory was broken into segments"
    assert sum(count_mismatches(segment, truth) for segment in segments) == 0
    assert all(len(segment.replies) == TURNS + 1 for segment in segments)
    assert len({version for segment in segments for version in segment.versions if version >= 0}) > 1
    rows = [row for row in await client.recent(limit=1_000) if row.labels.get(LABEL) == run.name]
    assert len(rows) >= GROUPS * GROUP_SIZE


async def test_a_pause_outlives_the_workers_and_the_driver(rollouts: Rollouts, tmp_path: Path) -> None:
    client, engine = rollouts.client, rollouts.engine
    engine.seconds_per_token = 0.01
    spec = RolloutSpec(prompts=tuple(make_prompts(2)), model="openai/stub", group_size=2)
    run = await RolloutRun.start(client, spec, directory=tmp_path / "run")
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    environment = {**os.environ, "DECKHANDS_URL": url, "DECKHANDS_HOME": str(tmp_path / "home")}
    attach = ("-m", "deckhands", "rollouts", "attach", run.name, "--directory", str(tmp_path / "run"))
    driver = Program(sys.executable, *attach, environment=environment, log=tmp_path / "driver.log")
    await driver.start()
    await until(lambda: engine.in_flight == 4, what="replies in flight", limit=60)
    await run.pause()

    async def are_paused() -> bool:
        rows = [row for row in await client.recent(limit=100) if row.labels.get(LABEL) == run.name]
        return [row.state for row in rows] == [AgentState.PAUSED] * 4

    await until(are_paused, what="paused conversations")
    sent, lease = engine.sent, f"deck:{{0}}:rollout:{run.name}:driver"
    before = await client.store.call("GET", lease)
    await driver.kill()
    for name in ("c1", "c2"):
        rollouts.cluster.kill(name)
        rollouts.start(name=name)
    await driver.start()

    async def has_another_driver() -> bool:
        return await client.store.call("GET", lease) not in (None, before)

    await until(has_another_driver, what="another driver", limit=60)
    engine.seconds_per_token = 0.0
    other = await client.submit("Do it.")
    await client.watcher.wait(other)
    assert engine.sent == sent + TURNS + 1, "a paused trajectory has taken a step"
    assert await are_paused()
    await run.resume()
    groups = []
    async with asyncio.timeout(unhurried(120)):
        async for group in run.groups(drives=False):
            groups.append(group)
            await group.ack()
        assert await driver.end() == 0, (tmp_path / "driver.log").read_text()
    assert {group.id for group in groups} == {"prompt-0-r0", "prompt-1-r0"}
    segments = [one.trajectory.segments for group in groups for one in group.rollouts]
    assert [[len(one.replies) for one in each] for each in segments] == [[TURNS + 1]] * 4


@pytest.mark.parametrize("boundary", ["before_delivery", "after_delivery"])
async def test_a_driver_that_dies_at_a_delivery_is_replaced(rollouts: Rollouts, tmp_path: Path, boundary: str) -> None:
    client, engine = rollouts.client, rollouts.engine
    engine.turns, engine.stalls_after = 0, 2  # the third trajectory is a straggler, which is cut
    spec = RolloutSpec(prompts=tuple(make_prompts(1)), model="openai/stub", group_size=2, extra=1)
    run = await RolloutRun.start(client, spec, directory=tmp_path / "run")
    environment = {
        **os.environ,
        "DECKHANDS_URL": rollouts.cluster.url_for_workers or rollouts.cluster.store.url,
        "DECKHANDS_HOME": str(tmp_path / "home"),
        "DECKHANDS_FAILPOINTS": f"rollouts.{boundary}:kill@1:{tmp_path / 'once'}",
    }
    attach = ("-c", ARMED, "rollouts", "attach", run.name, "--directory", str(tmp_path / "run"))
    driver = Program(sys.executable, *attach, environment=environment, log=tmp_path / "driver.log")
    await driver.start()
    async with asyncio.timeout(unhurried(120)):
        assert await driver.end() == -signal.SIGKILL, (tmp_path / "driver.log").read_text()
        await driver.start()
        groups = []
        async for group in run.groups(drives=False):
            groups.append(group)
            await group.ack()
        assert await driver.end() == 0, (tmp_path / "driver.log").read_text()
    assert [group.id for group in groups] == [one["id"] for one in await run.list_groups()] == ["prompt-0-r0"]
    assert len(groups[0].rollouts) == 2

    async def is_all_over() -> bool:
        rows = [row for row in await client.recent(limit=1_000) if row.labels.get(LABEL) == run.name]
        return len(rows) == 3 and all(row.state in TERMINAL_STATES for row in rows)

    await until(is_all_over, what="end of the straggler")
