"""With any stored schedules, the others start, and the job that starts them ends well.

Threat: every client that can write to the store as `jobs` or with every right may forge them, such as a compromised
jobs worker. Clients write schedules through `ScheduleRepository`, which checks them.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.contract.timing import MAX_SECONDS
from broker.coordination.quarantine import Quarantine
from deckhands.operations.jobs.scheduler import start_due_schedules
from deckhands.operations.schedules.schedule import MAX_MISSED, Schedule, ScheduleStatus, find_due
from tests.integration.test_schedules import NAME, NOON, Cluster, cluster  # noqa: F401  (a fixture)

SEED = 20261126
SCORES = ("inf", "-inf", 1e300, -1e300, -1, 0, 1, 2**62, -(2**62), 253_402_300_800_000)
REQUESTS = (
    *("{", "null", "[]", "7", '{"task": 7}', '{"task": "x", "odd": 1}', "[" * 50_000, "\x00", ""),
    '{"task":"\\ud800"}',
)
SEALED = ("", "AAAA", "no base64 é", "QUFB" * 20, "=")
"""What may stand where an encrypted request should."""
ODD: tuple[Any, ...] = (None, "", "x", -1, 1e308, [], {}, "9999-12-31T23:59:00Z", "0001-01-01T00:00:00", True, 10**400)
FIELDS = {**Schedule.model_fields, "odd": None}


def text_of(**fields: Any) -> str:
    return json.dumps({"name": "forged", "cron": "* * * * *", "request": '{"task": "x"}', **fields})


def hostile_schedules(seed: int, count: int) -> list[tuple[str, str, Any]]:
    """Return hostile values: the schedule, its status, and the score of its next tick."""
    chance = random.Random(seed)
    found: list[tuple[str, str, Any]] = [
        *((text_of(request=request), "{}", 1) for request in REQUESTS),
        *((text_of(request=request, is_sealed=True), "{}", 1) for request in SEALED),
        *(
            (text_of(zone=zone), "{}", 1)
            for zone in ("../../etc/passwd", "/etc/localtime", "Europe", "x\x00", "é" * 50)
        ),
        *((text_of(), "{}", score) for score in SCORES),
    ]
    while len(found) < count:
        schedule = text_of(**{name: chance.choice(ODD) for name in chance.sample(sorted(FIELDS), chance.randint(0, 2))})
        standing = {
            name: chance.choice(ODD)
            for name in chance.sample(sorted(ScheduleStatus.model_fields), chance.randint(0, 3))
        }
        standing["queued"] = chance.choice(
            (standing.get("queued"), ["0001-01-01T00:00:00"], ["9999-12-31T23:59:59Z"] * 3)
        )
        found.append((schedule, json.dumps(standing), chance.choice(SCORES)))
    return found


async def test_no_forged_schedule_keeps_another_from_its_turn(cluster: Cluster) -> None:  # noqa: F811
    print(f"seed {SEED}")
    call, names = cluster.store.connection.call, cluster.store.all_shards[0]
    forged = hostile_schedules(SEED, 200)
    for number, (schedule, standing, score) in enumerate(forged):
        await call("HSET", names.schedules, f"forged-{number}", schedule)
        await call("HSET", names.schedules_status, f"forged-{number}", standing)
        await call("ZADD", names.schedules_due, score, f"forged-{number}")
    for name in (b"\xff", b"", b"../x", b"a:b"):
        await call("ZADD", names.schedules_due, "-inf", name)
        await call("HSET", names.schedules, name, text_of())
    await cluster.add()
    due = await cluster.come_due()
    for _ in range(2):
        await cluster.tick()
    entry = await cluster.book.entry(NAME)
    assert (entry.status.last_tick, entry.status.begun) == (due, 1)
    assert NAME in [entry.schedule.name for entry in await cluster.book.all()]


@pytest.mark.parametrize("key", ["schedules", "schedules_status", "schedules_due"])
async def test_schedule_key_of_another_type_is_moved_aside(cluster: Cluster, key: str) -> None:  # noqa: F811
    call, name = cluster.store.connection.call, getattr(cluster.store.all_shards[0], key)
    await cluster.add()
    await cluster.come_due()
    await call("DEL", name)
    await call("SET", name, "a string")
    for _ in range(2):
        await start_due_schedules(cluster.services)
    assert [kept.key for kept in await Quarantine(cluster.store).list_items()] == [name]
    kept = [entry.schedule.name for entry in await cluster.book.all()]
    assert kept == ([] if key == "schedules" else [NAME])
    if kept:  # it comes due again
        assert (await cluster.book.entry(NAME)).due is not None


def test_ancient_tick_is_followed_by_the_right_one() -> None:
    schedule = Schedule(name=NAME, cron="* * * * *", catch_up_seconds=MAX_SECONDS)
    found = find_due(schedule, datetime(1971, 1, 1, tzinfo=UTC), NOON)
    assert (found.tick, found.next) == (NOON, NOON + timedelta(minutes=1))
    assert found.missed == MAX_MISSED - 1  # a worker's loop does not go through more


async def test_a_request_with_half_a_character_can_be_kept(cluster: Cluster) -> None:  # noqa: F811
    await cluster.add({"workspace": {"path": "/half \ud83d"}})
    entry = await cluster.book.entry(NAME)
    assert cluster.book.load_request(entry.schedule).workspace_spec().path == "/half \ufffd"
