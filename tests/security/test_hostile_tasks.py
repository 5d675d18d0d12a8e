"""Whatever arrives in the door's queue is refused or dropped, ends no door, and begins nothing twice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.door_parts import Producer, producer, saying  # noqa: F401  (a fixture)
from tests.polling import unhurried, until
from tests.security.hostile_messages import hostile_tasks, plain_message

SEED = 20261123
COUNT = 600
ODD: tuple[Any, ...] = (None, 0, -1, 2**70, "", "x" * 300, [], {}, [[]], {"task": 1}, {"a": {"b": []}}, True, 1.5)
TASKS = ("run", "submit", "message", "pause", "resume", "cancel", "confirm", "reject", "fork")
FIELDS = (
    "task",
    "model",
    "workspace",
    "limits",
    "tools",
    "secrets",
    "labels",
    "priority",
    "id",
    "text",
    "at",
    "colour",
)


def hostile_calls(seed: int, count: int) -> Iterator[str]:
    """Messages of the right form, whose arguments and callbacks are anything."""
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


async def test_no_hostile_task_ends_a_door(producer: Producer) -> None:  # noqa: F811
    print(f"seed {SEED}")
    broker, door = producer.app.backend.client, producer.cluster.workers["d1"]
    for entry in (*hostile_tasks(SEED, COUNT), *hostile_calls(SEED, COUNT)):
        broker.lpush("deckhands", entry if isinstance(entry, bytes) else entry.encode("utf-8", "surrogatepass"))

    def is_drained() -> bool:
        assert door.poll() is None, producer.cluster.log_of("d1")[-2_000:]
        return not broker.llen("deckhands") and not broker.hlen("deckhands:unacked")

    await until(is_drained, limit=unhurried(120.0), what="an empty queue")
    assert (await producer.value(producer.run(turns=saying("still here"))))["message"] == "still here"
    assert door.poll() is None
