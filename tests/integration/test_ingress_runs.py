"""Agents as Celery tasks, called by name from an application that does not import Deckhands. One cluster serves all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from celery import chord, group
from celery.contrib.abortable import AbortableAsyncResult
from celery.exceptions import TaskRevokedError

from broker.coordination.quarantine import Quarantine
from controller_worker.memory.conversation_memory import ConversationMemory, PromptOptions
from deckhands.client.tasks.tasks import MAX_TASK_CHARS
from deckhands.ingress.context import derive_task_conversation_id
from deckhands.ingress.earlier_results import FILE
from deckhands.ingress.ingress_app import MAX_BODY_CHARS
from tests.faults.harness import steps
from tests.ingress_parts import Producer, saying
from tests.polling import until
from tests.security.hostile_messages import plain_message

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_run_is_a_task_whose_value_is_the_summary(producer: Producer) -> None:
    result = producer.run(turns=steps(1))
    summary = await producer.value(result)
    conversation_id = derive_task_conversation_id(result.id)
    assert summary == (await producer.cluster.client.summary(conversation_id)).as_json()
    assert (summary["state"], summary["message"]) == ("finished", "all done")
    caller = producer.cluster.client.store.known_keys(conversation_id)

    async def is_answered() -> bool:
        call = producer.cluster.client.store.connection.call
        return await call("HGET", caller.caller, "answered") == b"1" and not await call("ZCARD", caller.shard.awaited)

    await until(is_answered, what="end of the waiting")


async def test_a_long_message_is_whole_or_names_where_it_is(producer: Producer) -> None:
    long, too_long = "long " * 40_000, "longer" * 60_000
    first, second = producer.run(turns=saying(long)), producer.run(turns=saying(too_long))
    assert (await producer.value(first))["message"] == long
    message = (await producer.value(second))["message"]
    assert len(message) < len(too_long)
    assert f"`deckhands show {derive_task_conversation_id(second.id)} --json` prints the whole" in message
    summary = await producer.cluster.client.summary(derive_task_conversation_id(second.id))
    assert summary.message == too_long


async def test_a_task_of_the_longest_length_reaches_the_agent_whole(producer: Producer) -> None:
    task = "".join(f"{n:09} " for n in range(MAX_TASK_CHARS // 10))
    result = producer.run(task, saying("read"))
    await producer.value(result)
    events = await producer.cluster.client.events(derive_task_conversation_id(result.id), is_whole=True)
    (message,) = [event.content for event in events if event.kind == "action.message"]  # type: ignore[attr-defined]
    assert message == task
    memory = ConversationMemory(PromptOptions())
    for event in events:
        memory.add(event)
    assert any(task in getattr(part, "text", "") for prompt in memory.messages() for part in prompt.content)


async def test_failed_run_is_a_typed_failure_without_imports(producer: Producer) -> None:
    result = producer.send("run", "do it", kwargs={"model": "scripted/missing.json", "limits": {"max_iterations": 1}})
    with pytest.raises(Exception, match=r"missing\.json") as failed:
        await producer.value(result)
    assert type(failed.value).__name__ == "AgentFailed"
    _, code, conversation_id = failed.value.args
    assert code
    assert conversation_id == derive_task_conversation_id(result.id)


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        ((), {}, "task: it is missing"),
        (("do it",), {"colour": "red"}, "colour: there is no such field"),
        (("do it",), {"agent": "NobodyAgent"}, "NobodyAgent"),
        (("a", "b", "c"), {}, "2 arguments before its task"),
        (("do it",), {"idempotency_key": "mine"}, "idempotency_key"),
    ],
)
async def test_a_request_that_cannot_be_used_is_refused_by_name(
    producer: Producer, arguments: tuple[str, ...], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(Exception, match=reason) as refused:
        await producer.value(producer.send("run", *arguments, kwargs=options))
    assert type(refused.value).__name__ == "RequestRefused"


async def test_unknown_task_names_and_too_deep_messages_fail(producer: Producer) -> None:
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    unknown = producer.app.send_task("deckhands.runn", ["x"], queue="deckhands")
    nested = producer.app.send_task("deckhands.run", ["x"], {"labels": deep}, queue="deckhands")
    mapped = producer.app.send_task("celery.starmap", kwargs={"task": {}, "it": []}, queue="deckhands")
    expected = ((unknown, "deckhands.runn"), (nested, "levels deep"), (mapped, "send a group of deckhands.run"))
    for result, told in expected:
        await producer.until_state(result, "FAILURE")
        assert told in str(result.result)


def unusable_messages() -> dict[str, tuple[dict[str, Any], str]]:
    """Messages that no ingress can use, by their task ids, each with a part of the reason."""
    large = base64.b64encode(json.dumps([["x" * (13 << 20)], {}, {}]).encode()).decode()
    assert len(large) > MAX_BODY_CHARS
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "large": ({"body": large}, "the limit is"),
        "pickle": ({"content-type": "application/x-python-serialize", "content-encoding": "binary"}, "content-type"),
        "msgpack": ({"content-type": "application/x-msgpack", "content-encoding": "binary"}, "content-type"),
        "yaml": ({"content-type": "application/x-yaml"}, "content-type"),
        "latin": ({"content-encoding": "latin-1"}, "content-encoding"),
        "bomb": (
            {"headers": {"id": "bomb", "task": "deckhands.run", "compression": "application/x-gzip"}},
            "compression",
        ),
        "no-json": ({"body": base64.b64encode(b"{").decode()}, ""),
        "headless": ({"headers": {}}, ""),
        "odd-priority": ({"properties": {"correlation_id": "odd-priority", "priority": "x"}}, "properties"),
    }
    found = {}
    for task_id, (change, reason) in changes.items():
        message = json.loads(plain_message("deckhands.run", name=task_id))
        message["headers"]["ignore_result"] = False
        message["properties"]["correlation_id"] = task_id
        found[task_id] = (message | change, reason)
    return found


async def test_every_unusable_message_with_an_id_is_answered_and_listed(producer: Producer) -> None:
    messages = unusable_messages()
    for message, _ in messages.values():
        producer.app.backend.client.lpush("deckhands", json.dumps(message))
    for task_id, (_, reason) in messages.items():
        result = producer.app.AsyncResult(task_id)
        await producer.until_state(result, "FAILURE")
        assert reason in str(result.result), (task_id, result.result)

    async def are_listed() -> bool:
        entries = await Quarantine(producer.cluster.client.store).list_items()
        return {entry.entry_id for entry in entries if entry.key == "deckhands"} >= set(messages)

    await until(are_listed, what="notes of all messages")
    assert all(task_id in producer.cluster.log_of("d1") for task_id in messages)
    await producer.until_taken()


async def test_callbacks_get_the_summary_and_errbacks_the_id(producer: Producer) -> None:
    then = producer.signature("What was done?", saying("It was done."))
    then_result = then.freeze()
    result = producer.run(turns=saying("Tests pass."), link=then)
    assert (await producer.value(then_result))["message"] == "It was done."
    (begin, message, *_) = await producer.cluster.client.events(derive_task_conversation_id(then_result.id))
    assert "Tests pass." in message.content  # type: ignore[attr-defined]
    assert begin.title == "What was done?"  # type: ignore[attr-defined]
    errback = producer.app.signature("shop.alarm", queue="shop-alarm")
    failing = producer.send("run", kwargs={}, link_error=errback)
    await producer.until_state(failing, "FAILURE")
    await until(lambda: _queued(producer, "shop-alarm") == 1, what="the errback")
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("kind", ["large", "zlib", "bzip2", "msgpack", "pickle", "ignored"])
async def test_a_chord_ends_although_a_message_of_it_is_unusable(producer: Producer, kind: str) -> None:
    """The signature of its body is in the body of that very message."""
    options: dict[str, dict[str, Any]] = {
        "large": {},
        "msgpack": {"serializer": "msgpack"},
        "pickle": {"serializer": "pickle"},
        "ignored": {"compression": "zlib", "ignore_result": True},
    }
    unusable = producer.signature("x" * (13 << 20) if kind == "large" else "never")
    unusable.set(**options.get(kind, {"compression": kind}))
    # Of a pickle, nothing can be read; the others of the chord say what its body is.
    parts = (
        [unusable, producer.signature("do it", saying("done"))] if kind == "pickle" else [unusable, unusable.clone()]
    )
    result = chord(parts, app=producer.app)(producer.signature("Sum up.", saying("never")))
    await producer.until_state(result, "FAILURE")
    assert type(result.result).__name__ == "ChordError"


async def test_chains_groups_and_chords_do_what_celery_says(producer: Producer) -> None:
    chain = producer.app.signature("deckhands.run", kwargs={"task": "first", **producer.options(saying("one"))})
    chain = chain.set(queue="deckhands") | producer.signature("second", saying("two"))
    assert (await producer.value(chain.apply_async()))["message"] == "two"
    crowd = group([producer.signature(f"task {n}", saying(f"answer {n}")) for n in range(3)], app=producer.app)
    found = await producer.value(crowd.apply_async())
    assert [summary["message"] for summary in found] == ["answer 0", "answer 1", "answer 2"]
    header = [producer.signature(f"task {n}", saying(f"answer {n}")) for n in range(3)]
    result = chord(header, app=producer.app)(producer.signature("Summarise", saying("all of them")))
    assert (await producer.value(result))["message"] == "all of them"
    (_, message, *_) = await producer.cluster.client.events(derive_task_conversation_id(result.id))
    assert [f"answer {n}" in message.content for n in range(3)] == [True] * 3  # type: ignore[attr-defined]


async def test_an_agent_can_read_1500_earlier_results(producer: Producer) -> None:
    results = [{"summary": True, "message": f"answer {n}", "metrics": {"padding": "x" * 1_000}} for n in range(1_500)]
    counts = {"name": "execute_bash", "arguments": {"command": f"wc -l < {FILE}; tail -n 1 {FILE}"}}
    options = producer.options([{"tool_calls": [counts]}, *saying("counted")]) | {"workspace": {"sandbox": "none"}}
    result = producer.send("run", results, "Sum up.", kwargs=options)
    assert (await producer.value(result))["message"] == "counted"
    events = await producer.cluster.client.events(derive_task_conversation_id(result.id))
    (output,) = [event.content for event in events if event.kind == "observation.run"]  # type: ignore[attr-defined]
    assert output.startswith("1500\n")
    assert "answer 1499" in output


async def test_ignored_result_is_not_kept_but_callbacks_fire(producer: Producer) -> None:
    then = producer.signature("next", saying("done"))
    after = then.freeze()
    result = producer.run(turns=saying("first"), ignore_result=True, link=then)
    assert (await producer.value(after))["message"] == "done"
    assert producer.app.backend.client.get(f"celery-task-meta-{result.id}") is None


async def test_a_countdown_holds_nothing_and_begins_when_it_is_over(producer: Producer) -> None:
    far = producer.run(turns=saying("never"), countdown=30 * 24 * 3600)
    client, conversation_id = producer.cluster.client, await producer.begun(far)
    row = await client.row(conversation_id)
    assert (row.wait_reason, row.last_event_id, row.owner) == ("scheduled", 2, "")
    near = producer.run(turns=saying("now"), countdown=2)
    assert (await producer.value(near))["message"] == "now"
    assert (await client.row(conversation_id)).last_event_id == 2
    unacked = producer.app.backend.client
    await until(lambda: unacked.hlen("deckhands:unacked") == 0, what="acknowledged messages")
    far.revoke()
    await producer.until_state(far, "REVOKED")
    assert (await client.wait_until_settled(conversation_id)).state == "stopped"


async def test_the_same_message_twice_begins_one_conversation(producer: Producer) -> None:
    options, before = producer.options(saying("once")), await _begun(producer)
    for _ in range(3):
        result = producer.send("run", "do it", kwargs=options, task_id="the-same-task")
    assert (await producer.value(result))["message"] == "once"
    producer.send("run", "do it", kwargs=options, task_id="the-same-task")
    other = producer.run(turns=saying("other"))
    await producer.value(other)
    assert await _begun(producer) - before == {*map(derive_task_conversation_id, ("the-same-task", other.id))}


async def test_a_forgotten_result_comes_again_with_the_task_id(producer: Producer) -> None:
    options, failing = producer.options(saying("once")), {"model": "scripted/missing.json"}
    report, before = producer.app.signature("shop.report", queue="shop-forgotten"), await _begun(producer)
    for task_id, arguments in (("finished", options), ("failed", failing)):
        first = producer.send("run", "do it", kwargs=arguments, task_id=task_id, link=report, link_error=report)
        await producer.until_state(first, "SUCCESS", "FAILURE")
        value = first.result
        first.forget()
        again = producer.send("run", "do it", kwargs=arguments, task_id=task_id, link=report, link_error=report)
        await producer.until_state(again, "SUCCESS", "FAILURE")
        assert repr(again.result) == repr(value)
    revoked = producer.run(turns=steps(1, seconds=60.0), task_id="revoked")
    await producer.begun(revoked)
    revoked.revoke()
    await producer.until_state(revoked, "REVOKED")
    revoked.forget()
    await producer.until_state(producer.send("run", "do it", task_id="revoked"), "REVOKED")
    assert len(await _begun(producer) - before) == 3
    assert _queued(producer, "shop-forgotten") == 2


async def test_progress_is_a_state_of_its_own(producer: Producer) -> None:
    result = producer.run(turns=steps(2), latency=2.0)
    await until(lambda: result.state == "PROGRESS" and result.info["iterations"] >= 1, what="progress")
    found = result.info
    assert found.keys() == {"conversation_id", "state", "iterations", "cost_usd", "last_action"}
    assert found["conversation_id"] == derive_task_conversation_id(result.id)
    assert (await producer.value(result))["iterations"] == 3
    assert result.state == "SUCCESS"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
async def test_an_aborted_run_is_revoked(producer: Producer) -> None:
    result = producer.run(turns=steps(2), latency=2.0)
    await until(lambda: result.state == "PROGRESS", what="progress")
    AbortableAsyncResult(result.id, app=producer.app).abort()
    await producer.until_state(result, "REVOKED")
    summary = await producer.cluster.client.wait_until_settled(derive_task_conversation_id(result.id))
    assert summary.state == "stopped"


async def test_run_that_started_in_time_outlives_its_expired_message(producer: Producer) -> None:
    """An ingress that dies before it acknowledges a message leaves it to another one, which may get it much later."""
    turns = [
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "until [ -e go ]; do sleep 0.1; done"}}]}
    ]
    options = producer.options([*turns, *saying("all done")])
    result = producer.send("run", "it", kwargs=options, task_id="expired-at-work")
    conversation_id = await producer.begun(result)
    now = producer.cluster.client.store.clock.now()
    producer.send("run", "it", kwargs=options, task_id=result.id, expires=now)
    await producer.until_taken()
    Path(options["workspace"]["path"], "go").touch()
    assert (await producer.value(result))["message"] == "all done"
    assert (await producer.cluster.client.row(conversation_id)).state == "finished"


async def test_a_run_that_expired_in_the_queue_never_begins(producer: Producer) -> None:
    result = producer.run(turns=saying("too late"), expires=producer.cluster.client.store.clock.now())
    with pytest.raises(TaskRevokedError, match="expired"):
        await producer.value(result)
    assert derive_task_conversation_id(result.id) not in await _begun(producer)


async def test_priority_of_a_message_counts_where_the_request_has_none(producer: Producer) -> None:
    urgent, plain = producer.run(turns=saying("a"), priority=1), producer.run(turns=saying("b"))
    for result, wanted in ((urgent, "interactive"), (plain, None)):
        await producer.value(result)
        (created, *_) = await producer.cluster.client.events(derive_task_conversation_id(result.id))
        assert (created.tenancy and created.tenancy.priority) == wanted  # type: ignore[attr-defined]


async def test_a_paused_run_is_waited_for_until_it_is_resumed(producer: Producer) -> None:
    result = producer.run(turns=steps(2), latency=1.0)
    conversation_id = await producer.begun(result)
    await producer.cluster.until_kind(conversation_id, "action.run")
    assert (await producer.value(producer.send("pause", conversation_id)))["conversation_id"] == conversation_id
    await producer.cluster.settle([conversation_id])
    await until(lambda: result.state == "PROGRESS" and result.info["state"] == "paused", what="a paused task")
    await producer.value(producer.send("resume", conversation_id))
    assert (await producer.value(result))["message"] == "all done"


async def test_short_tasks_submit_and_steer_conversations(producer: Producer) -> None:
    options = producer.options(saying("done"))
    first, other = [await producer.value(producer.send("submit", "do it", kwargs=options)) for _ in range(2)]
    assert first != other
    await producer.cluster.settle([first])
    options = {"args": (first, "And now?"), "queue": "deckhands", "task_id": "one-message"}
    for _ in range(2):
        await producer.value(producer.app.send_task("deckhands.message", **options))
    events = await producer.cluster.client.events(first)
    assert sum(getattr(event, "content", "") == "And now?" for event in events) == 1
    fork = await producer.value(producer.send("fork", first, 3))
    assert fork["conversation_id"] != first
    await producer.cluster.settle([first])
    assert (await producer.value(producer.send("cancel", first)))["state"] == "finished"
    for name, arguments in (("confirm", (first,)), ("reject", (first, 7)), ("message", (first,)), ("pause", ("no",))):
        with pytest.raises(Exception, match=r".") as refused:
            await producer.value(producer.send(name, *arguments))
        assert type(refused.value).__name__ == "RequestRefused"


async def test_secrets_reach_the_agent_and_no_eye_beside(producer: Producer) -> None:
    turns = steps(0)
    value = "correct-horse-battery"
    then = producer.app.signature(
        "deckhands.run", kwargs={"task": "x", "secrets": {"KEY": value}, **producer.options(saying("b"))}
    ).set(queue="deckhands")
    after = then.freeze()
    options = {**producer.options(turns), "secrets": {"KEY": value}}
    result = producer.send("run", f"say {value}", kwargs=options, link=then)
    await producer.value(result)
    await producer.value(after)
    store = producer.cluster.client.store
    key = store.known_keys(derive_task_conversation_id(result.id)).caller
    flat = await store.connection.call("HGETALL", key)
    assert value.encode() not in b"".join(flat)
    assert value not in (producer.cluster.root / "d1.log").read_text()


async def _begun(producer: Producer) -> set[str]:
    """Return the ids of all conversations that there are."""
    return {row.conversation_id for row in await producer.cluster.client.recent(limit=1_000)}


def _queued(producer: Producer, queue: str) -> int:
    found = producer.app.backend.client.llen(queue)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    ("limits", "own", "name"),
    [
        ({"soft_time_limit": 1}, None, "SoftTimeLimitExceeded"),
        ({"time_limit": 1}, 60, "TimeLimitExceeded"),
        ({"soft_time_limit": 60, "time_limit": 120}, 1, "AgentFailed"),
    ],
)
async def test_time_limits_of_a_task_bound_its_agent(
    producer: Producer, limits: dict[str, int], own: int | None, name: str
) -> None:
    options = producer.options(steps(1, seconds=120.0)) | ({"limits": {"max_seconds": own}} if own else {})
    result = producer.send("run", "do it", kwargs=options, **limits)
    with pytest.raises(Exception, match="Max seconds: 1") as failed:
        await producer.value(result)
    assert type(failed.value).__name__ == name
    conversation_id = derive_task_conversation_id(result.id)
    assert failed.value.args[1:] == ("limit" if own == 1 else "max_time", conversation_id)
    assert (await producer.cluster.client.summary(conversation_id)).error_code == "max_time"


async def test_submitted_conversation_keeps_its_tasks_time_limit(producer: Producer) -> None:
    options = producer.options(steps(1, seconds=120.0))
    conversation_id = await producer.value(producer.send("submit", "do it", kwargs=options, soft_time_limit=1))
    await producer.cluster.settle([conversation_id])
    assert (await producer.cluster.client.summary(conversation_id)).error_code == "max_time"


async def test_invalid_time_limit_is_refused_by_name(producer: Producer) -> None:
    for task, options, reason in (
        ("run", producer.options(saying("no")), "soft_time_limit -1"),
        ("evaluate", {"dataset": "shipped", "models": "m", "out": "o"}, "a time limit of Celery's"),
    ):
        with pytest.raises(Exception, match=reason) as refused:
            await producer.value(producer.send(task, "do it", kwargs=options, soft_time_limit=-1))
        assert type(refused.value).__name__ == "RequestRefused"
