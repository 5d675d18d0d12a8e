"""Budgets of conversations that are deleted, and of those that come back: on each kind of store."""

from __future__ import annotations

import pytest

from broker.limits.ledger import Ledger
from broker.store.store import Store
from broker.testing.memory_store import MemoryConnection
from tests.conformance.test_ledger import TENANT, amounts, bury, chain, owner, reserve, settle, spend


async def stays(store: Store, key: str) -> bool:
    """Return whether a key is there and does not expire."""
    if isinstance(store.connection, MemoryConnection):  # in which nothing expires
        is_deleted = await store.connection.call("HEXISTS", key, "deleted")
        return bool(await store.connection.call("EXISTS", key)) and not is_deleted
    return bool(await store.connection.call("PTTL", key) == -1)


async def accounts_left(store: Store) -> list[bytes]:
    """Return what stays in the store of the accounts of two conversations, and of their calls."""
    root, found = store.all_shards[0].root, []
    for cid in ("aaa", "bbb"):
        for part in ("", ":children", ":waiting", ":wanted"):
            key = f"{root}:budget:conversation:{cid}{part}"
            found += [key.encode()] if await stays(store, key) else []
    held, lost = [await store.connection.call("HGETALL", f"{root}:ledger:{name}") for name in ("held", "lost")]
    return [*found, *held, *lost]


@pytest.mark.parametrize("end", ["done", "lost", "death"])
async def test_account_kept_for_a_call_goes_with_its_end(store: Store, ledger: Ledger, end: str) -> None:
    await spend(ledger, "aaa", 0.5, 0.25)
    assert await reserve(ledger, "aaa", 0.5, 0.25) is None
    await ledger.delete_account("aaa")
    assert await ledger.list_conversation_ids(TENANT) == []
    if end == "death":
        await bury(store, "w1")
    for _ in range(2):  # a reply was lost, or a worker that was taken for dead continues
        await settle(ledger, "aaa", 0.25, is_lost=end == "lost")
    assert await amounts(ledger) == (0.25, 0.0, 0.0 if end == "done" else 0.5)
    assert await accounts_left(store) == []


async def test_a_deleted_conversations_batched_call_is_lost(store: Store, ledger: Ledger) -> None:
    assert await ledger.reserve(owner(), chain(), worst_usd=0.5, total_usd=0.0, is_batched=True) is None
    await ledger.delete_account("aaa")
    await store.connection.call("DEL", f"{store.all_shards[0].root}:ledger:swept")
    await ledger.sweep()
    assert await amounts(ledger) == (0.0, 0.0, 0.5)
    assert await accounts_left(store) == []


async def test_an_account_that_was_kept_for_delegates_goes_with_them(store: Store, ledger: Ledger) -> None:
    await spend(ledger, "aaa", 0.5, 0.5)
    delegate = chain("bbb", parent_id="aaa")
    assert await ledger.reserve(owner("bbb"), delegate, worst_usd=0.25, total_usd=0.0) is None
    await ledger.delete_account("aaa")
    await ledger.delete_account("bbb")
    await ledger.settle(owner("bbb"), delegate, total_usd=0.25)
    assert await amounts(ledger) == (0.75, 0.0, 0.0)
    assert await accounts_left(store) == []


@pytest.mark.parametrize("has_delegate", [False, True])
async def test_reused_conversation_id_is_charged_from_its_start(ledger: Ledger, has_delegate: bool) -> None:
    await spend(ledger, "aaa", 1.0, 1.0)
    assert await reserve(ledger, "aaa", 0.5, 1.0) is None
    delegate = chain("bbb", parent_id="aaa")
    if has_delegate:
        assert await ledger.reserve(owner("bbb"), delegate, worst_usd=0.25, total_usd=0.0) is None
    await ledger.delete_account("aaa")
    assert await reserve(ledger, "aaa", 0.5, token=2) is None
    await settle(ledger, "aaa", 0.25, token=2)
    if has_delegate:
        await ledger.settle(owner("bbb"), delegate, total_usd=0.0)
    assert await amounts(ledger) == (1.25, 0.0, 0.5)
    assert "aaa" in await ledger.list_conversation_ids(TENANT)


