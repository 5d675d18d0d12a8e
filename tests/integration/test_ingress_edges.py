"""A bad message, a parked task or an absent broker does not affect other tasks at an ingress."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery._state import _set_task_join_will_block

from broker.celery.taken_entries import TAKEN, TAKERS
from broker.store.embedded import EmbeddedValkey
from deckhands.evaluation.directory import SUMMARY
from deckhands.ingress.callers import CELERY, Caller
from deckhands.ingress.context import REVOKED, IngressContext, derive_task_conversation_id
from deckhands.ingress.evaluations import MAX_STARTS, EvaluationTasks
from deckhands.ingress.ingress_app import make_ingress_app
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.runs import Runs
from deckhands.ingress.waiting_tasks import TASKS, WaitingTask, complete_tasks, list_waiting
from tests.faults.harness import steps
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import unhurried, until
from tests.security.hostile_messages import plain_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = "redis://127.0.0.1:1/0"
NO_TIMES = ("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "never", "2026-13-01")


async def test_task_with_impossible_time_or_callback_fails_alone(producer: Producer) -> None:
    for text in NO_TIMES:
        message = json.loads(plain_message("deckhands.run", name=f"at {text}"))
        message["headers"] |= {"eta": text, "ignore_result": False}
        producer.app.backend.client.lpush("deckhands", json.dumps(message))
    after = producer.signature("next", saying("never"))
    far = producer.run(turns=saying("x"), countdown=1, expires=datetime(2500, 1, 1, tzinfo=UTC))
    chained = producer.run(turns=saying("x"), link=after, chain=[{"args": 3}])
    fine = producer.run(turns=saying("fine"), countdown=2)
    for result in (far, chained):
        await producer.until_state(result, "FAILURE")
        assert type(result.result).__name__ == "RequestRefused"
    assert (await producer.value(fine))["message"] == "fine"
    assert producer.app.backend.get_state(after.freeze().id) == "PENDING"
    for text in NO_TIMES:
        refused = producer.app.AsyncResult(f"at {text}")
        await producer.until_state(refused, "FAILURE")
        assert any(told in str(refused.result) for told in (f"The time {text} cannot be used.", "eta: "))


def results_away() -> TaskResults:
    """Results whose broker is away; tests may wait for results all the same, as an ingress's process may not."""
    app = make_ingress_app(NOWHERE, NOWHERE)
    _set_task_join_will_block(False)
    return TaskResults(app)


class Completions(TaskResults):
    """Results that record which tasks were completed; each attempt may fail first."""

    def __init__(self, *errors: Exception) -> None:  # there is no application
        self.errors = list(errors)
        self.completed: list[tuple[str, Exception | None]] = []

    def send_event(self, *_: Any, **__: Any) -> None:
        return

    def complete(self, task_id: str, _kept: Any, _value: Any = None, *, failure: Any = None, **_: Any) -> None:
        if self.errors:
            raise self.errors.pop()
        self.completed.append((task_id, failure))


async def _decided(desk: IngressContext, task_id: str) -> Caller:
    conversation_id = derive_task_conversation_id(task_id)
    await desk.callers.add(Caller(conversation_id, CELERY, task_id))
    await desk.callers.decide(conversation_id, REVOKED)
    caller = await desk.callers.of(conversation_id)
    assert caller is not None
    return caller


async def test_an_outcome_is_kept_while_the_backend_is_away(producer: Producer) -> None:
    desk = IngressContext(producer.cluster.client.store, results_away())
    caller = await _decided(desk, "kept")
    await Runs(desk).complete(caller.conversation_id)
    found = await desk.callers.of(caller.conversation_id)
    assert found is not None
    assert not found.is_answered
    overdue = await desk.store.connection.call(
        "ZSCORE", desk.store.known_keys(caller.conversation_id).shard.awaited, found.conversation_id
    )
    assert overdue


async def test_a_task_is_completed_once(producer: Producer) -> None:
    results: Any = Completions()
    runs = Runs(desk := IngressContext(producer.cluster.client.store, results))
    looked = await _decided(desk, "twice")
    await asyncio.gather(runs.complete(looked.conversation_id), runs.complete(looked.conversation_id))
    await runs.complete(looked.conversation_id)
    assert [task_id for task_id, _ in results.completed] == ["twice"]


async def test_unusable_second_message_does_not_end_the_run(producer: Producer) -> None:
    first = producer.run(turns=steps(1, seconds=3.0), task_id="taken")
    conversation_id = await producer.begun(first)
    producer.run(turns=saying("other"), task_id="taken", chain=[{"args": 3}])
    callers = IngressContext(producer.cluster.client.store, TaskResults(producer.app)).callers
    following = producer.run(turns=saying("behind it"))
    await producer.until_state(following, "SUCCESS")
    caller = await callers.of(conversation_id)
    assert caller is not None
    assert not caller.is_answered
    await producer.until_state(first, "SUCCESS", "FAILURE")
    assert first.result["conversation_id"] == conversation_id


