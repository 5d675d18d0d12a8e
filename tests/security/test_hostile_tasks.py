"""Any message in the ingress's queue is refused or dropped, ends no ingress, and starts nothing twice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ingress_parts import Producer, producer, saying  # noqa: F401  (a fixture)
from tests.polling import unhurried, until
from tests.security.hostile_messages import (
    COMMANDS,
    UNDER_WAY,
    hostile_commands,
    hostile_tasks,
    plain_command,
    plain_message,
    to_bytes,
)

SEED = 20261123
RESULTS: tuple[str | bytes | dict[str, str], ...] = (
    *("", "null", "[]", "{}", "not json", '{"status": 1}', '{"status": "FAILURE", "result": 3}', b"\xff\xfe"),
    *('{"status": "SUCCESS"}', '{"status": "NONE", "result": {"exc_type": [], "exc_message": {}}}', "[" * 50_000),
    {"no": "text"},
)
"""What may stand where Celery keeps the result of a task."""
ODD: tuple[Any, ...] = (None, 0, -1, 2**70, "", "x" * 300, [], {}, [[]], {"task": 1}, {"a": {"b": []}}, True, 1.5)
TASKS = ("run", "submit", "message", "pause", "resume", "cancel", "confirm", "reject", "fork")
FIELDS = (
    *("task", "model", "workspace", "limits", "tools", "secrets", "labels", "priority", "id", "text", "at"),
    "colour",
)


def hostile_calls(seed: int, count: int) -> Iterator[str]:
    """Messages of the right form, with arbitrary arguments and callbacks."""
    chance = random.Random(seed)
    for number in range(count):
        message = json.loads(plain_message(f"deckhands.{chance.choice(TASKS)}", name=f"hostile-{number}"))
        arguments = [chance.choice(ODD) for _ in range(chance.randrange(4))]
        options = {chance.choice(FIELDS): chance.choice(ODD) for _ in range(chance.randrange(4))}
        follow = {name: chance.choice((None, [{"task": chance.choice(ODD)}], {"task": "x"})) for name in ("chord",)}
        message["body"] = json.dumps([arguments, options, follow])
        message["properties"]["body_encoding"] = "utf-8"
        message["headers"]["eta"] = chance.choice((None, None, "2300-01-01T00:00:00+00:00", "1970-01-01"))
        yield json.dumps(message)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(600, id="some"),
        pytest.param(5_000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1_800)]),
    ],
)
async def test_no_hostile_task_or_command_ends_an_ingress(producer: Producer, count: int) -> None:  # noqa: F811
    print(f"seed {SEED}")
    broker = producer.app.backend.client
    channel = f"/{broker.connection_pool.connection_kwargs.get('db', 0)}.celery.pidbox"
    # Its broker has a password, so clients with command rights may stop workers; and all may drain them.
    harmless = [name for name in COMMANDS if name not in ("shutdown", "drain")]
    commands = hostile_commands(SEED + 1, 2 * count, known=harmless)
    await until(lambda: broker.publish(channel, plain_command("ping")), limit=unhurried(60.0), what="remote control")
    for entry in (*hostile_tasks(SEED, count), *hostile_calls(SEED, count)):
        broker.lpush("deckhands", to_bytes(entry))
        broker.publish(channel, to_bytes(next(commands)))
    await drained(producer, limit=120.0 + count / 10)
    await still_serves(producer)


async def test_no_damaged_result_or_key_ends_an_ingress(producer: Producer) -> None:  # noqa: F811
    """The result of a running task is damaged meanwhile, and so are the records of running tasks."""
    broker = producer.app.backend.client
    for number, value in enumerate(RESULTS):
        task_id = f"damaged-{number}"
        if isinstance(value, dict):
            broker.hset(f"celery-task-meta-{task_id}", mapping=value)
        else:
            broker.set(f"celery-task-meta-{task_id}", value)
        broker.lpush("deckhands", message_of("deckhands.run", task_id, producer.options(saying("damaged"))))
        broker.lpush("deckhands", message_of("deckhands.nosuch", task_id, {}))
    for number, forged in enumerate(UNDER_WAY):
        broker.zadd("deckhands:unacked_index", {f"forged-{number}": 1 + number})
        broker.hset("deckhands:unacked", f"forged-{number}", forged)
    await drained(producer, limit=30.0)
    await still_serves(producer)


@pytest.mark.parametrize("kind", [None, "xstarmap"])
async def test_no_errback_is_called_with_the_rights_of_an_ingress(producer: Producer, kind: str | None) -> None:  # noqa: F811
    """A request that is refused has `celery.starmap` as its errback, which would send what it maps."""
    broker = producer.app.backend.client
    key = "celery-task-meta-victim" if kind is None else "mapped"
    target = {"task": "x", "args": [], "kwargs": {}, "options": {"queue": key}, "subtask_type": None}
    mapped = target if kind else target | {"task": "celery.group", "subtask_type": "group", "options": {}}
    mapped = mapped if kind else mapped | {"kwargs": {"tasks": [target]}}
    items = [[]] if kind else [[[target], ["group", None], "group", []]]
    errback = {"task": "celery.starmap", "args": [], "kwargs": {"task": mapped, "it": items}, "subtask_type": kind}
    errback |= {"immutable": True, "options": {"queue": "shop"}}
    message = json.loads(message_of("deckhands.run", "attack", {"colour": "red"}))
    message["body"] = json.dumps([["do it"], {"colour": "red"}, {"errbacks": [errback]}])
    broker.lpush("deckhands", json.dumps(message))
    result = producer.app.AsyncResult("attack")
    await producer.until_state(result, "FAILURE")
    await drained(producer, limit=30.0)
    assert not broker.exists(key)
    names = [json.loads(entry)["headers"]["task"] for entry in broker.lrange("shop", 0, -1)]
    assert names == (["celery.starmap"] if kind else [])


def message_of(name: str, task_id: str, options: dict[str, Any]) -> str:
    """A task message whose result is kept. No client waits for it, because a client of Celery's could not."""
    message = json.loads(plain_message(name, name=task_id))
    message["headers"]["ignore_result"] = False
    message["body"] = json.dumps([["do it"], options, {}])
    message["properties"]["body_encoding"] = "utf-8"
    return json.dumps(message)


async def drained(producer: Producer, *, limit: float) -> None:  # noqa: F811
    """Wait until nothing is queued or running."""
    broker, ingress = producer.app.backend.client, producer.cluster.workers["d1"]

    def is_drained() -> bool:
        assert ingress.poll() is None, producer.cluster.log_of("d1")[-2_000:]
        return not broker.llen("deckhands") and not broker.hlen("deckhands:unacked")

    try:
        await until(is_drained, limit=unhurried(limit), what="an empty queue")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {broker.llen('deckhands')}, {broker.hgetall('deckhands:unacked')}") from None


async def still_serves(producer: Producer) -> None:  # noqa: F811
    result = producer.run(turns=saying("still here"))
    assert (await producer.value(result, limit=unhurried(60.0)))["message"] == "still here"
    assert producer.cluster.workers["d1"].poll() is None
