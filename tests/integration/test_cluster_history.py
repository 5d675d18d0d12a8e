"""The recent figures of a cluster, as its servers keep them in the store, and what the routes show of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker.contract.specs import Tenancy
from broker.coordination.membership import Figures, Membership
from broker.coordination.quarantine import Quarantine
from broker.runtime import read_version
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from deckhands.client.changing import Change
from deckhands.client.client import Client
from deckhands.operations.monitoring.exposition import FRESH_SECONDS, Exposition
from deckhands.operations.monitoring.history import DAY, HOUR, History
from deckhands.server.auth.api_keys import Scope
from tests.polling import until
from tests.served_stores import environment_with
from tests.server_parts import Served, served
from tests.stores import RealServer, emptied

START = 1_800_000_000.0
"""The start of a minute, by the store's clock."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(valkey_server: RealServer, clock: ManualClock) -> AsyncIterator[Store]:
    found = await open_store(await emptied(valkey_server.url), clock=clock)
    yield found
    await found.aclose()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", environment_with(tmp_path)) as found:
        yield found


class Sampling:
    """A history of a cluster with one worker, whose samples are taken one after another."""

    def __init__(self, store: Store, clock: ManualClock, worker: Membership) -> None:
        self.history = History(store, Exposition(store))
        self._clock, self._worker, self._taken = clock, worker, 0

    async def take(self, count: int = 1, *, steps: float = 0.0, cost: float = 0.0) -> None:
        for _ in range(count):
            self._worker.figures.add("steps", steps)
            self._worker.figures.add("cost_usd", cost, "m")
            await self._worker.register()
            self._clock.advance(FRESH_SECONDS)
            await self.history.sample(START + HOUR.step_seconds * self._taken)
            self._taken += 1


@pytest.fixture
async def sampling(store: Store, clock: ManualClock) -> Sampling:
    worker = Membership(store, "controller-1", "controller", ttl_seconds=3_600.0, figures=Figures())
    await worker.register()
    return Sampling(store, clock, worker)


async def test_sample_has_rates_of_the_last_half_minute(sampling: Sampling) -> None:
    await sampling.take(9, steps=10, cost=0.01)
    found = await sampling.history.read(HOUR)
    assert [at for at, _ in found][:2] == [datetime.fromtimestamp(START + 5 * number, UTC) for number in (1, 2)]
    assert {round(sample.steps, 6) for _, sample in found} == {2.0}
    assert {round(sample.spend, 6) for _, sample in found} == {7.2}
    later = await sampling.history.read(HOUR, after=found[-2][0])
    assert later == found[-1:]


async def test_minute_has_means_and_history_is_bounded(sampling: Sampling, store: Store) -> None:
    await sampling.take(13, steps=5)
    ((at, minute),) = await sampling.history.read(DAY)
    assert at == datetime.fromtimestamp(START, UTC)
    assert round(minute.steps, 6) == 1.0
    for number in range(HOUR.kept + 5):
        fields = ("v", minute.model_dump_json())
        await store.connection.call("XADD", f"{store.all_shards[0].history}:hour", f"{9 * 10**12 + number}-0", *fields)
    await sampling.history._add(HOUR, 1e10, minute)
    assert len(await sampling.history.read(HOUR)) == HOUR.kept


async def test_two_servers_write_each_sample_once(sampling: Sampling, store: Store, clock: ManualClock) -> None:
    second = History(store, Exposition(store))
    await sampling.take(3, steps=1)
    for number in range(3):
        clock.advance(FRESH_SECONDS)
        await second.sample(START + HOUR.step_seconds * number)
    assert len(await sampling.history.read(HOUR)) == 2
    assert await sampling.history._has_lease()
    assert not await second._has_lease()
    assert await sampling.history._has_lease()


@pytest.mark.parametrize("text", ["", "{", '{"steps": -1}', '{"steps": NaN}', '{"steps": 1e999}', '{"steps": "x"}'])
async def test_forged_samples_are_left_out(store: Store, text: str) -> None:
    await store.connection.call("XADD", f"{store.all_shards[0].history}:hour", "1-0", "v", text)
    await store.connection.call("XADD", f"{store.all_shards[0].history}:hour", "18446744073709551615-0", "v", "{}")
    assert await History(store, Exposition(store)).read(HOUR) == []


async def test_server_keeps_history_for_operators_of_all(server: Served) -> None:
    key = server.client.store.all_shards[0].history

    async def has_sample() -> bool:
        return bool(await server.client.store.call("XLEN", f"{key}:hour"))

    await until(has_sample, limit=60.0, what="a sample")
    async with server.as_(await server.token("*")) as client:
        found = (await client.get("/history")).json()
        assert found["step_seconds"] == 5
        after = found["samples"][-1]["at"]
        later = (await client.get("/history", params={"after": after})).json()["samples"]
        assert after not in [one["at"] for one in later]
        assert (await client.get("/history?of=day")).json()["step_seconds"] == 60
        assert (await client.get("/history?of=year")).status_code == 422
        for after in ("yesterday", "0.5"):
            assert (await client.get("/history", params={"after": after})).status_code == 422
    for tenant, scopes in (("acme", Scope), ("*", (Scope.READ, Scope.OPERATE))):
        async with server.as_(await server.token(tenant, scopes)) as client:
            assert (await client.get("/history")).status_code == 403


