"""One conversation with which something is wrong keeps no other in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.contract.specs import Tenancy
from deckhands.client.client import Client
from tests.archive_parts import begin_ended, retired
from tests.conversation_hands import WatchedConnection
from tests.stores import RealServer, emptied


@pytest.fixture
async def client(valkey_server: RealServer) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        yield client


async def damage(client: Client, what: str) -> None:
    """Damage the first conversation that the job comes to."""
    names, call = client.store.keys("damaged"), client.store.connection.call
    if what in ("events", "once", "caller", "snapshot"):
        await call("DEL", getattr(names, what))
        await call("SET", getattr(names, what), "a string")
    elif what == "meta":
        await call("DEL", names.meta)
        await call("SET", names.meta, "a string")
    elif what == "another beginning":
        entries = await call("XRANGE", names.events, "-", "+")
        await call("DEL", names.events)
        for number, (_, fields) in enumerate(entries[1:], 1):
            await call("XADD", names.events, f"{number}-0", *fields)
    elif what == "two beginnings":
        (first, *_) = await call("XRANGE", names.events, "-", "+", "COUNT", 1)
        last = int(await call("HGET", names.meta, "last_id")) + 1
        await call("XADD", names.events, f"{last}-0", *first[1])
        await call("HSET", names.meta, "last_id", last)
    else:
        await call("HSET", names.meta, *what.split("=", 1))


@pytest.mark.parametrize(
    "what",
    [
        *("events", "meta", "once", "caller", "snapshot", "another beginning", "two beginnings"),
        *(
            "last_id=x",
            "last_id=99999999999999999999",
            "updated_ms=x",
            "updated_ms=1e400",
            "state=finished",
            "labels=x",
        ),
        *("created_ms=x", "cost_usd=x", "iterations=x", "node=a b", "deleted=1"),
    ],
)
async def test_one_that_is_damaged_keeps_no_other_in_the_store(client: Client, tmp_path: Path, what: str) -> None:
    await begin_ended(client, "damaged")
    await begin_ended(client, "whole")
    await damage(client, what)
    place = tmp_path / "archive"
    await retired(client.store, place, tmp_path)
    assert "whole" in {path.stem for path in place.rglob("*.zip")}
    assert "whole" not in [row.conversation_id for row in await client.recent()]


@pytest.mark.parametrize(
    ("rules", "reads"),
    [
        ('[[rule]]\ntenant = "acme"\nage = "0s"', 0),
        ('[[rule]]\nstates = ["error"]\nage = "0s"', 0),
        ('[[rule]]\ntenant = "shop"\nage = "never"\n[[rule]]\nage = "0s"', 0),
        ('[[rule]]\ntenant = "shop"\nage = "1d"\n[[rule]]\nage = "0s"', 0),
        ('[[rule]]\ntenant = "shop"\nage = "0s"', 1),
    ],
)
async def test_kept_conversations_log_is_not_read_each_minute(
    client: Client, tmp_path: Path, rules: str, reads: int
) -> None:
    await begin_ended(client, "one-of-shop", tenancy=Tenancy(tenant="shop"))
    wire = WatchedConnection(client.store.connection)
    found = await retired(replace(client.store, connection=wire), tmp_path / "archive", tmp_path, rules)
    assert (found["archived"], found["kept"]) == (reads, 1 - reads)
    assert (wire.counts["XRANGE"] > 0) is (reads > 0)


async def test_conversation_of_unknown_tenant_retires_by_its_log(client: Client, tmp_path: Path) -> None:
    await begin_ended(client, "one-of-shop", tenancy=Tenancy(tenant="shop"))
    await client.store.connection.call("HDEL", client.store.keys("one-of-shop").meta, "tenant")
    found = await retired(client.store, tmp_path / "archive", tmp_path, '[[rule]]\ntenant = "shop"\nage = "0s"')
    assert found["archived"] == 1
