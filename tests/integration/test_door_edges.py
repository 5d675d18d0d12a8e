"""What one message, one parked task or an absent broker does to all others at a door: nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from celery._state import _set_task_join_will_block

from broker.celery.door_app import make_door_app
from broker.celery.door_results import TaskResults
from broker.celery.taken_entries import TAKEN, TAKERS
from broker.runtime.errors import UsageError
from deckhands.door.callers import CELERY, Caller
from deckhands.door.desk import REVOKED, Desk, conversation_of_task
from deckhands.door.revocations import moment_in
from deckhands.door.runs import MAX_SENDS, RunMessage, Runs
from tests.door_parts import Producer, saying
from tests.faults.harness import steps
from tests.polling import unhurried, until

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "never", "2026-13-01"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        moment_in(text)


async def test_a_task_with_an_impossible_time_or_callback_fails_and_keeps_nothing_else(producer: Producer) -> None:
    after = producer.signature("next", saying("never"))
    far = producer.run(turns=saying("x"), countdown=1, expires=datetime(2500, 1, 1, tzinfo=UTC))
    chained = producer.run(turns=saying("x"), link=after, chain=[{"args": 3}])
    fine = producer.run(turns=saying("fine"), countdown=2)
    for result in (far, chained):
        await producer.until_state(result, "FAILURE")
        assert type(result.result).__name__ == "RequestRefused"
    assert (await producer.value(fine))["message"] == "fine"
    assert producer.app.backend.get_state(after.freeze().id) == "PENDING"


def results_away() -> TaskResults:
    """Results whose broker is away; tests may wait for results all the same, as a door's process may not."""
    app = make_door_app(NOWHERE, NOWHERE)
    _set_task_join_will_block(False)
    return TaskResults(app)


class Sending:
    """Results that take note of what is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.given_up: list[str] = []

    def send_second_half(self, task_id: str, _kept: Any) -> None:
        self.sent.append(task_id)

    def give_up(self, task_id: str) -> None:
        self.given_up.append(task_id)

    def report_progress(self, *_: Any) -> None:
        return


async def _decided(desk: Desk, task_id: str) -> Caller:
    conversation_id = conversation_of_task(task_id)
    await desk.callers.keep(Caller(conversation_id, CELERY, task_id))
    await desk.callers.decide(conversation_id, REVOKED)
    caller = await desk.callers.of(conversation_id)
    assert caller is not None
    return caller


async def test_a_door_outlives_the_queue(producer: Producer) -> None:
    store = producer.cluster.client.store
    results = results_away()
    runs = Runs(desk := Desk(store, results))
    caller = await _decided(desk, "unsent")
    await runs.send_second_half(caller)
    found = await desk.callers.of(caller.conversation_id)
    assert found is not None
    assert not found.is_answered


async def test_an_answer_that_celery_never_takes_is_given_up(producer: Producer) -> None:
    store = producer.cluster.client.store
    results: Any = Sending()
    runs = Runs(desk := Desk(store, results))
    caller = await _decided(desk, "unusable")
    for _ in range(MAX_SENDS + 1):
        await runs.send_second_half(caller)
    assert (len(results.sent), results.given_up) == (MAX_SENDS, ["unusable"])
    found = await desk.callers.of(caller.conversation_id)
    assert found is not None
    assert found.is_answered


async def test_a_half_that_looked_before_another_one_had_answered_does_not_answer_again(producer: Producer) -> None:
    results: Any = Sending()
    runs = Runs(desk := Desk(producer.cluster.client.store, results))
    looked = await _decided(desk, "twice")
    assert await runs.take(RunMessage("twice", (), {}, {})) is not None
    await runs.has_answered("twice")
    assert await runs._outcome(looked) is None


async def test_what_could_not_be_sent_does_not_count_as_sent(producer: Producer) -> None:
    store = producer.cluster.client.store
    away = Runs(Desk(store, results_away()))
    results: Any = Sending()
    back = Runs(desk := Desk(store, results))
    caller = await _decided(desk, "kept")
    for _ in range(MAX_SENDS + 1):
        await away.send_second_half(caller)
    await back.send_second_half(caller)
    assert (results.sent, results.given_up) == (["kept"], [])


async def test_a_second_message_of_a_run_that_cannot_be_used_does_not_end_it(producer: Producer) -> None:
    first = producer.run(turns=steps(1, seconds=3.0), task_id="taken")
    conversation_id = await producer.begun(first)
    producer.run(turns=saying("other"), task_id="taken", chain=[{"args": 3}])
    callers = Desk(producer.cluster.client.store, TaskResults(producer.app)).callers
    following = producer.run(turns=saying("behind it"))
    await producer.until_state(following, "SUCCESS")
    caller = await callers.of(conversation_id)
    assert caller is not None
    assert not caller.is_answered
    await producer.until_state(first, "SUCCESS", "FAILURE")
    assert first.result["conversation_id"] == conversation_id


async def test_what_anybody_writes_where_entries_are_taken_to_holds_up_no_task(producer: Producer) -> None:
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
