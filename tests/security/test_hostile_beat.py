"""With any content of Celery's broker, the beat sends its jobs, and nothing else.

Threat: every client that can write to Celery's broker may forge it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import signals
from redis import Redis

from broker.celery import redis_url
from deckhands.operations.jobs.celery_app import BEAT_KEYS, make_jobs_app
from deckhands.operations.jobs.table import JOBS, schedule
from tests.stores import RealServer

PERIODIC = sorted(f"deckhands.jobs.{job.name}" for job in JOBS if job.every_seconds)
ENTRY = f"{BEAT_KEYS}retire"
OTHER = {"name": "retire", "task": "shop.refund", "args": [], "kwargs": {}, "options": {}, "schedule": 1, "enabled": 1}
DAYS = {"__type__": "datetime", "year": 9999, "month": 1, "day": 1, "hour": 0, "minute": 0, "second": 0}
DEFINITIONS = ("", "{", "null", "[]", "7", json.dumps(OTHER), '{"__type__": "rrule"}', "[" * 50_000, b"\xff")
METAS = (*DEFINITIONS, '{"last_run_at": 7}', '{"last_run_at": "x"}', json.dumps({"last_run_at": DAYS}), "{}")
KINDS = {ENTRY: "hash", f"{BEAT_KEYS}:schedule": "zset", f"{BEAT_KEYS}:statics": "set", f"{BEAT_KEYS}:lock": "string"}


class Beat:
    """A beat in this process, and Celery's broker."""

    def __init__(self, url: str) -> None:
        self.broker = Redis.from_url(redis_url(url))
        self.app = make_jobs_app(url, url, schedule())
        self.service: Any = None

    def start(self) -> None:
        self.service = self.app.Beat(quiet=True).Service(
            self.app, max_interval=1.0, scheduler_cls=self.app.conf.beat_scheduler
        )
        assert self.service.scheduler is not None  # made first, as a beat's banner does
        signals.beat_init.send(sender=self.service)

    def tick(self) -> list[str]:
        """Let it tick once, and return the messages that it sent."""
        self.service.scheduler.tick()
        messages = self.broker.lrange("deckhands.jobs", 0, -1)
        self.broker.delete("deckhands.jobs")
        assert self.broker.keys("*shop*") == []
        return sorted(json.loads(message)["headers"]["task"] for message in messages)

    def make_due(self) -> None:
        for job in JOBS:
            self.broker.hset(f"{BEAT_KEYS}{job.name}", "meta", '{"last_run_at": null}')


@pytest.fixture
def beat(valkey_server: RealServer) -> Iterator[Beat]:
    beat = Beat(f"redis+socket://{valkey_server.socket}?virtual_host=1")
    beat.broker.flushdb()
    yield beat
    if beat.service is not None:
        beat.service.scheduler.close()
    beat.app.close()
    beat.broker.close()


def write(broker: Redis, key: str, kind: str, *, is_of_its_type: bool = False) -> None:
    """Overwrite a key: by another type, or by rubbish."""
    broker.delete(key)
    if (kind == "string") == is_of_its_type:
        broker.set(key, b"\xff rubbish")
    elif kind == "set":
        broker.sadd(key, b"\xff", "retire", "../x")
    elif kind == "zset":
        broker.zadd(key, {b"\xff": 0, ENTRY: float("inf"), f"{BEAT_KEYS}shop": 1})
    else:
        broker.hset(key, b"\xff", b"\xff")


@pytest.mark.parametrize("is_of_its_type", [False, True], ids=["another-type", "rubbish"])
@pytest.mark.parametrize("key", list(KINDS))
def test_a_beat_sends_its_jobs_whatever_its_keys_hold(beat: Beat, key: str, is_of_its_type: bool) -> None:
    beat.start()
    beat.tick()
    beat.make_due()
    write(beat.broker, key, KINDS[key], is_of_its_type=is_of_its_type)
    assert beat.tick() == PERIODIC
    assert beat.tick() == []


@pytest.mark.parametrize("is_of_its_type", [False, True], ids=["another-type", "rubbish"])
@pytest.mark.parametrize("key", list(KINDS))
def test_a_beat_starts_whatever_its_keys_hold(beat: Beat, key: str, is_of_its_type: bool) -> None:
    write(beat.broker, key, KINDS[key], is_of_its_type=is_of_its_type)
    beat.start()
    beat.tick()
    beat.make_due()
    assert beat.tick() == PERIODIC


def test_beat_sends_only_its_applications_tasks(beat: Beat) -> None:
    beat.start()
    for field, texts in (("definition", DEFINITIONS), ("meta", METAS)):
        for text in texts:
            beat.tick()
            beat.make_due()
            beat.broker.hset(ENTRY, field, text)
            assert beat.tick() == PERIODIC, (field, text)
