"""Unusual callbacks of a run: each is sent, or the task fails with a typed error; none ends in a traceback."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import chord

from tests.ingress_parts import Producer, saying
from tests.polling import until
from tests.security.hostile_messages import plain_message

pytestmark = pytest.mark.asyncio(loop_scope="module")


def signature(**further: Any) -> dict[str, Any]:
    """A callback in the form of a message."""
    options = {"queue": "shop"} | further.pop("options", {})
    return {"task": "shop.report", "args": [], "kwargs": {}, "options": options, "subtask_type": None} | further


def nested(kind: str, **arguments: Any) -> dict[str, Any]:
    return signature(task=f"celery.{kind}", subtask_type=kind, kwargs=arguments, options={})


SENT: dict[str, dict[str, Any]] = {
    "plain": signature(),
    "immutable": signature(immutable=True, args=[1, 2]),
    "immutable-number": signature(immutable=1),
    "countdown": signature(options={"countdown": 1.5}),
    "eta": signature(options={"eta": "2030-01-01T00:00:00"}),
    "expires-in": signature(options={"expires": 60}),
    "expires-at": signature(options={"expires": "2030-01-01T00:00:00+00:00"}),
    "priority": signature(options={"priority": 0}),
    "headers": signature(options={"headers": {"colour": "red"}}),
    "stamped": signature(options={"stamped_headers": ["colour"], "colour": ["red"]}),
    "null-options": signature(options={"countdown": None, "eta": None, "link": None}),
    "compressed": signature(options={"compression": "gzip"}),
    "linked": signature(options={"link": [signature()], "link_error": [signature()]}),
    "one-link": signature(options={"link": signature()}),
    "group": nested("group", tasks=[signature(), signature()]),
    "nested-group": nested("group", tasks=[nested("group", tasks=[signature()]), signature()]),
    "chain": nested("chain", tasks=[signature(), signature()]),
    "chord": nested("chord", header=[signature()], body=signature()),
    "starmap": nested("xstarmap", task=signature(), it=[[1], [2]]) | {"options": {"queue": "shop"}},
    "chunks": nested("chunks", task=signature(), it=[[1], [2], [3]], n=2) | {"options": {"queue": "shop"}},
}
REFUSED: dict[str, Any] = {
    "text-countdown": signature(options={"countdown": "soon"}),
    "endless-countdown": signature(options={"countdown": 1e300}),
    "text-priority": signature(options={"priority": "high"}),
    "no-time": signature(options={"eta": "never"}),
    "list-expires": signature(options={"expires": [1]}),
    "pickle": signature(options={"serializer": "pickle"}),
    "unknown-compression": signature(options={"compression": "rot13"}),
    "text-link": signature(options={"link": "shop.other"}),
    "number-link": signature(options={"link": [3]}),
    "arguments-twice": signature(options={"args": [1]}),
    "unknown-option": signature(options={"colour": "red"}),
    "missing-stamp": signature(options={"stamped_headers": ["colour"]}),
    "odd-task-id": signature(options={"task_id": 7}),
    "odd-retry": signature(options={"retry_policy": {"max_retries": "x"}}),
    "odd-headers": signature(options={"headers": ["x"]}),
    "unknown-kind": signature(subtask_type="heap"),
    "kind-of-no-text": signature(subtask_type=["group"]),
    "group-without-tasks": nested("group"),
    "linked-group": nested("group", tasks=[signature()]) | {"options": {"link": [signature()]}},
    "chain-of-text": nested("chain", tasks="ab"),
    "chord-without-body": nested("chord", header=[signature()]),
    "chunks-without-size": nested("chunks", task=signature(), it=[]),
    "chunks-of-none": nested("chunks", task=signature(), it=[[1]], n=0),
    "text-arguments": signature(args="ab"),
    "starmap-without-kind": signature(task="celery.starmap", immutable=True, kwargs={"task": signature(), "it": []}),
    "map-of-starmap": nested("xmap", task=signature(task="celery.starmap"), it=[]),
    "built-in-task": signature(task="celery.chord_unlock"),
    "chained-built-in": signature(options={"chain": [signature(task="celery.map")]}),
    "chord-to-a-result": signature(options={"chord": signature(options={"queue": "celery-task-meta-victim"})}),
    "list": [[signature()], 3],
    "text": "shop.report",
}


async def test_unusual_callbacks_are_sent_or_refused_by_type(producer: Producer) -> None:
    broker = producer.app.backend.client
    for name, callback in {**SENT, **REFUSED}.items():
        message = json.loads(plain_message("deckhands.run", name=name))
        message["headers"]["ignore_result"] = False
        following = {"callbacks": [callback], "errbacks": None, "chain": None, "chord": None}
        options = producer.options(saying("done")) | {"task": "x"}
        message |= {"body": json.dumps([[], options, following])}
        message["properties"]["body_encoding"] = "utf-8"
        broker.lpush("deckhands", json.dumps(message))
    for name in SENT:
        result = producer.app.AsyncResult(name)
        await producer.until_state(result, "SUCCESS", "FAILURE")
        assert (name, result.state) == (name, "SUCCESS"), result.result

    def parents() -> set[str]:
        entries = broker.lrange("shop", 0, -1) + broker.lrange("shop\x06\x163", 0, -1)
        return {json.loads(entry)["headers"]["parent_id"] for entry in entries}

    await until(lambda: parents() == set(SENT), what="a callback of each run")
    for name in REFUSED:
        result = producer.app.AsyncResult(name)
        await producer.until_state(result, "SUCCESS", "FAILURE")
        kind = "ValueError" if name in ("list", "text") else "RequestRefused"  # no message that Celery could read
        assert (name, type(result.result).__name__) == (name, kind), result.result
    assert parents() == set(SENT)
    assert "Traceback" not in producer.cluster.log_of("d1")


async def test_a_callback_that_the_broker_refuses_fails_its_task_once(producer: Producer) -> None:
    broker = producer.app.backend.client
    broker.set("typed", "no list")
    links = [producer.app.signature("shop.report", queue=queue) for queue in ("shop-typed", "typed")]
    result = producer.run(turns=saying("done"), link=links)
    await producer.until_state(result, "SUCCESS", "FAILURE")
    assert (result.state, result.result.args[1]) == ("FAILURE", "unusable_callback")
    assert broker.llen("shop-typed") == 1


@pytest.mark.parametrize("fault", ["refused by the broker", "refused by type", "impossible time", "unknown task"])
async def test_a_chord_ends_whatever_is_wrong_with_a_header(producer: Producer, fault: str) -> None:
    producer.app.backend.client.set("typed", "no list")
    odd = producer.signature("odd", saying("odd"))
    match fault:
        case "refused by the broker":
            odd.link(producer.app.signature("shop.report", queue="typed"))
        case "refused by type":
            odd.link(producer.app.signature("celery.chord_unlock", queue="shop"))
        case "impossible time":
            odd.set(expires=datetime(2500, 1, 1, tzinfo=UTC))
        case _:
            odd = producer.app.signature("deckhands.nosuch", queue="deckhands")
    fine = producer.signature("fine", saying("fine"))
    body = chord([odd, fine], app=producer.app)(producer.signature("body", saying("all")))
    await producer.until_state(body, "FAILURE")
    assert type(body.result).__name__ == "ChordError"
