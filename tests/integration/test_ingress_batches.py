"""Messages that an ingress takes, records and completes together do not affect each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.celery.taken_entries import TAKEN
from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.store.store import Store
from deckhands.ingress.callers import CELERY, Caller
from deckhands.ingress.context import REVOKED, IngressContext, derive_task_conversation_id
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.runs import RunMessage, Runs
from tests.conversation_hands import WatchedConnection
from tests.faults.harness import FaultCluster
from tests.ingress_parts import LIMIT_SECONDS, Producer, all_present, saying
from tests.polling import unhurried, until

CROWD = 20
GARBAGE = (b"\xff\xfe", b"not JSON", b"[]", b'{"body": 1}', b'{"headers": null}')


async def moved_together(producer: Producer) -> int:
    """How many entries ingresses have taken beside a first one."""
    stats = producer.app.backend.client.info("commandstats")
    return int(stats.get("cmdstat_lmove", {}).get("calls", 0))


async def test_one_bad_message_of_a_batch_affects_no_other(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        producer = Producer(cluster)
        good, bad = [], []
        for number in range(CROWD):
            good.append(producer.run(turns=saying(f"answer {number}")))
            producer.app.backend.client.lpush("deckhands", GARBAGE[number % len(GARBAGE)])
            bad.append(producer.send("run", "x", kwargs={"no_such_field": 1}))
        cluster.start_controller()
        cluster.start_ingress()
        await until(lambda: all(one.ready() for one in [*good, *bad]), limit=unhurried(120.0), what="all results")
        assert [one.result["message"] for one in good] == [f"answer {number}" for number in range(CROWD)]
        assert {type(one.result).__name__ for one in bad} == {"RequestRefused"}
        await producer.until_taken()
        assert not producer.app.backend.client.keys(f"{TAKEN}*")
        assert await moved_together(producer) >= CROWD
        producer.close()


@pytest.mark.parametrize("place", ["celery.taken:kill@1", f"ingress.begun:kill@{CROWD // 2}"])
async def test_a_batch_of_a_killed_ingress_is_carried_out_once(tmp_path: Path, place: str) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        producer = Producer(cluster)
        report = producer.app.signature("shop.report", queue="shop")
        sent = [producer.run(turns=saying("done"), link=report) for _ in range(CROWD)]
        cluster.start_controller()
        cluster.start_ingress("victim", DECKHANDS_FAILPOINTS=f"{place}:{tmp_path}/once")
        await cluster.until_ended("victim", limit=unhurried(60.0))
        assert await moved_together(producer) > 0
        cluster.start_ingress("survivor")
        await until(lambda: all(one.ready() for one in sent), limit=unhurried(120.0), what="all results")
        assert [one.result["message"] for one in sent] == ["done"] * CROWD
        keys = producer.app.backend.client.keys
        await until(lambda: not keys(f"{TAKEN}*"), limit=unhurried(60.0), what="the entries of the dead ingress")
        await producer.until_taken()
        assert len(await cluster.client.recent(limit=2 * CROWD)) == CROWD
        producer.close()


class Announced(TaskResults):
    """Results without an application: the events that were announced, and no result."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def queue_event(self, kind: str, task_id: str, **_: Any) -> None:
        self.events.append((kind, task_id))

    def send_queued_events(self) -> None:
        return

    def store_all(self, endings: Any) -> list[bool]:
        return [True for _ in endings]

    def describe_end(self, ending: Any) -> Any:
        return "ended", ending.task_id, {}

    def settle(self, ending: Any) -> None:
        self.events.append(("ended", ending.task_id))

    def restore_result(self, task_id: str, value: Any = None, *, failure: Exception | None = None) -> None:
        self.events.append(("restored", task_id))


def message(task_id: str = "racing") -> RunMessage:
    return RunMessage(task_id, [], {"task": "x"}, {})


