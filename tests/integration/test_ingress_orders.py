"""Orders of callers to running runs: stop, answer, forget. One cluster serves all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from broker.contract.actions import AgentDelegateAction
from broker.runtime.clock import to_millis
from broker.runtime.ids import make_delegate_id
from deckhands.ingress.callers import CALLER_TTL
from deckhands.ingress.commands import TAKES
from deckhands.ingress.context import derive_task_conversation_id
from deckhands.ingress.revocations import MAX_REVOKED_KEPT
from tests.faults.harness import steps
from tests.ingress_parts import Producer, producing, saying
from tests.integration.command_line import Done, deckhands, environment
from tests.polling import unhurried, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNS = 50
LIMIT_SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Producer]:
    """An application beside two ingresses and one worker of each other kind."""
    async with producing(tmp_path_factory.mktemp("orders"), ingresses=("d1", "d2")) as found:
        yield found


async def with_delegates(producer: Producer, count: int) -> tuple[AsyncResult, list[str]]:
    """Send a run whose delegates all work for a minute; return it and the ids of its delegates, once they do."""
    part = producer.options(steps(1, seconds=60.0))
    names = [f"Part{n}" for n in range(count)]
    calls = [{"name": "delegate", "arguments": {"agent": name, "task": f"do {name}"}} for name in names]
    options = producer.options([{"tool_calls": calls}, *saying("all parts are done")])
    agent = {"enable_delegation": True, "delegates": {name: {"llm": {"model": part["model"]}} for name in names}}
    result = producer.send("run", "do it", kwargs={**options, "agent": agent})
    parent = await producer.begun(result)
    await producer.cluster.until_kind(parent, "action.delegate", count=count, limit=unhurried(LIMIT_SECONDS))
    events = await producer.cluster.client.events(parent)
    ids = [make_delegate_id(parent, event.id) for event in events if isinstance(event, AgentDelegateAction)]

    async def all_work() -> bool:
        logs = [await producer.cluster.client.events(delegate_id) for delegate_id in ids]
        return all(any(event.kind == "action.run" for event in log) for log in logs)

    async def all_there() -> bool:
        call = producer.cluster.client.store.connection.call
        return all([await call("EXISTS", producer.cluster.client.store.known_keys(name).meta) for name in ids])

    await until(all_there, limit=unhurried(LIMIT_SECONDS), what="the delegates")
    await until(all_work, limit=unhurried(LIMIT_SECONDS), what="the delegates at work")
    return result, ids


async def test_a_revoked_run_takes_its_delegates_with_it(producer: Producer) -> None:
    result, delegates = await with_delegates(producer, 2)
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        await producer.value(result)
    assert result.state == "REVOKED"
    for name in (derive_task_conversation_id(result.id), *delegates):
        summary = await asyncio.wait_for(producer.cluster.client.wait_until_settled(name), LIMIT_SECONDS)
        assert summary.state == "stopped"
    assert "end-0" not in "".join(path.read_text() for path in producer.cluster.root.glob("work/*/effects"))
    after = producer.run(turns=saying("the ingresses are there"))
    assert (await producer.value(after))["message"] == "the ingresses are there"


async def test_revoking_what_is_no_run_changes_nothing(producer: Producer) -> None:
    options = producer.options(saying("done"))
    submitted = await producer.value(producer.send("submit", "do it", kwargs=options, task_id="only-submitted"))
    working = producer.run(turns=steps(1), latency=1.0)
    await producer.begun(working)
    other = producer.app.send_task("shop.task", queue="shop-unread", task_id="the-shops-own")
    ended = producer.run(turns=saying("ended before"))
    summary = await producer.value(ended)
    producer.app.control.revoke([other.id, "nobody-knows-it", "only-submitted", ended.id, submitted], terminate=True)
    store = producer.cluster.client.store
    await until(lambda: store.connection.call("ZSCORE", store.all_shards[0].revoked, submitted), what="the note")
    assert (await producer.value(working))["message"] == "all done"
    assert producer.app.backend.client.llen("shop-unread") == 1
    assert (other.state, AsyncResult("nobody-knows-it", app=producer.app).state) == ("PENDING", "PENDING")
    assert (ended.state, ended.result) == ("SUCCESS", summary)
    await producer.cluster.settle([submitted])
    assert (await producer.cluster.client.summary(submitted)).state == "finished"
    assert not await store.connection.call(
        "EXISTS", store.known_keys(derive_task_conversation_id("nobody-knows-it")).caller
    )


async def until_state(producer: Producer, name: str, state: str, *, times: int = 1) -> None:
    async def is_there() -> bool:
        found = [str(getattr(event, "agent_state", "")) for event in await producer.cluster.client.events(name)]
        return found.count(state) >= times and (await producer.cluster.client.row(name)).state == state

    await until(is_there, limit=unhurried(LIMIT_SECONDS), what=f"{state}, {times}")


async def test_a_run_that_asks_is_confirmed_and_rejected_by_tasks(producer: Producer) -> None:
    state = "awaiting_user_confirmation"
    agent = {"confirmation": {"mode": "always"}}
    result = producer.send("run", "do it", kwargs={**producer.options(steps(2)), "headless": False, "agent": agent})
    name = await producer.begun(result)
    await until_state(producer, name, state)
    asked = await producer.value(producer.send("confirm", name))
    assert asked["conversation_id"] == name
    await until_state(producer, name, state, times=2)
    await until(lambda: result.state == "PROGRESS" and result.info["state"] == state, what="the question in progress")
    (action, *_) = [e.id for e in reversed(await producer.cluster.client.events(name)) if e.kind == "action.run"]
    await producer.value(producer.send("reject", name, action))
    await until_state(producer, name, "awaiting_user_input")
    assert not result.ready()
    await producer.value(producer.send("message", name, "Then leave it."))
    assert (await producer.value(result))["state"] == "finished"
    kinds = [event.kind for event in await producer.cluster.client.events(name)]
    assert kinds.count("observation.run") == 1
    with pytest.raises(Exception, match=r"."):
        await producer.value(producer.send("confirm", name))
    assert result.state == "SUCCESS"


async def test_a_caller_with_settings_of_its_own(producer: Producer) -> None:
    url = producer.cluster.store.celery_url
    app = Celery("mine", broker=url, backend=url, set_as_current=False)
    app.conf.update(task_default_queue="mine", result_extended=True, task_track_started=True)
    app.conf.update(task_send_sent_event=True, result_serializer="json", task_store_errors_even_if_ignored=True)
    named = app.signature("mine.report", queue="mine", task_id="named-report")
    unnamed = app.signature("mine.report", task_id="unnamed-report")
    kwargs = producer.options(saying("done"))
    result = app.send_task("deckhands.run", ["do it"], kwargs, queue="deckhands", link=[named, unnamed])
    assert (await producer.value(result))["message"] == "done"

    def sent() -> dict[str, str]:
        client = app.backend.client
        return {json.loads(e)["headers"]["id"]: q for q in ("mine", "celery") for e in client.lrange(q, 0, -1)}

    await until(lambda: len(sent()) == 2, what="both callbacks")
    assert sent() == {"named-report": "mine", "unnamed-report": "celery"}
    protocol_1 = Celery("old", broker=url, backend=url, set_as_current=False)
    protocol_1.conf.task_protocol = 1
    protocol_1.send_task("deckhands.run", ["x"], kwargs, queue="deckhands")
    assert (await producer.value(producer.run(turns=saying("nobody died"))))["message"] == "nobody died"


async def test_two_ingresses_answer_each_of_many_runs_once(producer: Producer) -> None:
    client = producer.app.backend.client
    report = producer.app.signature("shop.report", queue="shop-reports")
    model = producer.options(saying("done"))["model"]
    sent = [producer.send("run", "do it", kwargs={"model": model}, link=report) for _ in range(RUNS)]
    for result in sent:
        assert (await producer.value(result, limit=unhurried(LIMIT_SECONDS)))["message"] == "done"
    await until(lambda: client.llen("shop-reports") >= RUNS, limit=unhurried(LIMIT_SECONDS), what="the callbacks")
    await until_idle(producer)
    reports = [json.loads(entry)["headers"]["parent_id"] for entry in client.lrange("shop-reports", 0, -1)]
    assert sorted(reports) == sorted(result.id for result in sent)


async def until_idle(producer: Producer) -> None:
    """Wait until no ingress has anything to do."""
    client, store = producer.app.backend.client, producer.cluster.client.store

    async def is_idle() -> bool:
        names = store.all_shards[0]
        waiting = await store.connection.call_many([("ZCARD", names.awaited), ("XLEN", names.notices)])
        return not (any(waiting) or client.llen("deckhands") or client.hlen("deckhands:unacked"))

    await until(is_idle, limit=unhurried(LIMIT_SECONDS), what="idle ingresses")


async def keys_of(producer: Producer, *parts: str) -> set[str]:
    """The keys of the store that name one of these."""
    found, at = set(), b"0"
    while True:
        at, some = await producer.cluster.client.store.connection.call("SCAN", at, "COUNT", 1_000)
        found |= {key.decode() for key in some if any(part in key.decode() for part in parts)}
        if at == b"0":
            return found


async def test_a_submission_begins_when_its_message_says(producer: Producer) -> None:
    options = {**producer.options(saying("later")), "delay": 60}
    later = await producer.value(producer.send("submit", "x", kwargs=options, countdown=3_600))
    row = await producer.cluster.client.row(later)
    assert row.wait_reason == "scheduled"
    assert row.not_before is not None
    assert timedelta(minutes=58) < row.not_before - row.created <= timedelta(hours=1)


async def test_order_with_a_later_time_names_the_refused_field(producer: Producer) -> None:
    """An ingress holds no message back: the conversation would get at once what was meant for later."""
    name = await producer.value(producer.send("submit", "x", kwargs={**producer.options(), "delay": 3_600}))
    before = await producer.cluster.client.events(name)
    further: dict[str, tuple[Any, ...]] = {"message": ("And now?",)}
    sent = {what: producer.send(what, name, *further.get(what, ()), countdown=3_600) for what in TAKES}
    for what, result in sent.items():
        with pytest.raises(Exception, match=rf"deckhands\.{what} .*\beta\b.*countdown") as refused:
            await producer.value(result)
        assert type(refused.value).__name__ == "RequestRefused"
    assert await producer.cluster.client.events(name) == before


async def test_an_order_that_expired_in_the_queue_is_revoked(producer: Producer) -> None:
    name = await producer.value(producer.send("submit", "x", kwargs={**producer.options(), "delay": 3_600}))
    late = producer.send("message", name, "Too late.", expires=producer.cluster.client.store.clock.now())
    with pytest.raises(TaskRevokedError):
        await producer.value(late)
    await producer.value(producer.send("message", name, "In time.", expires=3_600))
    said = [getattr(event, "content", "") for event in await producer.cluster.client.events(name)]
    assert ("Too late." in said, "In time." in said) == (False, True)


async def test_order_handled_in_time_outlives_its_expired_message(producer: Producer) -> None:
    options = {**producer.options(), "delay": 3_600}
    name = await producer.value(producer.send("submit", "x", kwargs=options, task_id="submitted"))
    sent = {"submit": ("x",), "message": (name, "Once."), "cancel": (name,), "fork": (name,)}
    for what, arguments in sent.items():
        given = options if what == "submit" else {}
        first = producer.send(what, *arguments, kwargs=given, task_id=f"{what}ted")
        await producer.value(first)
        await until_idle(producer)
        first.forget()
        now = producer.cluster.client.store.clock.now()
        again = producer.send(what, *arguments, kwargs=given, task_id=first.id, expires=now)
        await producer.value(again)


EVIL = "celery-task-meta-evil"
"""A key that keeps a result. A producer of tasks could have an ingress write into it, or into the queue of the jobs."""


@pytest.mark.parametrize("option", ["link", "link_error", "chain"])
@pytest.mark.parametrize("what", ["run", "submit", "cancel"])
async def test_ingress_tasks_never_send_to_invalid_queue_keys(producer: Producer, what: str, option: str) -> None:
    key = f"{EVIL}-{what}-{option}"
    after = producer.app.signature("shop.report", options={"queue": key})
    options = {} if what == "cancel" else producer.options(saying("done"))
    result = producer.send(what, "it", kwargs=options, **{option: [after]})
    with pytest.raises(Exception, match="cannot be sent to the queue"):
        await producer.value(result)
    assert producer.app.backend.client.exists(key) == 0


async def test_task_failing_before_start_sends_nothing_to_invalid_queue(producer: Producer) -> None:
    after = producer.app.signature("shop.report", options={"queue": f"{EVIL}-early"})
    unfit = producer.send("submit", "it", kwargs={"self": 1}, link_error=[after])
    body = producer.app.signature("shop.report", queue="shop", link_error=[after])
    late = {
        "expires": producer.cluster.client.store.clock.now(),
        "group_id": "some",
        "chord": {**body, "chord_size": 1},
    }
    expired = producer.send("submit", "it", **late)
    in_headers = producer.send("cancel", "nobody", headers={"errbacks": [after]})
    for result in (unfit, in_headers):
        await producer.until_state(result, "FAILURE")
    await producer.until_state(expired, "REVOKED")
    await until_idle(producer)
    assert producer.app.backend.client.exists(f"{EVIL}-early") == 0


async def test_the_ingress_carries_out_no_task_of_celery(producer: Producer) -> None:
    """`celery.group` would send any task anywhere, with the rights of the ingress."""
    after = producer.app.signature("shop.report", options={"queue": f"{EVIL}-group", "task_id": "evil"})
    arguments = ([after], [["some", None], []], "some", ())
    result = producer.app.send_task("celery.group", args=arguments, queue="deckhands")
    await producer.until_state(result, "FAILURE", "SUCCESS")
    assert type(result.result).__name__ == "NotRegistered"
    assert producer.app.backend.client.exists(f"{EVIL}-group") == 0


async def test_followers_of_a_submission_are_sent_once_under_one_id(producer: Producer) -> None:
    """An ingress that dies before it acknowledges a task leaves it to another one, which does it again."""
    after = producer.app.signature("shop.report", options={"queue": "shop-submitted"})
    options = producer.options(saying("done"))
    for _ in range(2):
        await producer.value(producer.send("submit", "it", kwargs=options, task_id="sent-twice", link=[after]))
        await until_idle(producer)
    entries = producer.app.backend.client.lrange("shop-submitted", 0, -1)
    assert len({json.loads(entry)["headers"]["id"] for entry in entries}) == 1


async def test_what_an_answered_run_leaves_goes_with_its_conversation(producer: Producer) -> None:
    client, names = producer.cluster.client, producer.cluster.client.store.all_shards[0]
    result = producer.run(turns=saying("done"), link=producer.app.signature("shop.report", queue="shop-after"))
    await producer.value(result)
    producer.app.control.revoke("early")
    await until(lambda: client.store.connection.call("ZSCORE", names.revoked, "early"), what="a note")
    revoked = producer.run(turns=steps(1, seconds=60.0), task_id="early")
    await producer.until_state(revoked, "REVOKED")
    await until_idle(producer)
    name = derive_task_conversation_id(result.id)
    left = await keys_of(producer, name, result.id)
    assert f"{names.root}:c:{name}:caller" in left
    assert f"{names.root}:c:{name}:caller:lock" not in left
    assert not {key for key in left if result.id in key}
    await client.delete(name)
    assert await keys_of(producer, name, result.id) == set()
    assert (result.state, result.result["message"]) == ("SUCCESS", "done")
    (never_begun,) = await keys_of(producer, derive_task_conversation_id(revoked.id), revoked.id)
    left_seconds = await client.store.connection.call("TTL", never_begun)
    assert 0 < left_seconds <= CALLER_TTL.total_seconds()


async def test_the_tasks_that_are_remembered_as_revoked_are_bounded(producer: Producer) -> None:
    store = producer.cluster.client.store
    key = store.all_shards[0].revoked
    now = to_millis(store.clock.now())
    members = [part for n in range(MAX_REVOKED_KEPT) for part in (now - 1_000, f"old-{n}")]
    await store.connection.call("ZADD", key, *members)
    producer.app.control.revoke("the-newest")
    await until(lambda: store.connection.call("ZSCORE", key, "the-newest"), what="the note")
    assert await store.connection.call("ZCARD", key) == MAX_REVOKED_KEPT
    await store.connection.call("DEL", key)


async def test_commands_find_the_conversation_of_a_task(producer: Producer, tmp_path: Path) -> None:
    result = producer.run(turns=saying("done"), task_id="shop/order 17")
    await producer.value(result)
    conversation_id = derive_task_conversation_id(result.id)
    env = environment(tmp_path, DECKHANDS_URL=producer.cluster.store.url)

    async def call(*arguments: str) -> Done:
        return await asyncio.to_thread(deckhands, *arguments, env=env)

    shown = await call("show", "--task", result.id, "--json")
    assert (shown.code, shown.json[0]["conversation_id"]) == (0, conversation_id)
    for verb in ("logs", "export"):
        by_task, by_id = await call(verb, "--task", result.id), await call(verb, conversation_id)
        assert (by_task.code, by_task.out) == (0, by_id.out)
    assert (await call("why", "--task", result.id)).code == 0
    cancelled = await call("cancel", "--task", result.id, "--json")
    assert (cancelled.code, cancelled.json[0]["conversation_id"]) == (0, conversation_id)
    for arguments in (("show", "--task", "no\nsuch"), ("cancel", conversation_id, "--task", "no\nsuch")):
        missing = await call(*arguments)
        assert missing.code != 0
        assert "The Celery task 'no\\nsuch' has no conversation." in missing.err
    unclear = await call("show")
    assert (unclear.code, "Name its ID, or pass --task" in unclear.err) == (2, True)
    assert (await call("show", conversation_id, "--task", result.id)).code == 2
    assert "The idempotency key is empty" not in (empty := await call("show", "--task", "")).err
    assert empty.code == 2
