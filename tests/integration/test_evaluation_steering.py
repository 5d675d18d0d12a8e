"""Evaluations that are steered while they run, through the store, as by another process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import pytest_asyncio

from broker.contract.events import AgentSpec, Limits, LLMSpec
from broker.contract.observations import CmdOutputObservation
from broker.runtime.errors import UsageError
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings
from deckhands.client.client import Client
from deckhands.client.forking import ForkPoint
from deckhands.evaluation.attempts.catalog import Catalog
from deckhands.evaluation.attempts.driver import Driver
from deckhands.evaluation.attempts.in_flight import AttemptInFlight, build_unscored_row
from deckhands.evaluation.attempts.plan import LABEL, EvaluationPlan
from deckhands.evaluation.attempts.results import AttemptRow, Results, ResultsInUse, read_results
from deckhands.evaluation.attempts.status import AttemptDetails, EvaluationStatus
from deckhands.evaluation.attempts.steering import DesiredState, EvaluationSteering, Requeue, StoredSteering
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.evaluation import Evaluation
from deckhands.evaluation.siblings import compare_siblings
from tests.evaluation_parts import questions
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, run_command, script
from tests.polling import until


def gated(gate: Path) -> dict[str, object]:
    """A turn with a command that ends once a file is there."""
    arguments = {"command": f"until [ -e {gate} ]; do sleep 0.05; done", "timeout": 300}
    return {"tool_calls": [{"name": "execute_bash", "arguments": arguments}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with FaultCluster(folder).running() as cluster:
        cluster.start_controller("c1")
        cluster.start_tool("t1", DECKHANDS_CHECKPOINTS=str(folder / "checkpoints"), DECKHANDS_CHECKPOINT_EVERY="1")
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: FaultCluster) -> Client:
    return cluster.client


class Running:
    """A running evaluation, and its reports about itself."""

    def __init__(self, client: Client, plan: EvaluationPlan, results: Results) -> None:
        self.steering = EvaluationSteering(client.store, plan.name)
        self.rows: list[AttemptRow] = []
        self.statuses: list[EvaluationStatus] = []
        evaluation = Evaluation(client, plan, results, on_row=self.rows.append, on_status=self.statuses.append)
        self.task = asyncio.create_task(evaluation.run())

    def attempts(self) -> Sequence[AttemptDetails]:
        """Return the running attempts."""
        return self.statuses[-1].attempts if self.statuses else ()

    async def stands(self, **fields: object) -> None:
        """Wait until the status matches."""
        await until(
            lambda: self.statuses and all(getattr(self.statuses[-1], name) == value for name, value in fields.items()),
            what=str(fields),
        )

    async def ended(self) -> list[tuple[str, str, str]]:
        """Wait until it has ended, and return its outcomes in order."""
        await asyncio.wait_for(self.task, 60)
        return [(row.instance, row.outcome, row.cause) for row in self.rows]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_paused_evaluation_begins_nothing_and_continues_where_it_was(
    client: Client, results: Results, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    model = script(tmp_path / "m.json", gated(gate), run_command("true"), finish("6"))
    running = Running(
        client, EvaluationPlan("pause", questions("a", "b"), [model], at_once=1, tenant="acme", dataset="sums"), results
    )
    await running.stands(in_flight=1)
    await until(lambda: running.statuses[-1].attempts[0].waits_for == "tool", what="attempt at work")
    await running.steering.set_desired(state="paused")
    await running.stands(state="paused")
    gate.touch()

    async def is_paused() -> bool:
        rows = [row for row in await client.recent() if row.labels.get(LABEL) == "pause"]
        return [row.state for row in rows] == ["paused"]

    await until(is_paused, what="paused conversation")
    assert running.rows == []
    await running.steering.set_desired(state="running")
    assert await running.ended() == [("a", "resolved", ""), ("b", "resolved", "")]
    assert running.rows[0].waiting_seconds["paused"] > 0
    assert running.rows[0].working_seconds > 0
    found = await Catalog(client.store).find("pause")
    assert found is not None
    assert found.status is not None
    assert (found.status.state, found.status.outcomes) == ("over", {"resolved": 2})
    assert (found.about.tenant, found.about.dataset, found.about.models) == ("acme", "sums", (model,))
    rows = [row for row in await client.recent() if row.labels.get(LABEL) == "pause"]
    assert [(row.tenant, row.model) for row in rows] == 2 * [("acme", model)]
    assert await Catalog(client.store).rows("pause") == running.rows


@pytest.mark.asyncio(loop_scope="module")
async def test_cancelled_evaluation_has_all_rows_and_continues_by_requeue(
    client: Client, results: Results, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    model = script(tmp_path / "m.json", gated(gate), finish("6"))
    plan = EvaluationPlan("cancel", questions("a", "b", "c"), [model], at_once=1)
    running = Running(client, plan, results)
    await until(lambda: any(one.waits_for == "tool" for one in running.attempts()), what="attempt at work")
    await running.steering.set_desired(state="cancelled")
    assert sorted(await running.ended()) == [(name, "not-run", "cancelled") for name in ("a", "b", "c")]
    (stopped,) = [row for row in running.rows if row.conversation_id]
    assert (await client.wait_until_settled(stopped.conversation_id)).state == "stopped"

    gate.touch()
    await running.steering.set_desired(state="running")
    await running.steering.requeue(Requeue(outcomes=("not-run",), instances=("a", "c")))
    again = Running(client, plan, results)
    assert sorted(await again.ended()) == [("a", "resolved", ""), ("c", "resolved", "")]
    assert {row.round for row in again.rows} == {1}
    kept = {row.instance: row.outcome for row in read_results(results.path)}
    assert kept == {"a": "resolved", "b": "not-run", "c": "resolved"}


@pytest.mark.asyncio(loop_scope="module")
async def test_running_attempts_restart_and_repeated_requeue_counts_once(
    client: Client, results: Results, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    model = script(tmp_path / "m.json", gated(gate), finish("6"))
    running = Running(client, EvaluationPlan("again", questions("a"), [model]), results)
    await until(lambda: any(one.conversation_id for one in running.attempts()), what="attempt under way")
    first = running.statuses[-1].attempts[0].conversation_id
    await running.steering.requeue(Requeue(outcomes=("running",), instances=("a",)))
    await until(
        lambda: any(one.conversation_id not in ("", first) for one in running.attempts()),
        what="another conversation",
    )
    wanted = await running.steering.read()
    assert (wanted.orders, wanted.rounds) == ({}, {(model, "a", 1): 1})
    gate.touch()
    assert await running.ended() == [("a", "resolved", "")]
    assert running.rows[0].failures == []
    assert (await client.wait_until_settled(first)).state == "stopped"
    # A driver that dies behind the grant leaves the next round to the next one.
    await running.steering.grant_order("read", {(model, "a", 1): 2})
    again = Running(client, EvaluationPlan("again", questions("a"), [model]), results)
    assert await again.ended() == [("a", "resolved", "")]
    assert again.rows[0].round == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_budget_and_concurrency_in_the_store_bind_every_driver(
    client: Client, results: Results, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    model = script(tmp_path / "m.json", gated(gate), finish("6"))
    plan = EvaluationPlan("tuned", questions(*"abcdef"), [model], at_once=1)
    await EvaluationSteering(client.store, "tuned").set_desired(at_once=2)
    running = Running(client, plan, results)
    await running.stands(in_flight=2)
    assert running.statuses[-1].bound == "-n 2"
    await running.steering.set_desired(at_once=3)
    await running.stands(in_flight=3)
    await running.steering.set_desired(budget_usd=0.0)
    await until(lambda: len(running.rows) == 3, what="attempts left out")
    assert {(row.outcome, row.cause) for row in running.rows} == {("limit", "evaluation_budget")}
    gate.touch()
    assert [outcome for _, outcome, _ in await running.ended()][3:] == ["resolved"] * 3


@pytest.mark.asyncio(loop_scope="module")
async def test_it_ends_early_once_enough_is_known(client: Client, results: Results, tmp_path: Path) -> None:
    right, wrong = (script(tmp_path / f"{name}.json", finish(name)) for name in ("6", "7"))
    names = [f"q{number}" for number in range(30)]
    plan = EvaluationPlan("early", questions(*names), [right, wrong], at_once=4, until="decided")
    running = Running(client, plan, results)
    ended = await running.ended()
    left_out = [cause for _, outcome, cause in ended if outcome == "not-run"]
    assert len(ended) == plan.size
    assert 0 < len(left_out) < plan.size
    assert all("is better than" in cause for cause in left_out)
    again = Running(client, plan, results)
    assert await again.ended() == []
    # A user's requeue still takes effect.
    skipped = next(instance for instance, outcome, _ in ended if outcome == "not-run")
    await again.steering.requeue(Requeue(outcomes=("not-run",), instances=(skipped,)))
    carried_out = await Running(client, plan, results).ended()
    assert carried_out
    assert {(instance, outcome == "not-run") for instance, outcome, _ in carried_out} == {(skipped, False)}


@pytest.mark.asyncio(loop_scope="module")
async def test_forged_values_in_the_store_are_ignored(client: Client) -> None:
    steering, key = EvaluationSteering(client.store, "forged"), client.store.all_shards[0].evaluation("forged")
    fields = {
        "state": "exploded",
        "at_once": "-5",
        "budget_usd": "much",
        "status": "[1",
        "order:x": '{"outcomes": 3}',
        "round:nonsense": "1",
        'round:["m", "a", 1]': "many",
        "retries": "2",
    }
    flat = [part for item in fields.items() for part in item]
    await client.store.connection.call("HSET", key, *flat)
    assert await steering.read() == StoredSteering(DesiredState(retries=2))


@pytest.mark.asyncio(loop_scope="module")
async def test_unusable_criterion_is_refused_before_anything_starts(client: Client, results: Results) -> None:
    plan = EvaluationPlan("wrong", questions("a"), ["m"], until="decided")
    with pytest.raises(UsageError, match="there is one"):
        await Evaluation(client, plan, results).run()
    with pytest.raises(UsageError, match="is not a criterion"):
        await Evaluation(client, replace(plan, until="soon"), results).run()


@pytest.mark.asyncio(loop_scope="module")
async def test_siblings_start_midway_with_its_files_and_are_compared(
    client: Client, results: Results, tmp_path: Path
) -> None:
    priced = {"prompt_tokens": 1_000, "completion_tokens": 10}
    start = run_command("echo one > work.txt", usage=priced)
    origin_model = script(tmp_path / "o.json", start, finish("no"))
    origin = await client.submit("Write it.", model=origin_model)
    await client.wait_until_settled(origin)
    events = await client.events(origin)
    at = next(event.id for event in events if isinstance(event, CmdOutputObservation))
    writing = run_command("echo two >> work.txt")
    good = script(tmp_path / "a.json", run_command("false"), writing, finish("yes"))
    idle = script(tmp_path / "b.json", run_command("false"), finish("yes"))
    instance = Instance("sib", "Write it.", check='test "$(cat work.txt)" = "$(printf \'one\\ntwo\')"')
    plan = EvaluationPlan("sib", [instance], [good, idle], attempts=2, origin=ForkPoint(origin, at))
    await asyncio.wait_for(Running(client, plan, results).task, 60)
    found = compare_siblings(tmp_path)
    assert found["models"] == {
        good: {"resolved": 2, "siblings": 2},
        idle: {"resolved": 0, "siblings": 2},
    }
    assert found["comparisons"] == [{"models": (good, idle), "p_value": pytest.approx(1 / 3)}]
    best = results.rows[good, "sib", 1]
    assert found["best"]["model"] == good
    assert best.iterations == 2  # without the one that it shares with its origin
    assert best.prompt_tokens < 1_000
    assert "+two" in (tmp_path / "best.patch").read_text()
    labelled = [row for row in await client.recent() if row.labels.get(LABEL) == "sib"]
    assert len(labelled) == 8  # four siblings and their checks
    assert (await client.summary(origin)).message == "no"


def test_attempts_under_way_are_requeued_only_by_their_outcome() -> None:
    key = ("model", "a", 1)
    assert not Requeue(instances=("a",)).matches_running(key)
    assert Requeue(outcomes=("running",), instances=("a",)).matches_running(key)
    assert not Requeue(outcomes=("running",), causes=("budget",)).matches_running(key)


def test_one_command_at_a_time_writes_results(results: Results) -> None:
    with pytest.raises(ResultsInUse, match="runs the evaluation"):
        Results(results.path)


@pytest.mark.asyncio(loop_scope="module")
async def test_limits_of_attempts_still_hold(client: Client, results: Results, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", *[run_command("true")] * 3)
    plan = EvaluationPlan("limits", questions("a"), [model], limits=Limits(max_iterations=1))
    assert await Running(client, plan, results).ended() == [("a", "limit", "iterations")]
    assert json.loads(results.path.read_text())["round"] == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_attempts_that_end_while_they_are_requeued_begin_again(client: Client, results: Results) -> None:
    plan = EvaluationPlan("late", questions(*(f"q{number}" for number in range(12))), ["m"], at_once=12, is_paced=False)
    steering = EvaluationSteering(client.store, plan.name)

    async def act(one: AttemptInFlight) -> AttemptRow:
        while one.round == 0 and not (await steering.read()).rounds:
            pass
        return one.build_row("resolved", "")

    statuses: list[EvaluationStatus] = []
    driver = Driver(client, plan, results, act, on_status=statuses.append)
    running = asyncio.create_task(driver.run())
    await until(lambda: statuses and statuses[-1].in_flight == 12, what="attempts under way")
    await steering.requeue(Requeue(outcomes=("running",)))
    await asyncio.wait_for(running, 30)
    assert [row.round for row in results.rows.values()] == [1] * 12
    assert (statuses[-1].ended, statuses[-1].outcomes) == (12, {"resolved": 12})


@pytest.mark.asyncio(loop_scope="module")
async def test_attempts_start_by_instance_also_after_an_interruption(client: Client, tmp_path: Path) -> None:
    plan = EvaluationPlan("ordered", questions("a", "b", "c"), ["m", "n"], attempts=2, at_once=1, is_paced=False)
    started: list[tuple[str, str, int]] = []

    async def act(one: AttemptInFlight) -> AttemptRow:
        started.append(one.attempt.key)
        return one.build_row("resolved", "")

    with Results(tmp_path / "new.jsonl") as results:
        await Driver(client, plan, results, act).run()
    assert started == [(model, name, number) for name in "abc" for number in (1, 2) for model in "mn"]
    with Results(tmp_path / "results.jsonl") as results:  # in the order of an earlier version: numbers first
        for attempt in plan.list_attempts():
            if attempt.number == 1 and attempt.instance.id != "c":
                results.add(build_unscored_row(attempt, 0, "resolved", ""))
        started.clear()
        await Driver(client, plan, results, act).run()
        assert len(results.rows) == plan.size
    assert started == [
        *(("m", "a", 2), ("n", "a", 2), ("m", "b", 2), ("n", "b", 2)),
        *((model, "c", number) for number in (1, 2) for model in "mn"),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_attempt_starts_once_the_tokens_are_spent(client: Client, results: Results, tmp_path: Path) -> None:
    used = {"usage": {"prompt_tokens": 100, "completion_tokens": 20}, "cost_usd": None}
    broken = {"error": {"code": "authentication", "times": None}}
    model = script(tmp_path / "m.json", finish("6") | used)
    fails = script(tmp_path / "f.json", run_command("true") | used, broken)
    limited = EvaluationPlan("tokens", questions(*"abcd"), [model], at_once=1, token_budget=240, budget_usd=1e-6)
    running = Running(client, limited, results)
    ended = await running.ended()
    assert [(outcome, cause) for _, outcome, cause in sorted(ended)] == [
        *[("resolved", "")] * 2,
        *[("limit", "evaluation_token_budget")] * 2,
    ]
    assert running.statuses[-1].tokens == 240
    # A budget in USD cannot bind without a price: the progress says so.
    assert running.statuses[-1].warning == (
        f"--budget does not bind, because the price of {model} is unknown: use --token-budget"
    )
    assert running.statuses[-1].warning in running.statuses[-1].render_line
    await running.steering.set_desired(token_budget=inf)
    await running.steering.requeue(Requeue(causes=("evaluation_token_budget",)))
    assert [outcome for _, outcome, _ in await Running(client, limited, results).ended()] == ["resolved"] * 2
    with Results(tmp_path / "lost.jsonl") as lost:  # tries that failed count, too
        plan = EvaluationPlan("lost-tokens", questions(*"ab"), [fails], retries=1, at_once=1, token_budget=240)
        again = Running(client, plan, lost)
        await again.ended()
        assert sorted(row.cause for row in lost.rows.values()) == ["authentication", "evaluation_token_budget"]
        assert sorted((row.spent_tokens, row.lost_tokens) for row in lost.rows.values()) == [(0, 0), (240, 240)]


@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_of_delegates_are_spent(client: Client, results: Results, tmp_path: Path) -> None:
    def used(tokens: int) -> dict[str, object]:
        return {"usage": {"prompt_tokens": tokens, "completion_tokens": 0}}

    helper = AgentSpec(
        name="ReadOnlyAgent", llm=LLMSpec(model=script(tmp_path / "h.json", finish("It is 6.") | used(300)))
    )
    handed = {"tool_calls": [{"name": "delegate", "arguments": {"agent": "helper", "task": "Multiply."}}]}
    model = script(tmp_path / "m.json", handed | used(100), finish("6") | used(100))
    agent = AgentSpec(enable_delegation=True, delegates={"helper": helper})
    plan = EvaluationPlan("delegates", questions("a", "b"), [model], agent=agent, at_once=1, token_budget=500)
    ended = await Running(client, plan, results).ended()
    assert sorted(ended) == [("a", "resolved", ""), ("b", "limit", "evaluation_token_budget")]
    assert [row.spent_tokens for row in results.rows.values()] == [500, 0]


@pytest.mark.asyncio(loop_scope="module")
async def test_requeue_given_at_the_end_is_carried_out(cluster: FaultCluster, results: Results, tmp_path: Path) -> None:
    """It comes when the driver has announced the end, which is the last moment at which it may be accepted."""
    plan = EvaluationPlan("at-the-end", questions("a", "b"), ["m"], is_paced=False)
    gate = tmp_path / "gate"
    given: list[object] = []

    async def act(one: AttemptInFlight) -> AttemptRow:
        return one.build_row("resolved", "")

    def pause_at_next_announcement() -> None:
        arm(BrokerSettings(failpoints=f"evaluation.announced:pause:{gate}"))

    async def give_orders() -> None:
        """As another process would, while the driver is held right after its announcement."""
        async with await Client.connect(cluster.store.url) as other:
            steering = EvaluationSteering(other.store, plan.name)
            for instance in "ab":
                await until(gate.exists, what="announcement")
                stored = await steering.read()
                given.append((stored.status["state"], stored.status["has_driver"]))
                await steering.requeue(Requeue(instances=(instance,)))
                if instance == "a":
                    pause_at_next_announcement()
                gate.unlink()

    pause_at_next_announcement()
    orders = asyncio.create_task(asyncio.to_thread(asyncio.run, give_orders()))
    await asyncio.wait_for(Driver(cluster.client, plan, results, act).run(), 60)
    await orders
    assert given == [("over", False)] * 2
    assert {row.instance: row.round for row in results.rows.values()} == {"a": 1, "b": 1}
    stored = await EvaluationSteering(cluster.client.store, plan.name).read()
    assert (stored.orders, stored.status["has_driver"]) == ({}, False)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_result_stays_if_its_repetition_never_begins(client: Client, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", finish("6") | {"cost_usd": 0.5})
    plan = EvaluationPlan("kept", questions("a", "b"), [model], budget_usd=0.9)
    for order, state in ((None, "running"), (Requeue(instances=("a",)), "running"), (Requeue(), "cancelled")):
        with Results(tmp_path / "results.jsonl") as results:
            running = Running(client, plan, results)
            if order is not None:
                await running.steering.requeue(order)
                await running.steering.set_desired(state=state)
            await running.ended()
            await running.stands(cost_usd=1.0, outcomes={"resolved": 2})
            assert {row.instance: row.outcome for row in results.rows.values()} == {"a": "resolved", "b": "resolved"}
            assert results.replaced_cost_usd == 0.0
    assert [row.cost_usd for row in read_results(tmp_path / "results.jsonl")] == [0.5, 0.5]