async def test_foreign_taken_entries_block_no_task(producer: Producer) -> None:
    broker = producer.app.backend.client
    hostile = [b"\xff\xfe", b"", b"nobody", b"dead deckhands", b"dead elsewhere", b"typed deckhands", b"x " * 10_000]
    broker.sadd(TAKERS, *hostile)
    broker.rpush(f"{TAKEN}dead deckhands", b"\xff", b"[]", b'{"body": 1}')
    broker.rpush(f"{TAKEN}dead elsewhere", b"not ours")
    broker.set(f"{TAKEN}typed deckhands", "no list")
    await until(lambda: not broker.exists(f"{TAKEN}dead deckhands"), limit=unhurried(60.0), what="entries put back")
    result = producer.run(turns=saying("done"))
    assert (await producer.value(result, limit=unhurried(60.0)))["message"] == "done"
    assert broker.lrange(f"{TAKEN}dead elsewhere", 0, -1) == [b"not ours"]
    left = broker.smembers(TAKERS)
    assert b"typed deckhands" not in left
    assert b"dead deckhands" not in left


async def test_a_flood_of_revocations_leaves_room_for_runs(producer: Producer) -> None:
    names = producer.cluster.client.store.all_shards[0]
    for n in range(20):
        producer.app.control.revoke([f"strange-{n}-{number}" for number in range(1_000)])
    result = producer.run(turns=saying("in between"))
    await producer.until_state(result, "SUCCESS")
    connection = producer.cluster.client.store.connection
    await until(lambda: connection.call("ZSCORE", names.revoked, "strange-0-999"), what="the last of a broadcast")


async def test_two_brokers_on_one_store_keep_their_results_apart(producer: Producer, tmp_path: Path) -> None:
    cluster, other = producer.cluster, EmbeddedValkey(tmp_path / "other-broker")
    await other.start()
    second = Producer(cluster, other.celery_url)
    try:
        cluster.start_ingress("d2", DECKHANDS_CELERY_URL=other.celery_url)
        await all_present(cluster)
        pairs = [(one, one.run(turns=saying(f"{n}"))) for n in range(4) for one in (producer, second)]
        for one, result in pairs:
            await one.until_state(result, "SUCCESS")
            stranger = second if one is producer else producer
            assert stranger.app.backend.get_state(result.id) == "PENDING"
        first = producer.run(turns=saying("first"), task_id="same-id")
        await producer.value(first)
        refused = second.run(turns=saying("second"), task_id="same-id")
        await second.until_state(refused, "FAILURE", "SUCCESS")
        assert type(refused.result).__name__ == "RequestRefused"
        assert "another Celery broker" in str(refused.result)
    finally:
        cluster.kill("d2")
        second.close()
        await other.stop()


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's
async def test_each_task_of_an_evaluation_is_answered_whatever_another_asks(
    producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_CELERY_URL", producer.cluster.store.celery_url)
    producer.app.backend.client.set("typed", "no list")
    callback = {"task": "shop.report", "args": [], "kwargs": {}, "options": {"queue": "typed"}}
    odd = [WaitingTask(task_id=f"odd-{n}", kept={"callbacks": [callback]}) for n in range(3)]
    for asker in (*odd, WaitingTask(task_id="fine")):
        asker.write(tmp_path)
    (tmp_path / SUMMARY).write_text('{"resolved": 1}')
    await asyncio.to_thread(complete_tasks, tmp_path)
    _set_task_join_will_block(False)
    assert producer.app.AsyncResult("fine").result == {"resolved": 1}
    for asker in odd:
        assert producer.app.AsyncResult(asker.task_id).result.args[1] == "unusable_callback"
    assert not list_waiting(tmp_path)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's
async def test_an_evaluation_that_cannot_be_ended_holds_up_no_other(
    producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_CELERY_URL", producer.cluster.store.celery_url)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        WaitingTask(task_id=name, starts=MAX_STARTS).write(tmp_path / name)
        (path,) = (tmp_path / name / TASKS).iterdir()
        os.utime(path, (0, 0))
        if name == "first":
            path.with_suffix(".over.json").mkdir()  # where its end would be written
    await asyncio.to_thread(EvaluationTasks(str(tmp_path), producer.cluster.store.url).restart_commands)
    _set_task_join_will_block(False)
    assert "too early too often" in str(producer.app.AsyncResult("second").result)
