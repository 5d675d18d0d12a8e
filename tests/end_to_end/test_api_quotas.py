"""Quotas over HTTP, read with the rights of a server while real calls are reserved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.coordination.membership import Membership
from broker.limits.governor import CallGranted, CallQueued, Governor
from broker.limits.quotas import QuotaTable
from tests.server_parts import Served, served

TABLE = QuotaTable.parse("""
[[quota]]
model = "openai/*"
concurrency = 1
requests_per_minute = 600
tokens_per_day = 1000
[[quota]]
model = "local"
requests_per_minute = 60
""")


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs) as found:
        yield found


async def test_quota_shows_remainder_waiters_and_binding_limit(server: Served) -> None:
    store = server.client.store
    names = "\n".join(pool.model for pool in TABLE.pools)
    worker = Membership(store, "controller-1", "controller", about={"quotas": f"{names}\nnobody-has-published-it"})
    await worker.register()
    governor = Governor(store, TABLE)
    await governor.publish()
    pool = TABLE.pools[0]
    outcomes = [
        await governor.reserve(pool, cid, "controller-1", input_tokens=100, output_tokens=50) for cid in ("one", "two")
    ]
    assert [type(each) for each in outcomes] == [CallGranted, CallQueued]
    async with server.as_(await server.token("*")) as client:
        found = {one["models"]: one for one in (await client.get("/quotas")).json()}
        assert found.keys() == {"openai/*", "local", "nobody-has-published-it"}
        (key,) = found["openai/*"]["keys"]
        assert (found["openai/*"]["waiting"], key["in_flight"], key["binds"]) == (1, 1, "calls at once")
        left = {one["name"]: one["left"] for one in key["limits"]}
        assert left.keys() == {"requests a minute", "tokens a day", "calls at once"}
        assert left["tokens a day"] == 850
        assert [one["binds"] for one in found["local"]["keys"]] == [""]
        assert found["nobody-has-published-it"]["keys"] == []
        base = store.all_shards[0].quota(pool.name)
        await store.connection.call("HSET", f"{base}:level:own", "requests", "x", "in_flight", "-9", "blocked", "1e400")
        await store.connection.call("SET", f"{store.all_shards[0].quota('local')}:level:own", "x")
        answer = await client.get("/quotas")
        assert answer.status_code == 200
        assert [one["models"] for one in answer.json()] == ["local", "nobody-has-published-it", "openai/*"]
    async with server.as_(await server.token("acme")) as client:
        assert (await client.get("/quotas")).status_code == 403
    await worker.leave()
