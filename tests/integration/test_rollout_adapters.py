"""Rollouts for other programs: TRL's rollout function, and episodes of several agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from broker.runtime import UsageError
from deckhands.rollouts import (
    Group,
    RolloutRun,
    RolloutSpec,
    StubEngine,
    export_rollouts,
    get_reward,
    make_rollout_function,
    serve_stub,
)
from tests.faults.harness import FaultCluster
from tests.rollout_parts import Rollouts, make_prompts

MODEL = "openai/stub"
NEEDED = {"prompt_ids", "completion_ids", "logprobs"}
"""The fields that TRL requires. `env_mask` is read, too, and the others go to the reward functions."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rollouts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rollouts]:
    engine = StubEngine(turns=1, tool="think", delegates=True)
    cluster = FaultCluster(tmp_path_factory.mktemp("cluster"))
    async with serve_stub(engine) as address, cluster.running() as running:
        found = Rollouts(running, engine, address)
        found.start("chat_tokens")
        yield found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep results of other tests, and of other runs of this one, out of the runs, whose names are fixed."""
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))


async def test_delegates_are_a_part_of_the_episode(rollouts: Rollouts, tmp_path: Path) -> None:
    fields = {"prompts": make_prompts(1), "model": MODEL, "group_size": 2, "delegation": True}
    run = await RolloutRun.start(rollouts.client, RolloutSpec.parse(fields), directory=tmp_path / "run")
    (group,) = [group async for group in take_all(run)]
    for rollout in group.rollouts:
        (delegate,) = rollout.delegates
        assert delegate.sampled > 0
        assert rollout.trajectory.sampled > 0
        assert delegate.conversation_id != rollout.trajectory.conversation_id
        for trajectory in (rollout.trajectory, delegate):
            assert all(rollouts.find_truth(segment) for segment in trajectory.segments)
    assert Group.from_json(json.loads(json.dumps(group.as_json())), run.acknowledge).as_json() == group.as_json()
    path = tmp_path / "rows.jsonl"
    await export_rollouts(rollouts.client, run, path, "jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["delegate_of"] for row in rows} == {"", *(one.trajectory.conversation_id for one in group.rollouts)}


async def take_all(run: RolloutRun) -> AsyncIterator[Group]:
    async for group in run.groups():
        yield group
        await group.ack()


def make_trainer(step: int, process: int = 0) -> Any:
    """Return the part of a trainer that the function reads."""
    return SimpleNamespace(state=SimpleNamespace(global_step=step), accelerator=SimpleNamespace(process_index=process))


async def test_trl_gets_exact_tokens_in_the_order_of_its_prompts(rollouts: Rollouts, tmp_path: Path) -> None:
    rows = make_prompts(2)
    spec = RolloutSpec.parse({"prompts": rows, "model": MODEL})
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    roll_out = make_rollout_function(spec, name="trl", url=url)
    first, second = (row["task"] for row in rows)
    prompts = [first, [{"role": "user", "content": second}], first, [{"role": "user", "content": second}]]
    found = await asyncio.to_thread(roll_out, prompts, make_trainer(0))
    assert found.keys() >= NEEDED
    assert {len(values) for values in found.values()} == {len(prompts)}
    assert len(set(found["conversation_id"])) == len(prompts)
    for at in range(len(prompts)):
        tokens, mask = found["prompt_ids"][at] + found["completion_ids"][at], found["env_mask"][at]
        assert len(mask) == len(found["completion_ids"][at]) == len(found["logprobs"][at])
        assert mask[0] == mask[-1] == 1
        shown = rollouts.engine.tokenizer.decode(found["prompt_ids"][at])
        assert (first if at % 2 == 0 else second) in shown
        (segment,) = (await rollouts.client.trajectory(found["conversation_id"][at])).segments
        assert segment.tokens.tolist() == tokens
        assert len(rollouts.find_truth(segment)) == len(segment.replies) == 2
        assert sum(mask) == sum(segment.mask)
    assert get_reward(**found) == found["reward"] == [0.0] * len(prompts)


async def test_a_trainer_that_calls_again_continues_its_step(rollouts: Rollouts) -> None:
    spec = RolloutSpec.parse({"prompts": make_prompts(1), "model": MODEL})
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    prompts = [make_prompts(1)[0]["task"]] * 2
    found = [
        await asyncio.to_thread(make_rollout_function(spec, name="again", url=url), prompts, make_trainer(step))
        for step in (3, 3, 4)
    ]
    assert found[0]["conversation_id"] == found[1]["conversation_id"]
    assert found[0]["completion_ids"] == found[1]["completion_ids"]
    assert not set(found[0]["conversation_id"]) & set(found[2]["conversation_id"])


async def test_processes_of_one_trainer_have_separate_runs(rollouts: Rollouts) -> None:
    spec = RolloutSpec.parse({"prompts": make_prompts(1), "model": MODEL})
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    prompts = [make_prompts(1)[0]["task"]] * 2
    found = [
        await asyncio.to_thread(make_rollout_function(spec, name="ranks", url=url), prompts, make_trainer(0, process))
        for process in (0, 1)
    ]
    assert not set(found[0]["conversation_id"]) & set(found[1]["conversation_id"])


async def test_a_prompt_without_a_row_is_named(rollouts: Rollouts) -> None:
    spec = RolloutSpec.parse({"prompts": make_prompts(1), "model": MODEL})
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    with pytest.raises(UsageError, match="Another task"):
        await asyncio.to_thread(make_rollout_function(spec, name="no", url=url), ["Another task"], make_trainer(0))
    with pytest.raises(UsageError, match="the same task"):
        make_rollout_function(spec.model_copy(update={"prompts": (*spec.prompts, *spec.prompts)}), name="no")