async def test_conversation_restored_in_time_keeps_its_account(store: Store, ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.5) is None
    await ledger.delete_account("aaa")
    await ledger.restore_account(chain(), total_usd=0.0)
    assert await stays(store, store.all_shards[0].budget("conversation:aaa"))
    await settle(ledger, "aaa", 0.25)
    assert await reserve(ledger, "aaa", 0.5, 0.25, token=2) is None
    await settle(ledger, "aaa", 0.5, token=2)
    assert [(await ledger.load_account(name)).spent_usd for name in chain()] == [0.5] * 3
    assert await ledger.list_conversation_ids(TENANT) == ["aaa"]


@pytest.mark.parametrize("is_limited_first", [True, False])
async def test_costs_of_delegates_come_back_with_their_parent(ledger: Ledger, is_limited_first: bool) -> None:
    if is_limited_first:
        await ledger.set_limit("conversation:aaa", 3.0)
    for _ in range(2):
        await ledger.restore_account(chain(), total_usd=0.5, delegates_usd=2.0)
    if not is_limited_first:
        await ledger.set_limit("conversation:aaa", 3.0)
    account = await ledger.load_account("conversation:aaa")
    assert (account.limit_usd, account.spent_usd, account.left_usd) == (3.0, 2.5, 0.5)
    assert await reserve(ledger, "aaa", 0.25, 0.5) is None
    await settle(ledger, "aaa", 0.75)
    assert (await ledger.load_account("conversation:aaa")).spent_usd == 2.75
    assert (await ledger.load_account(TENANT)).spent_usd == 0.25
    assert await ledger.list_conversation_ids(TENANT) == ["aaa"]


async def test_account_kept_for_its_limit_goes_with_it(store: Store, ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.5) is None
    await ledger.set_limit("conversation:aaa", 1.0)
    await settle(ledger, "aaa", 0.5)
    await ledger.delete_account("aaa")
    assert "conversation:aaa" in [account.name for account in await ledger.load_accounts()]
    await ledger.set_limit("conversation:aaa", None)
    assert await accounts_left(store) == []
    assert [account.name for account in await ledger.load_accounts()] == ["experiment:acme/swe", TENANT]


async def test_a_late_charge_of_a_deleted_conversation_is_dropped(store: Store, ledger: Ledger) -> None:
    await spend(ledger, "aaa", 0.5, 0.5)
    assert await reserve(ledger, "aaa", 0.5, 0.5) is None
    for _ in range(3):
        await ledger.delete_account("aaa")
        await settle(ledger, "aaa", 0.5)
    assert (await ledger.load_account(TENANT)).spent_usd == 0.5
    await ledger.restore_account(chain(), total_usd=0.5)
    await settle(ledger, "aaa", 0.75)
    assert (await ledger.load_account(TENANT)).spent_usd == 0.75
    assert await ledger.list_conversation_ids(TENANT) == ["aaa"]
    assert await stays(store, store.all_shards[0].budget("conversation:aaa"))


async def test_deleted_delegates_reservation_is_released_in_all_accounts(store: Store, ledger: Ledger) -> None:
    await spend(ledger, "aaa", 0.5, 0.5)
    delegate = ["conversation:bbb", *chain()]
    assert await ledger.reserve(owner("bbb"), delegate, worst_usd=0.25, total_usd=0.0) is None
    await ledger.delete_account("bbb")
    await ledger.delete_account("aaa")
    await bury(store, "w1")
    assert await amounts(ledger) == (0.5, 0.0, 0.25)
    assert await accounts_left(store) == []


async def test_a_limit_for_a_conversation_that_was_deleted_stays(store: Store, ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.5) is None
    await ledger.delete_account("aaa")
    await settle(ledger, "aaa", 0.5)
    await ledger.set_limit("conversation:aaa", 1.0)
    key = store.all_shards[0].budget("conversation:aaa")
    if not isinstance(store.connection, MemoryConnection):
        assert await store.connection.call("PTTL", key) == -1
    assert await reserve(ledger, "aaa", 0.25, token=2) is None
    assert await stays(store, key)


async def test_repeated_deletion_ends_despite_a_wrong_key_type(store: Store, ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.5) is None
    await ledger.delete_account("aaa")
    await settle(ledger, "aaa", 0.5)
    await store.connection.call("SET", f"{store.all_shards[0].budget('conversation:aaa')}:children", "a string")
    await ledger.delete_account("aaa")
