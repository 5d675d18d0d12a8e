"""The function libraries: each version has one source, and a worker never replaces newer functions by its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from broker.runtime.errors import StoreTooNew
from broker.store import keys
from broker.store.connection import Connection
from broker.store.function_libraries import FUNCTIONS_VERSION, LIBRARIES, OLDEST_CALLER, functions_code, functions_hash
from broker.store.store import open_store
from tests.broker_parts import begin

HASHES_OF_VERSION = {
    2: {
        "deckhands": "c2d4c15fa8a84195",
        "deckhands_governor": "f6dd9ffaf2d58603",
        "deckhands_ledger": "9d20c315f076179f",
        "deckhands_batches": "438bd02c6a69eab9",
    },
    3: {
        "deckhands": "1db9b655dfb2cd12",
        "deckhands_governor": "52080b370800fcb4",
        "deckhands_ledger": "8ce1fa9dbc6e2eec",
        "deckhands_batches": "d59fa74626167beb",
    },
    4: {
        "deckhands": "58108eba86fd4470",
        "deckhands_governor": "52080b370800fcb4",
        "deckhands_ledger": "8ce1fa9dbc6e2eec",
        "deckhands_batches": "d59fa74626167beb",
    },
    5: {
        "deckhands": "1ea283e4af8caa33",
        "deckhands_governor": "52080b370800fcb4",
        "deckhands_ledger": "8ce1fa9dbc6e2eec",
        "deckhands_batches": "d59fa74626167beb",
    },
    6: {
        "deckhands": "105aeb5ecf9cc0d2",
        "deckhands_governor": "0419dd980f1ee36c",
        "deckhands_ledger": "ad1f60c9d80e6c77",
        "deckhands_batches": "d59fa74626167beb",
    },
    7: {
        "deckhands": "bd4e87a58a86c709",
        "deckhands_governor": "eed9f98f47472d40",
        "deckhands_ledger": "6f388ec580629063",
        "deckhands_batches": "d59fa74626167beb",
    },
    8: {
        "deckhands": "eaa616d4083738af",
        "deckhands_governor": "0419dd980f1ee36c",
        "deckhands_ledger": "ad1f60c9d80e6c77",
        "deckhands_batches": "d59fa74626167beb",
    },
    9: {
        "deckhands": "2cad250d8eadef95",
        "deckhands_governor": "eed9f98f47472d40",
        "deckhands_ledger": "6f388ec580629063",
        "deckhands_batches": "d59fa74626167beb",
    },
    10: {
        "deckhands": "3c49aca32eda6af9",
        "deckhands_governor": "142ba6fa15c77f3c",
        "deckhands_ledger": "2ba3a4fafd78854a",
        "deckhands_batches": "2e002ec3ba49b1be",
    },
    11: {
        "deckhands": "377fddcefc3a6ad7",
        "deckhands_governor": "142ba6fa15c77f3c",
        "deckhands_ledger": "2ba3a4fafd78854a",
        "deckhands_batches": "2e002ec3ba49b1be",
    },
}
"""Add a version here when you change a library; never change the hashes of one that has been released."""


def test_a_changed_source_has_a_new_version() -> None:
    found = {library: functions_hash(library) for library in LIBRARIES}
    assert found == HASHES_OF_VERSION[FUNCTIONS_VERSION], (
        "A function library has changed: raise FUNCTIONS_VERSION, and OLDEST_CALLER if older workers cannot call it."
    )
    assert OLDEST_CALLER <= FUNCTIONS_VERSION == max(HASHES_OF_VERSION)


async def test_newer_functions_are_left_alone(
    connect: Callable[[], Connection], caplog: pytest.LogCaptureFixture
) -> None:
    newer = functions_code() + "\nredis.register_function('deck_of_tomorrow', leave)"
    connection = connect()
    await connection.call("FUNCTION", "LOAD", newer)
    await connection.call("HSET", keys.STORE, "functions", f"{FUNCTIONS_VERSION + 1}:abc:{FUNCTIONS_VERSION}")
    with caplog.at_level(logging.WARNING):
        store = await open_store(connection)
    assert await store.function("deck_of_tomorrow", (store.all_shards[0].root,), "w") == ["left"]
    assert f"version {FUNCTIONS_VERSION + 1}; this worker has {FUNCTIONS_VERSION}" in caplog.text
    await begin(store)
    await store.aclose()


async def test_newer_functions_that_do_not_serve_this_worker_are_named(connect: Callable[[], Connection]) -> None:
    newest = FUNCTIONS_VERSION + 2
    connection = connect()
    await connection.call("FUNCTION", "LOAD", functions_code() + "\nredis.register_function('deck_other', leave)")
    await connection.call("HSET", keys.STORE, "functions", f"{newest}:abc:{FUNCTIONS_VERSION + 1}")
    with pytest.raises(StoreTooNew, match=f"version {newest} and serve workers from version {FUNCTIONS_VERSION + 1}"):
        await open_store(connection)
    another = connect()
    assert await another.call("FCALL", "deck_other", 1, "deck:{0}", "w") == [b"left"]  # still the newer ones
    await another.aclose()


async def test_lost_newer_functions_are_not_replaced_by_older_ones(connect: Callable[[], Connection]) -> None:
    connection = connect()
    await connection.call("HSET", keys.STORE, "functions", f"{FUNCTIONS_VERSION + 1}:abc:1")
    with pytest.raises(StoreTooNew, match="has lost its functions"):
        await open_store(connection)
    another = connect()
    assert not await another.call("FUNCTION", "LIST", "LIBRARYNAME", "deckhands")
    await another.aclose()


async def test_older_functions_are_replaced(connect: Callable[[], Connection]) -> None:
    connection = connect()
    await connection.call(
        "FUNCTION", "LOAD", "#!lua name=deckhands\nredis.register_function('deck_leave', function() end)"
    )
    await connection.call("HSET", keys.STORE, "functions", "1:abc")
    store = await open_store(connection)
    assert await store.function("deck_leave", (store.all_shards[0].root,), "w") == ["left"]
    await store.aclose()


async def test_missing_functions_are_deployed_again(connect: Callable[[], Connection]) -> None:
    connection = connect()
    stamp = f"{FUNCTIONS_VERSION}:{functions_hash('deckhands')}:{OLDEST_CALLER}"
    await connection.call("HSET", keys.STORE, "functions", stamp)
    store = await open_store(connection)
    await begin(store)
    await store.aclose()
