"""The record of operations keeps what is young enough, and the job that trims it removes nothing else."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from broker.runtime.clock import to_millis
from broker.runtime.settings import BrokerSettings
from broker.store.store import Store, open_store
from deckhands.operations.jobs.cleanup import trim_operations
from deckhands.operations.jobs.job import JobServices
from deckhands.server.auth.operations import Operations
from tests.stores import RealServer, emptied

KEY = "deck:{0}:operations:record"


async def fill(store: Store, *ages_days: float | None) -> None:
    """Add an entry of each age; None is one that cannot be read."""
    for number, age in enumerate(ages_days):
        at = None if age is None else to_millis(store.clock.now() - timedelta(days=age))
        entry = "{" if at is None else json.dumps({"at": at, "action": "delete", "target": f"c{number}"})
        await store.call("RPUSH", KEY, entry)


async def trim(store: Store, days: int = 400) -> int:
    return (await trim_operations(JobServices(store, BrokerSettings(operations_days=days))))["removed"]


@pytest.mark.parametrize(
    ("ages", "kept"),
    [
        ((900, 401, 399, 1), ["c3", "c2"]),
        ((900, None, 401, 399), ["c3"]),
        ((900, None), []),
        ((399, 900), ["c1", "c0"]),
        ((900, 500), []),
        ((), []),
    ],
)
async def test_entries_older_than_the_setting_are_removed(
    valkey_server: RealServer, ages: tuple[float | None, ...], kept: list[str]
) -> None:
    store = await open_store(await emptied(valkey_server.url))
    await fill(store, *ages)
    await trim(store)
    assert [one.target for one in await Operations(store).latest()] == kept
    assert await trim(store) == 0
    await store.aclose()


async def test_zero_days_keep_the_record_for_ever(valkey_server: RealServer) -> None:
    store = await open_store(await emptied(valkey_server.url))
    await fill(store, 20_000, 1)
    assert await trim(store, days=0) == 0
    assert len(await Operations(store).latest()) == 2
    await store.aclose()


async def test_more_than_one_call_removes_are_removed(valkey_server: RealServer) -> None:
    store = await open_store(await emptied(valkey_server.url))
    old = json.dumps({"at": 1, "target": "old"})
    await store.call_many([("RPUSH", KEY, *[old] * 1_000)] * 25)
    await fill(store, 1)
    assert await trim(store) == 25_000
    assert [one.target for one in await Operations(store).latest()] == ["c0"]
    await store.aclose()
