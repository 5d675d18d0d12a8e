"""The place of a job that is done alone: held by one, kept by nobody else, and never blocked for ever."""

from __future__ import annotations

import pytest

from broker.store.keys import ShardKeys
from broker.store.store import Store
from deckhands.operations.jobs.job import LOCK_MS, hold_lock

NAME = "retire"


async def test_second_holder_is_not_alone_until_the_first_ends(valkey_store: Store) -> None:
    async with hold_lock(valkey_store, NAME) as first, hold_lock(valkey_store, NAME) as second:
        assert (first, second) == (True, False)
    async with hold_lock(valkey_store, NAME) as third:
        assert third


async def test_nobody_keeps_or_gives_back_the_place_of_another(valkey_store: Store) -> None:
    names, connection = ShardKeys(0), valkey_store.connection
    async with hold_lock(valkey_store, NAME):
        await connection.call("SET", names.job_lock(NAME), "another", "PX", 1_000)  # its own has lapsed meanwhile
        reply = await valkey_store.call_function(
            "deck_hold_job", (names.job_lock(NAME), names.root), "keep", "mine", LOCK_MS
        )
        assert reply == ["other"]
        assert 0 < await connection.call("PTTL", names.job_lock(NAME)) <= 1_000
    assert await connection.call("EXISTS", names.job_lock(NAME)) == 1


@pytest.mark.parametrize(
    "forged", [("SET", "for ever"), ("SET", "for years", "PX", 10**12), ("HSET", "of another type", "")]
)
async def test_a_forged_place_keeps_no_job_from_being_done(valkey_store: Store, forged: tuple[str | int, ...]) -> None:
    what, *rest = forged
    await valkey_store.connection.call(what, ShardKeys(0).job_lock(NAME), *rest)
    async with hold_lock(valkey_store, NAME) as is_alone:
        assert is_alone
