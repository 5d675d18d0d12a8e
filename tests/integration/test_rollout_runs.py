"""Rollout runs: groups are formed, cut, dropped, delivered and acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.contract import TERMINAL_STATES, AgentDelegateAction, ConversationCreated
from broker.runtime import UsageError
from broker.store import open_store
from deckhands.client import Client
from deckhands.evaluation import LABEL, AttemptRow, EvaluationSteering
from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.rollouts import (
    COLUMNS,
    Group,
    RolloutRun,
    RolloutSpec,
    RunRecord,
    StubEngine,
    export_rollouts,
    list_runs,
    serve_stub,
)
from deckhands.rollouts.driver import MAX_DELEGATES, compute_reward, read_replies
from tests.archive_parts import retired
from tests.faults.harness import FaultCluster
from tests.polling import until
from tests.rollout_parts import Rollouts, make_prompts

MODEL = "openai/stub"


class HoldingEngine(StubEngine):
    """An engine that holds the replies to prompts with the text `held`, until it is another one."""

    held = ""
    count = 0

    async def generate(
        self, prompt: Sequence[int], tokens: Sequence[int], limit: int | None = None, *, session: str = ""
    ) -> tuple[list[int], list[int], bool]:
        if self.held and self.held in self.tokenizer.decode(prompt):
            self.count += 1
            await until(lambda: not self.held, what="release of held replies")
        return await super().generate(prompt, tokens, limit, session=session)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rollouts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rollouts]:
    engine = HoldingEngine(turns=1, tool="think")
    folder = tmp_path_factory.mktemp("cluster")
    async with serve_stub(engine) as address, FaultCluster(folder).running() as cluster:
        found = Rollouts(cluster, engine, address)
        found.start()
        yield found


@pytest.fixture(autouse=True)
def engine(rollouts: Rollouts) -> HoldingEngine:
    rollouts.engine.turns, rollouts.engine.seconds_per_token = 1, 0.0
    rollouts.engine.policy.version, rollouts.engine.stalls_after = 0, None
    rollouts.engine.refuses = False
    assert isinstance(rollouts.engine, HoldingEngine)
    rollouts.engine.held, rollouts.engine.count = "", 0
    return rollouts.engine


async def start(rollouts: Rollouts, folder: Path, prompts: int | str = 2, **fields: Any) -> RolloutRun:
    rows = make_prompts(prompts) if isinstance(prompts, int) else prompts
    spec = RolloutSpec.parse({"prompts": rows, "model": MODEL, "group_size": 2, **fields})
    return await RolloutRun.start(rollouts.client, spec, directory=folder)


async def read_all(run: RolloutRun) -> list[Group]:
    found = []
    async for group in run.groups():
        found.append(group)
        await group.ack()
    return found


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_groups_arrive_once_with_their_tokens(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 3)
    groups = await read_all(run)
    assert sorted(group.instance for group in groups) == ["prompt-0", "prompt-1", "prompt-2"]
    for group in groups:
        assert len({one.trajectory.conversation_id for one in group.rollouts}) == 2
        assert all(rollouts.find_truth(one.trajectory.segments[0]) for one in group.rollouts)
        assert [one.reward for one in group.rollouts] == [0.0, 0.0]
    assert (await run.load_state()).state == "over"
    assert await read_all(run) == []


async def test_a_trainer_that_died_continues_at_its_ack(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 3)
    reading = run.groups()
    first = await anext(reading)
    await first.ack()
    second = await anext(reading)  # dies before it acknowledges this one
    await reading.aclose()
    again = await RolloutRun.open(rollouts.client, run.name, directory=tmp_path)
    rest = await read_all(again)
    assert rest[0].id == second.id
    assert {first.id, *(group.id for group in rest)} == {f"prompt-{n}-r0" for n in range(3)}
    assert len(rest) == 2


async def test_another_driver_continues_without_the_results(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path / "a", 3)
    reading = run.groups()
    first = await anext(reading)
    await reading.aclose()
    again = await RolloutRun.open(rollouts.client, run.name, directory=tmp_path / "b")
    groups = await read_all(again)
    assert len(groups) == 3
    assert first.id in {group.id for group in groups}
    ids = [one.trajectory.conversation_id for group in groups for one in group.rollouts]
    assert len(ids) == len(set(ids)) == 6


async def test_groups_wait_for_a_slow_trainer(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 4, waiting=1, window=4)
    numbers = []
    async for group in run.groups():
        rows = await rollouts.client.recent(limit=1_000)
        numbers.append(sum(row.labels.get(LABEL) == run.name for row in rows))
        await group.ack()
    assert numbers == [2, 4, 6, 8]


async def test_a_slow_prompt_is_at_most_a_window_behind(
    rollouts: Rollouts, engine: HoldingEngine, tmp_path: Path
) -> None:
    engine.held = "Find the answer 0."
    run = await start(rollouts, tmp_path, 6, window=3)
    driving = asyncio.create_task(run.drive())

    async def are_delivered() -> bool:
        return await run.count_waiting() == 2

    await until(are_delivered, what="the other groups of the window")
    await until(lambda: engine.count == 2, what="held replies")
    rows = [row for row in await rollouts.client.recent(limit=1_000) if row.labels.get(LABEL) == run.name]
    engine.held = ""
    assert {row.title for row in rows} == {"prompt-0", "prompt-1", "prompt-2"}, "a later group has started"
    groups = await read_all(run)
    await driving
    indices = [group.index for group in groups]
    assert set(indices[:2]) == {1, 2}
    assert all(set(range(index - 2)) <= set(indices[:at]) for at, index in enumerate(indices)), indices


async def test_another_program_reads_and_acknowledges_the_stream(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 2, waiting=1)
    driving = asyncio.create_task(run.drive())
    call, key = rollouts.client.store.call, f"deck:{{0}}:rollout:{run.name}:groups"
    read: list[dict[str, Any]] = []

    async def are_read() -> bool:
        for _, rows in await call("XREADGROUP", "GROUP", "trainer", "other", "STREAMS", key, ">") or ():
            for entry_id, fields in rows:
                read.append(json.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"group"]))
                assert await call("XACK", key, "trainer", entry_id) == 1
        return len(read) == 2  # the second group starts once the first one is acknowledged

    await until(lambda: call("EXISTS", key), what="the stream")
    await until(are_read, what="both groups")
    await driving
    assert [one["instance"] for one in read] == ["prompt-0", "prompt-1"]
    for one in read:
        for trajectory in one["trajectories"]:
            found = await rollouts.client.trajectory(trajectory["conversation_id"])
            assert (found.sampled, len(found.segments)) == (trajectory["sampled"], trajectory["segments"])
    assert await read_all(run) == []


async def test_stragglers_are_cut(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1, extra=2)
    (group,) = await read_all(run)
    assert len(group.rollouts) == 2


async def test_a_group_that_became_too_old_is_tried_again(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1, max_staleness=1)
    driving = asyncio.create_task(run.drive())

    async def is_delivered() -> bool:
        return await run.count_waiting() == 1

    await until(is_delivered, what="delivered group")
    for version in (1, 2):
        await rollouts.set_weights(version)
        await run.weights_changed(version)
    (group,) = await read_all(run)
    await driving
    assert (group.id, group.min_version) == ("prompt-0-r1", 2)
    kinds = [(one["kind"], one.get("group")) for one in await run.list_events()]
    assert ("dropped", "prompt-0-r0") in kinds


async def test_a_group_that_grows_too_old_in_flight_starts_again(
    rollouts: Rollouts, engine: StubEngine, tmp_path: Path
) -> None:
    engine.seconds_per_token = 0.01
    run = await start(rollouts, tmp_path, 1, max_staleness=0)
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight == 2, what="replies in flight")
    await rollouts.set_weights(1)
    await run.weights_changed(1)
    (group,) = await read_all(run)
    await driving
    assert (group.round, group.min_version) == (1, 1)


async def test_a_swap_in_mid_reply_is_recorded(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.seconds_per_token = 0.02
    run = await start(rollouts, tmp_path, 1, max_staleness=2)
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight == 2, what="replies in flight")
    await rollouts.set_weights(1)
    await run.weights_changed(1)
    (group,) = await read_all(run)
    await driving
    assert [(one.min_version, one.max_version) for one in group.rollouts] == [(0, 1), (0, 1)]


async def test_a_paused_run_takes_no_step(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.turns, engine.seconds_per_token = 3, 0.01
    run = await start(rollouts, tmp_path, 1, engines=[rollouts.address], on_pause="drain")
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight == 2, what="replies in flight")
    await run.pause()
    assert engine.in_flight == 0
    assert (await run.load_state()).state == "paused"
    engine.seconds_per_token = 0.0
    await run.resume()
    (group,) = await read_all(run)
    await driving
    assert all(len(one.trajectory.segments[0].replies) == 4 for one in group.rollouts)


async def test_replies_that_a_pause_aborts_continue_under_the_next_policy(
    rollouts: Rollouts, engine: StubEngine, tmp_path: Path
) -> None:
    engine.seconds_per_token = 0.02
    run = await start(rollouts, tmp_path, 1, engines=[rollouts.address], on_pause="abort")
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight == 2, what="replies in flight")
    await run.pause()
    await rollouts.set_weights(1)
    await run.weights_changed(1)
    engine.seconds_per_token = 0.0
    await run.resume()
    (group,) = await read_all(run)
    await driving
    assert [(one.min_version, one.max_version) for one in group.rollouts] == [(0, 1), (0, 1)]


async def test_replies_that_a_pause_freezes_continue_after_it(
    rollouts: Rollouts, engine: StubEngine, tmp_path: Path
) -> None:
    engine.seconds_per_token, aborts = 0.02, engine.policy.aborts
    run = await start(rollouts, tmp_path, 1, engines=[rollouts.address], on_pause="keep")
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight == 2, what="replies in flight")
    await run.pause()
    assert (engine.in_flight, engine.policy.is_paused) == (2, True)
    await rollouts.set_weights(1)
    await run.weights_changed(1)
    await run.resume()
    (group,) = await read_all(run)
    await driving
    assert engine.policy.aborts == aborts
    assert [(one.min_version, one.max_version) for one in group.rollouts] == [(0, 1), (0, 1)]


async def test_an_aborted_run_ends(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.seconds_per_token = 0.05
    run = await start(rollouts, tmp_path, 2)
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.in_flight >= 2, what="replies in flight")
    await run.abort()
    await driving
    assert await read_all(run) == []

    async def are_cancelled() -> bool:
        rows = [row for row in await rollouts.client.recent(limit=1_000) if row.labels.get(LABEL) == run.name]
        return all(row.state in TERMINAL_STATES for row in rows)

    await until(are_cancelled, what="cancelled conversations")
    with pytest.raises(UsageError, match="is aborted"):
        await run.pause()


async def test_a_late_group_is_delivered_as_it_is(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.turns, engine.stalls_after = 0, engine.sent + 2
    run = await start(rollouts, tmp_path, 1, group_size=3, smallest_group=2, group_seconds=8)
    (group,) = await read_all(run)
    assert len(group.rollouts) == 2


LIMITS = [{"max_iterations": 2}, {"trajectory_seconds": 8, "retries": 20}]


@pytest.mark.parametrize("limit", LIMITS, ids=["iterations", "seconds"])
async def test_partial_trajectories_are_kept(
    rollouts: Rollouts, engine: StubEngine, tmp_path: Path, limit: dict[str, Any]
) -> None:
    engine.turns, engine.seconds_per_token = 1_000, 0.005
    run = await start(rollouts, tmp_path, 1, **limit)
    (group,) = await read_all(run)
    assert [one.is_partial for one in group.rollouts] == [True, True]
    assert [one.reward for one in group.rollouts] == [0.0, 0.0]
    assert all(sum(segment.mask) for one in group.rollouts for segment in one.trajectory.segments)


async def test_partial_trajectories_are_dropped(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.turns = 1_000
    run = await start(rollouts, tmp_path, 1, max_iterations=2, partial="drop", retries=0)
    assert await read_all(run) == []
    assert [one["reason"] for one in await run.list_events() if one["kind"] == "given_up"] == ["too_small"]


async def test_rewards_are_summed_with_weights(rollouts: Rollouts, tmp_path: Path) -> None:
    scorer = tmp_path / "scorers.py"
    half = '{"reward": 0.5, "metrics": {"lines": 3}}'
    scorer.write_text(
        f"def steps(attempt):\n    return len(attempt.steps)\n\n\ndef half(attempt):\n    return {half}\n"
    )
    run = await start(
        rollouts,
        tmp_path,
        1,
        scorers=[f"{scorer}@steps", f"{scorer}@half"],
        weights={"steps": 0.1, "half": 2.0, "check": 4.0},
    )
    (group,) = await read_all(run)
    assert [one.rewards for one in group.rollouts] == 2 * [{"steps": 2.0, "half": 0.5, "check": 0.0}]
    assert [one.reward for one in group.rollouts] == [pytest.approx(1.2)] * 2


async def test_step_rewards_arrive_in_groups_and_exports(rollouts: Rollouts, tmp_path: Path) -> None:
    scorer = tmp_path / "scorers.py"
    scorer.write_text(
        'def each(attempt):\n    return {"reward": 1.0, "steps": [n / 4 for n, _ in enumerate(attempt.steps)]}\n'
    )
    run = await start(rollouts, tmp_path, 1, scorers=[f"{scorer}@each"])
    (group,) = await read_all(run)
    for one in group.rollouts:
        replies = sum(len(segment.replies) for segment in one.trajectory.segments)
        assert list(one.step_rewards) == [0.0, 0.25]
        assert len(one.step_rewards) == replies
    again = Group.from_json(json.loads(json.dumps(group.as_json())), run.acknowledge)
    assert [one.step_rewards for one in again.rollouts] == [[0.0, 0.25]] * 2
    path = tmp_path / "rows.jsonl"
    await export_rollouts(rollouts.client, run, path, "jsonl")
    assert [json.loads(line)["step_rewards"] for line in path.read_text().splitlines()] == [[0.0, 0.25]] * 2


async def test_a_dataset_of_evaluations_gives_the_prompts_and_the_check(rollouts: Rollouts, tmp_path: Path) -> None:
    rollouts.cluster.start_tool()
    first = read_dataset("shipped")[0]
    run = await start(rollouts, tmp_path, prompts="shipped", only=first.id)
    (group,) = await read_all(run)
    assert group.instance == first.id
    assert [(one.outcome, one.reward) for one in group.rollouts] == [("unresolved", 0.0)] * 2
    for one in group.rollouts:
        (segment,) = one.trajectory.segments
        assert first.task.strip().splitlines()[0] in rollouts.engine.tokenizer.decode(segment.tokens.tolist())


async def test_the_number_of_a_check_is_part_of_rewards() -> None:
    fields: dict[str, Any] = {"prompts": make_prompts(1), "model": MODEL}
    spec = RolloutSpec.parse({**fields, "scorers": ["s.py@brevity"], "weights": {"check": 2.0}})
    about: dict[str, Any] = {"instance": "i", "model": MODEL, "attempt": 1, "outcome": "unresolved"}
    row = AttemptRow(**about, reward=0.25, metrics={"brevity": 0.25, "check": 0.75})
    assert compute_reward(row, spec, has_check=True) == (1.75, {"brevity": 0.25, "check": 0.75})
    row = AttemptRow(**about, reward=0.25, metrics={"brevity": 0.25})
    assert compute_reward(row, spec, has_check=True) == (0.25, {"brevity": 0.25, "check": 0.0})
    spec = RolloutSpec.parse({**fields, "critic": MODEL, "weights": {"check": 1.0}})
    row = AttemptRow(**about, reward=0.5, score=1)
    assert compute_reward(row, spec, has_check=True) == (0.6, {"critic": 0.1, "check": 0.5})


async def test_functions_of_one_name_are_refused(rollouts: Rollouts, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("def half(attempt):\n    return 0.5\n")
    scorers = [f"{tmp_path / name}.py@half" for name in "ab"]
    with pytest.raises(UsageError, match="not distinct"):
        await start(rollouts, tmp_path, 1, scorers=scorers)


async def test_two_drivers_deliver_each_group_once(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path / "a", 3)
    other = await RolloutRun.open(rollouts.client, run.name, directory=tmp_path / "b")
    drivers = [asyncio.create_task(one.drive()) for one in (run, other)]
    groups = await read_all(run)
    await asyncio.gather(*drivers)
    assert len(groups) == len(await other.list_groups()) == 3


async def test_attempts_of_different_rounds_make_a_group(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    await EvaluationSteering(rollouts.client.store, run.name).set_rounds({(MODEL, "prompt-0", 2): 1})
    (group,) = await read_all(run)
    assert group.id == "prompt-0-r0"
    assert len(group.rollouts) == 2


async def test_a_run_waits_for_a_model_that_refuses(rollouts: Rollouts, engine: StubEngine, tmp_path: Path) -> None:
    engine.refuses = True
    run = await start(rollouts, tmp_path, 2)
    reading = asyncio.create_task(read_all(run))

    async def is_silent() -> bool:
        return any(one["kind"] == "model_silent" for one in await run.list_events())

    await until(is_silent, what="model without replies")
    engine.refuses = False
    assert {group.instance for group in await reading} == {"prompt-0", "prompt-1"}


async def test_a_deleted_trajectory_is_tried_again(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    driving = asyncio.create_task(run.drive())

    async def is_delivered() -> bool:
        return await run.count_waiting() == 1

    await until(is_delivered, what="delivered group")
    (about,) = await run.list_groups()
    await rollouts.client.delete(about["trajectories"][0]["conversation_id"])
    (group,) = await read_all(run)
    await driving
    assert group.id == "prompt-0-r1"
    dropped = [one for one in await run.list_events() if one["kind"] == "dropped"]
    assert [(one["group"], one["reason"]) for one in dropped] == [("prompt-0-r0", "unreadable")]


async def test_an_export_names_trajectories_that_are_deleted(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    (group,) = await read_all(run)
    gone = group.rollouts[0].trajectory.conversation_id
    await rollouts.client.delete(gone)
    named: list[str] = []
    out = tmp_path / "a.jsonl"
    assert await export_rollouts(rollouts.client, run, out, "jsonl", on_unreadable=named.append) == 1
    assert named == [gone]


async def test_two_records_deliver_a_group_once(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    first, second = (RunRecord(rollouts.client.store, run.name) for _ in range(2))

    def describe(instance: str, round_: int = 0) -> dict[str, Any]:
        about = {"id": f"{instance}-r{round_}", "index": 0, "instance": instance, "round": round_}
        return {**about, "version": 0, "min_version": 0, "trajectories": []}

    same = await asyncio.gather(first.deliver(describe("a")), second.deliver(describe("a")))
    different = await asyncio.gather(first.deliver(describe("b")), second.deliver(describe("c")))
    assert [*same, *different] == 4 * [True]
    assert not await second.deliver(describe("a", 1)), "another round of a prompt that was delivered"
    await first.add_event("dropped", group="a-r0")
    await second.refresh()
    assert await second.deliver(describe("a", 1))
    assert sorted(one["id"] for one in await run.list_groups()) == ["a-r0", "a-r1", "b-r0", "c-r0"]
    await run.abort()


async def test_runs_that_expired_are_not_listed(rollouts: Rollouts, tmp_path: Path) -> None:
    store = rollouts.client.store
    keys = store.all_shards[0]
    expired, gone = await start(rollouts, tmp_path, 1), await start(rollouts, tmp_path, 1)
    await store.call("ZADD", keys.rollouts, 1, expired.name)
    await store.call("DEL", keys.rollout(gone.name))
    run = await start(rollouts, tmp_path, 1)
    names = await list_runs(store)
    assert run.name in names
    assert expired.name not in names
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    command = (sys.executable, "-m", "deckhands", "rollouts", "ls", "--json")
    environment = {**os.environ, "DECKHANDS_URL": url}
    child = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    shown, _ = await child.communicate()
    assert child.returncode == 0
    listed = {one["name"] for one in json.loads(shown)}
    assert run.name in listed
    assert gone.name not in listed
    await run.abort()


async def test_a_pause_does_not_count_as_time_of_a_group(rollouts: Rollouts, tmp_path: Path) -> None:
    record = RunRecord(rollouts.client.store, "measured")
    record.events += [{"kind": kind, "at": at} for kind, at in (("paused", 5.0), ("running", 8.0), ("paused", 20.0))]
    assert record.measure_pauses(0.0, 21.0) == 4.0
    assert record.measure_pauses(6.0, 20.0) == 2.0
    assert record.measure_pauses(9.0, 20.0) == 0.0


async def test_tokens_survive_the_archive(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    (group,) = await read_all(run)
    before = group.rollouts[0].trajectory
    url = rollouts.cluster.url_for_workers or rollouts.cluster.store.url
    async with Client(await open_store(url), str(tmp_path / "archive")) as client:
        counts = await retired(client.store, tmp_path / "archive", tmp_path)
        assert counts["archived"] >= 2
        assert await client.trajectory(before.conversation_id) == before
        assert await client.restore(before.conversation_id)
    assert await rollouts.client.trajectory(before.conversation_id) == before, "without the archive"


async def test_stragglers_of_a_dead_driver_are_cancelled(
    rollouts: Rollouts, engine: StubEngine, tmp_path: Path
) -> None:
    client = rollouts.client
    sent = engine.sent
    engine.turns, engine.stalls_after = 0, sent
    run = await start(rollouts, tmp_path, 1)
    driving = asyncio.create_task(run.drive())
    await until(lambda: engine.sent == sent + 2, what="stalled replies")
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    rows = [row for row in await client.recent(limit=1_000) if row.labels.get(LABEL) == run.name]
    await EvaluationSteering(client.store, run.name).set_rounds({(MODEL, "prompt-0", n): 1 for n in (1, 2)})
    engine.stalls_after = None
    (group,) = await read_all(run)
    assert group.round == 1

    async def are_over() -> bool:
        states = [(await client.row(row.conversation_id)).state for row in rows]
        return set(states) <= TERMINAL_STATES

    await until(are_over, what="end of the conversations of the earlier round")


async def test_exports_have_the_documented_columns(rollouts: Rollouts, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = await start(rollouts, tmp_path, 2)
    await read_all(run)
    lines = tmp_path / "a.jsonl"
    assert await export_rollouts(rollouts.client, run, lines, "jsonl") == 4
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    table = tmp_path / "a.parquet"
    assert await export_rollouts(rollouts.client, run, table, "parquet") == 4
    found = parquet.read_table(table)
    assert found.schema.names == list(COLUMNS)
    assert found.column("tokens").to_pylist() == [row["tokens"] for row in rows]
    assert found.column("mask").to_pylist() == [row["mask"] for row in rows]


async def test_a_name_has_one_specification(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    with pytest.raises(UsageError, match="another specification"):
        await RolloutRun.start(
            rollouts.client, RolloutSpec(prompts=tuple(make_prompts(2)), model=MODEL), name=run.name, directory=tmp_path
        )
    with pytest.raises(UsageError, match="no rollout run"):
        await RolloutRun.open(rollouts.client, "not-there", directory=tmp_path)
    await run.weights_changed(3)
    with pytest.raises(UsageError, match="at version 3"):
        await run.weights_changed(2)
    assert (await run.load_state()).version == 3
    await run.abort()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group_size": 0}, "group_size"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"engines": ["ftp://x"]}, "engines"),
        ({"prompts": []}, "prompts"),
        ({"on_pause": "stop"}, "on_pause"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_a_bad_specification_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        RolloutSpec.parse({"prompts": make_prompts(1), "model": MODEL, **fields})


async def test_foreign_entries_of_the_streams_are_passed_over(rollouts: Rollouts, tmp_path: Path) -> None:
    run = await start(rollouts, tmp_path, 1)
    keys = rollouts.client.store.all_shards[0]
    await rollouts.client.store.call("XADD", keys.rollout_groups(run.name), "1-0", "group", "[]")
    partial = json.dumps({"id": "x-r0", "index": 0, "trajectories": [{"conversation_id": "c"}]})
    await rollouts.client.store.call("XADD", keys.rollout_groups(run.name), "2-0", "group", partial)
    await rollouts.client.store.call("XADD", keys.rollout_events(run.name), "*", "event", "\xff{")
    await rollouts.client.store.call("HSET", keys.rollout(run.name), "state", "?")
    await rollouts.client.store.call("ZADD", keys.rollout_version(run.name), "inf", "policy")
    (group,) = await read_all(run)
    assert group.instance == "prompt-0"


async def test_many_delegates_of_a_trajectory_are_cut(rollouts: Rollouts) -> None:
    log, name = rollouts.client.log, "with-many-delegates"
    rollouts.cluster.forged.add(name)  # it has no replies
    await log.create(ConversationCreated(conversation_id=name), [], key="create")
    work = [AgentDelegateAction(agent="CodeActAgent", inputs={"task": str(n)}) for n in range(MAX_DELEGATES + 3)]
    await log.append(name, work, key="work")
    found = await read_replies(rollouts.client, name)
    assert (found["delegates"], found["unread_delegates"]) == ([], 3)
