"""Overwritten shared keys: the next request is served, and the old value is quarantined and recorded."""

from __future__ import annotations

import pytest

from broker.coordination.quarantine import Quarantine
from broker.limits.governor import CallGranted, Governor
from broker.limits.ledger import Ledger
from broker.limits.quotas import QuotaTable
from broker.runtime.errors import StoreRefused
from broker.store.store import Store
from tests.conformance.test_governor import Callers
from tests.conformance.test_ledger import TENANT, reserve, settle
from tests.conformance.test_turns import controllers, numbered, start, start_all, taken

MANY = 24


async def noted(store: Store) -> list[tuple[str, str]]:
    return [(entry.key.partition("}:")[2], entry.why) for entry in await Quarantine(store).list_items()]


@pytest.mark.parametrize("name", ["turns:ready", "turns:ready:2", "turns:ready:2:shares"])
async def test_line_of_another_type_stops_no_beat_or_conversation(store: Store, name: str) -> None:
    worker = await controllers(store)
    await start_all(store, numbered("conversation", MANY))
    await store.connection.call("SET", f"{store.all_shards[0].root}:{name}", "a string")
    assert len(await taken(store, 4)) == 4
    for _ in range(2):
        assert await worker.beat(1) is not None
    await start(store, "another")
    assert (name in dict(await noted(store))) is True
    assert all("sweep" not in why for _, why in await noted(store))


async def test_a_number_of_turns_that_is_none_begins_again(store: Store) -> None:
    await controllers(store)
    await start_all(store, numbered("conversation", MANY))
    for rubbish in ("x", "1e999", "-1", "9" * 400, "1.5"):
        await store.connection.call("HSET", f"{store.all_shards[0].root}:turns:ready", "picks", rubbish)
        assert len(await taken(store, 2)) == 2


@pytest.mark.parametrize("name", ["", ":waiting", ":wanted"])
async def test_a_budget_of_another_type_refuses_nobody(store: Store, ledger: Ledger, name: str) -> None:
    assert await reserve(ledger, "aaa", 1.0) is None
    key = f"{store.all_shards[0].root}:budget:{TENANT}{name}"
    await store.connection.call("SET", key, "a string")
    await settle(ledger, "aaa", 0.25)
    assert await reserve(ledger, "aaa", 1.0, 0.25) is None
    assert await store.connection.call("GET", f"{key}:unreadable") == b"a string"


@pytest.mark.parametrize("name", ["budgets", "ledger:held", "ledger:crowded"])
async def test_a_list_of_budgets_of_another_type_refuses_nobody(store: Store, ledger: Ledger, name: str) -> None:
    await store.connection.call("SET", f"{store.all_shards[0].root}:{name}", "a string")
    assert await reserve(ledger, "aaa", 1.0) is None
    assert name in dict(await noted(store))


@pytest.mark.parametrize("value", [b"\xff", str(2**63 - 1)], ids=["bytes", "too-much"])
@pytest.mark.parametrize("field", ["spent", "reserved", "calls"])
async def test_a_sum_that_is_no_number_begins_again(store: Store, ledger: Ledger, field: str, value: str) -> None:
    await store.connection.call("HSET", f"{store.all_shards[0].root}:budget:{TENANT}", field, value)
    assert await reserve(ledger, "aaa", 1.0) is None
    await settle(ledger, "aaa", 0.25)
    account = await ledger.load_account(TENANT)
    assert (account.spent_usd, account.reserved_usd, account.calls) == (0.25, 0.0, 1)
    assert (f"budget:{TENANT}", "not a whole number") in await noted(store)


@pytest.mark.parametrize("name", ["limits", "held", "about", "called", "state", "waiting:2", "shares:2", "level:{key}"])
async def test_a_quota_of_another_type_refuses_nobody(store: Store, name: str) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa")
    await callers.settle("aaa")
    name = name.format(key=callers.pool.quotas[0].key)
    key = f"{store.all_shards[0].quota(callers.pool.name)}:{name}"
    await store.connection.call("SET", key, "a string")
    assert await callers.may_call("bbb")
    assert await store.connection.call("GET", f"{key}:unreadable") == b"a string"


async def test_waiter_in_a_queue_of_another_type_gets_its_turn(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("aaa")
    assert not await callers.may_call("bbb")
    pool = store.all_shards[0].quota(callers.pool.name)
    await store.connection.call("SET", f"{pool}:waiting:2", "a string")
    await callers.settle("aaa")
    await store.connection.call("HDEL", f"{pool}:state", "swept")  # the places are counted again, twice a second
    assert await callers.may_call("bbb")


class Robbed(Governor):
    """Loses its quotas right after they were published, as often as requested."""

    losses = 0

    async def publish(self) -> None:
        await super().publish()
        if self.losses > 0:
            self.losses -= 1
            await self.lose()

    async def lose(self) -> None:
        root, _ = self._keys(self._table.pools[0])
        await self._store.connection.call("DEL", f"{root}:limits", f"{root}:about")


async def test_quotas_lost_after_publishing_are_published_again(store: Store) -> None:
    governor = Robbed(store, QuotaTable.parse('[[quota]]\nmodel = "acme/large"\nconcurrency = 1'))
    callers = Callers(store, governor)
    governor.losses = 3
    assert isinstance(await callers.reserve("one"), CallGranted)
    await governor.lose()
    governor.losses = 99
    with pytest.raises(StoreRefused, match="lost or overwritten each time they are published"):
        await governor.wake_next(callers.pool, "worker")
