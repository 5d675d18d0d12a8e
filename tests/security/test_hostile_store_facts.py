"""The store's own facts: a process that cannot use the store, or finds another one, reports which and why.

Threat: every client with all rights on the store may forge them. Running workers end when the generation changes, by
design.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker.runtime.errors import StoreMisconfigured, StoreReplaced
from broker.store import keys
from broker.store.function_library import own_version
from broker.store.store import Store, open_store
from tests.stores import RealServer, emptied

RUBBISH = ("", "x", "-1", "1e3", "9" * 400, b"\xff\xfe", "null", "1.5")


@pytest.fixture
async def store(valkey_server: RealServer) -> AsyncIterator[Store]:
    url = await emptied(valkey_server.url)
    store = await open_store(url)
    yield store
    await store.connection.call("DEL", keys.STORE)
    await store.aclose()


@pytest.mark.parametrize("field", ["schema", "shards"])
@pytest.mark.parametrize("value", RUBBISH)
async def test_a_number_that_is_none_is_named(valkey_server: RealServer, store: Store, field: str, value: str) -> None:
    await store.connection.call("HSET", keys.STORE, field, value)
    with pytest.raises(StoreMisconfigured, match=f"The field {field} of deck:store is"):
        await open_store(valkey_server.url)


@pytest.mark.parametrize("value", [*RUBBISH, "0"])
async def test_functions_of_a_version_that_is_none_are_loaded_again(
    valkey_server: RealServer, store: Store, value: str
) -> None:
    await store.connection.call("HSET", keys.STORE, "functions", value)
    again = await open_store(valkey_server.url)
    assert (await store.connection.call("HGET", keys.STORE, "functions")) == own_version().stamp.encode()
    await again.aclose()


@pytest.mark.parametrize("value", [*RUBBISH, "0"])
async def test_another_generation_is_another_store(store: Store, value: str) -> None:
    await store.connection.call("HSET", keys.STORE, "generation", value)
    with pytest.raises(StoreReplaced):
        await store.check_generation()


async def test_facts_of_another_type_are_named(valkey_server: RealServer, store: Store) -> None:
    await store.connection.call("SET", keys.STORE, "a string")
    with pytest.raises(StoreMisconfigured, match="deck:store is not a hash"):
        await open_store(valkey_server.url)