async def test_workers_show_version_and_load(server: Served) -> None:
    worker = Membership(server.client.store, "controller-1", "controller", figures=Figures())
    worker.figures.set(conversations=12.0, secret=1.0)
    await worker.register()
    worker.figures.set(host_cpu=0.5)
    await worker.register()
    async with server.as_(await server.token("*")) as client:
        (found,) = (await client.get("/workers")).json()
    assert found["version"] == read_version()
    assert found["load"] == {"conversations": 12.0, "host_cpu": 0.5}


async def dead(client: Client, tenant: str) -> str:
    store = client.store
    cid = await client.submit("x", title=f"Of {tenant}", tenancy=Tenancy(tenant=tenant))
    names = (await store.locate(cid)).shard
    await store.connection.call("ZADD", names.dead, 1, cid)
    fields = ("c", cid, "from", "controller-1", "to", "controller-2", "at", "1760000000000")
    await store.connection.call("XADD", names.takeovers, "*", *fields)
    return cid


async def test_dead_letters_show_each_tenant_its_own(server: Served) -> None:
    client, store = server.client, server.client.store
    made = {tenant: await dead(client, tenant) for tenant in ("acme", "globex")}
    await Quarantine(store).quarantine(store.all_shards[0], "deck:inbox", "1-1", [b"foo"], KeyError("request"))
    async with server.as_(await server.token("acme")) as reader:
        found = (await reader.get("/dead-letters")).json()
        assert [one["conversation_id"] for one in found["conversations"]] == [made["acme"]]
        assert found["conversations"][0]["workers"] == []
        assert found["conversations"][0]["died"] == ["2025-10-09T08:53:20Z"]
        assert found["entries"] == []
    async with server.as_(await server.token("*")) as reader:
        found = (await reader.get("/dead-letters")).json()
        assert {one["title"] for one in found["conversations"]} == {"Of acme", "Of globex"}
        assert found["conversations"][0]["workers"] == ["controller-1"]
        assert [(one["key"], one["entry_id"]) for one in found["entries"]] == [("deck:inbox", "1-1")]
    async with server.as_(await server.token("*", (Scope.READ,))) as reader:
        assert (await reader.get("/dead-letters")).status_code == 403


async def test_takeovers_hide_workers_and_other_tenants(server: Served) -> None:
    cid, other = await dead(server.client, "acme"), await dead(server.client, "globex")
    async with server.as_(await server.token("acme")) as reader:
        (found,) = (await reader.get(f"/conversations/{cid}/takeovers")).json()
        assert found == {"at": "2025-10-09T08:53:20Z", "action_id": None, "from_worker": "", "to_worker": ""}
        assert (await reader.get(f"/conversations/{other}/takeovers")).status_code == 404
    async with server.as_(await server.token("*")) as reader:
        (found,) = (await reader.get(f"/conversations/{cid}/takeovers")).json()
        assert found["from_worker"] == "controller-1"
        assert (await reader.get("/conversations/none/takeovers")).status_code == 404


@pytest.mark.parametrize("forged", [("x", "y"), ("c", "x", "from", "a", "to", "b", "at", "1e300"), ("a", "x")])
async def test_forged_takeovers_hide_no_others(server: Served, forged: tuple[str, ...]) -> None:
    cid = await dead(server.client, "acme")
    await server.client.store.call("XADD", server.client.store.all_shards[0].takeovers, "*", *forged)
    async with server.as_(await server.token("acme")) as reader:
        assert len((await reader.get(f"/conversations/{cid}/takeovers")).json()) == 1
        assert len((await reader.get("/dead-letters")).json()["conversations"]) == 1


async def test_conversation_is_shown_as_after_any_event(server: Served) -> None:
    cid = await server.client.submit("x", title="First", tenancy=Tenancy(tenant="acme"))
    first = await server.client.log.load_last_id(cid)
    await server.client.change(cid, Change(title="Second"))
    async with server.as_(await server.token("acme")) as reader:
        titles = [
            (await reader.get(f"/conversations/{cid}", params=at)).json()["summary"]["title"]
            for at in ({"at": first}, {})
        ]
        assert titles == ["First", "Second"]
        missing = await reader.get(f"/conversations/{cid}?at=99")
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_event")
        assert (await reader.get(f"/conversations/{cid}?at=0")).status_code == 422
    async with server.as_(await server.token("globex")) as reader:
        assert (await reader.get(f"/conversations/{cid}?at={first}")).status_code == 404