async def test_a_revocation_during_the_start_stops_the_run(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, Announced())
    watched = WatchedConnection(valkey_store.connection)
    watched.before["deck_append"] = lambda: Runs(desk).revoke("racing")
    results = Announced()
    await Runs(IngressContext(replace(valkey_store, connection=watched), results)).take(message())
    conversation_id = derive_task_conversation_id("racing")
    last = (await desk.client.log.read(conversation_id))[-1]
    assert isinstance(last, ChangeAgentStateAction)
    assert last.agent_state is AgentState.STOPPED
    caller = await desk.callers.of(conversation_id)
    assert caller is not None
    assert '"REVOKED"' in caller.outcome


async def test_two_ingresses_with_the_same_message_start_one_run(valkey_store: Store) -> None:
    results = Announced()
    ingresses = [Runs(IngressContext(valkey_store, results)) for _ in range(2)]
    await asyncio.gather(*(runs.take(message()) for runs in ingresses))
    assert results.events == [("received", "racing")]
    log = IngressContext(valkey_store, results).client.log
    assert len(await log.read(derive_task_conversation_id("racing"))) == 2


async def test_message_repeated_while_its_task_completes_restores_the_result(valkey_store: Store) -> None:
    """Its producer may have seen the result and deleted it before the worker marks the task as answered."""
    desk, results = IngressContext(valkey_store, Announced()), Announced()
    await Runs(desk).take(message())
    watched = WatchedConnection(valkey_store.connection)
    watched.before["deck_mark_answered"] = lambda: Runs(desk).take(message())
    await Runs(IngressContext(replace(valkey_store, connection=watched), results)).revoke("racing")
    assert results.events == [("ended", "racing"), ("restored", "racing")]


async def test_one_worker_takes_an_answer_and_its_outcome_stays(valkey_store: Store) -> None:
    callers = IngressContext(valkey_store, Announced()).callers
    caller = Caller(conversation_id := derive_task_conversation_id("task"), CELERY, "task")
    await callers.add(caller)
    assert await callers.take_answer(caller, "first", 1_000) == ("first", True)
    assert await callers.take_answer(caller, "second", 1_000) is None
    await valkey_store.call("DEL", f"{valkey_store.known_keys(conversation_id).caller}:lock")  # the worker has died
    assert await callers.take_answer(caller, "second", 1_000) == ("first", False)
    await callers.mark_answered(conversation_id)
    assert await callers.take_answer(caller, "third", 1_000) is None
    found = await callers.of(conversation_id)
    assert found is not None
    assert (found.outcome, found.is_answered, found.started_ms) == ("first", True, 1_000)


async def test_a_task_that_cannot_be_completed_delays_no_other(valkey_store: Store) -> None:
    results = Announced()
    desk = IngressContext(valkey_store, results)
    answers = []
    for name in ("first", "broken", "last"):
        conversation_id = derive_task_conversation_id(name)
        await desk.callers.add(Caller(conversation_id, CELERY, name))
        await desk.callers.decide(conversation_id, REVOKED)
        caller, meta, _ = await desk.load(conversation_id)
        assert caller is not None
        answers.append(await desk.find_answer(caller, meta))
    lock = f"{desk.store.known_keys(derive_task_conversation_id('broken')).caller}:lock"
    await desk.store.call("RPUSH", lock, "no string")
    await Runs(desk).complete_all([answer for answer in answers if answer is not None])
    assert sorted(results.events) == [("ended", "first"), ("ended", "last")]
    found = [await desk.callers.of(derive_task_conversation_id(name)) for name in ("first", "broken", "last")]
    assert [caller is not None and caller.is_answered for caller in found] == [True, False, True]


async def test_result_key_of_another_type_fails_alone(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_ingress()
        await all_present(cluster)
        producer = Producer(cluster)
        sent = [producer.run(turns=saying("done")) for _ in range(4)]
        backend = producer.app.backend
        for result in sent:
            await producer.begun(result)
        odd = sent.pop()
        backend.client.delete(backend.get_key_for_task(odd.id))
        backend.client.lpush(backend.get_key_for_task(odd.id), "another program's")
        cluster.start_controller()
        await until(lambda: all(one.ready() for one in sent), limit=unhurried(LIMIT_SECONDS), what="the results")
        assert [one.result["message"] for one in sent] == ["done"] * len(sent)
        producer.close()
