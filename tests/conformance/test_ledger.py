"""Budgets: reserved at worst, charged by the log, never passed by more than a call; also of deleted conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.contract.specs import Tenancy
from broker.limits.ledger import BudgetExhausted, Ledger, list_accounts, parse_account, to_nano
from broker.log.event_log import EventLog
from broker.runtime.errors import OwnershipLost, UsageError
from broker.store.connection import Argument
from broker.store.keys import ShardKeys
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from tests.broker_parts import begin_unnotified, enter, newly_notified, notified
from tests.broker_parts import bury as bury_worker

TENANT, EXPERIMENT = "tenant:acme", "experiment:acme/swe"


def owner(cid: str = "aaa", *, worker: str = "w1", token: int = 1) -> Ownership:
    return Ownership(cid, worker, str(token))


def chain(cid: str = "aaa", *, parent_id: str | None = None) -> list[str]:
    return list_accounts(cid, tenant="acme", experiment="swe", parent_id=parent_id)


async def reserve(ledger: Ledger, cid: str, worst: float, total: float = 0.0, **who: object) -> BudgetExhausted | None:
    return await ledger.reserve(owner(cid, **who), chain(cid), worst_usd=worst, total_usd=total)  # type: ignore[arg-type]


async def settle(ledger: Ledger, cid: str, total: float, *, is_lost: bool = False, **who: object) -> None:
    await ledger.settle(owner(cid, **who), chain(cid), total_usd=total, is_lost=is_lost)  # type: ignore[arg-type]


async def spend(ledger: Ledger, cid: str, worst: float, total: float) -> None:
    """Make the first call of a conversation."""
    assert await reserve(ledger, cid, worst) is None
    await settle(ledger, cid, total)


async def amounts(ledger: Ledger, account: str = TENANT) -> tuple[float, float, float]:
    """Return the spent, reserved and lost amounts of an account."""
    found = await ledger.load_account(account)
    return found.spent_usd, found.reserved_usd, found.lost_usd


async def bury(store: Store, worker_id: str) -> None:
    """Let a worker have died some time ago, and sweep."""
    await bury_worker(store, worker_id)
    await store.connection.call("DEL", f"{store.all_shards[0].root}:ledger:swept")
    await Ledger(store).sweep()


async def test_spending_counts_in_every_account_above(ledger: Ledger) -> None:
    await spend(ledger, "aaa", 1.0, 0.25)
    await spend(ledger, "bbb", 1.0, 0.5)
    tenant = await ledger.load_account(TENANT)
    assert (tenant.spent_usd, tenant.reserved_usd, tenant.calls, tenant.limit_usd) == (0.75, 0.0, 2, None)
    experiment = await ledger.load_account(EXPERIMENT)
    assert (experiment.spent_usd, experiment.parent) == (0.75, TENANT)
    assert (await ledger.load_account("conversation:bbb")).spent_usd == 0.5
    assert await ledger.list_conversation_ids(TENANT) == ["aaa", "bbb"]
    assert [account.name for account in await ledger.load_accounts()] == [EXPERIMENT, TENANT]


async def test_limit_is_changed_only_by_those_who_read_it(ledger: Ledger) -> None:
    for _ in range(11):
        await ledger.top_up(TENANT, 999_999.123456789)
    seen: list[float | None] = []
    async with asyncio.timeout(10):
        changed = await ledger.set_limit(TENANT, 5.0, check=lambda account: seen.append(account.limit_usd))
    assert (changed.limit_usd, len(seen)) == (5.0, 1)


async def test_a_top_up_whose_reply_was_lost_counts_once(store: Store, ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 1.0)
    for key, expected in (("one", 3.0), ("one", 3.0), ("two", 5.0), ("one", 5.0), ("two", 5.0)):
        root = store.all_shards[0].root
        await store.call_function("deck_budget_limit", (root,), key, "add", to_nano(2.0), TENANT)
        assert (await ledger.load_account(TENANT)).limit_usd == expected


async def test_limit_is_not_raised_by_its_copy_in_the_account(store: Store, ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 1.0)
    await store.connection.call("HSET", store.all_shards[0].budget(TENANT), "limit", to_nano(100.0))
    assert (await ledger.load_account(TENANT)).limit_usd == 1.0
    assert await reserve(ledger, "aaa", 0.9) is None
    assert await reserve(ledger, "bbb", 50.0) is not None


async def test_limit_of_an_earlier_version_counts_until_it_is_changed(store: Store, ledger: Ledger) -> None:
    await store.connection.call("HSET", store.all_shards[0].budget(TENANT), "limit", to_nano(1.0))
    assert (await ledger.load_account(TENANT)).limit_usd == 1.0
    assert await reserve(ledger, "aaa", 0.9) is None
    assert await reserve(ledger, "bbb", 50.0) is not None
    assert [await ledger.move_limits() for _ in range(2)] == [1, 0]
    await store.connection.call("HSET", store.all_shards[0].budget(TENANT), "limit", to_nano(100.0))
    assert (await ledger.top_up(TENANT, 2.0)).limit_usd == 3.0
    assert (await ledger.set_limit(TENANT, None)).limit_usd is None
    assert await store.connection.call("EXISTS", store.all_shards[0].limits) == 0


async def test_account_with_an_unreadable_number_hides_no_other(store: Store, ledger: Ledger) -> None:
    for account in (TENANT, "tenant:rival"):
        await ledger.set_limit(account, 1.0)
    await store.connection.call("HSET", store.all_shards[0].budget(TENANT), "spent", "1.5")
    await store.connection.call("HSET", store.all_shards[0].limits, TENANT, "much")
    found = {account.name: account for account in await ledger.load_accounts()}
    assert (found[TENANT].limit_usd, found[TENANT].spent_usd) == (0.0, 0.0)  # as for those who want to spend
    assert found["tenant:rival"].limit_usd == 1.0
    changed = await asyncio.wait_for(ledger.set_limit(TENANT, 2.0, check=lambda account: None), 10)
    assert changed.limit_usd == 2.0


async def test_account_goes_with_its_conversation_but_its_costs_stay(store: Store, ledger: Ledger) -> None:
    for cid in ("aaa", "bbb"):
        assert await reserve(ledger, cid, 1.0) is None
        await settle(ledger, cid, 0.5, is_lost=cid == "aaa")
    await ledger.delete_account("aaa")
    await ledger.delete_account("aaa")
    assert await ledger.list_conversation_ids(TENANT) == ["bbb"]
    names = [store.all_shards[0].budget("conversation:aaa") + part for part in ("", ":children", ":waiting", ":wanted")]
    assert await store.connection.call("EXISTS", *names) == 0
    assert (await ledger.load_account(TENANT)).spent_usd == 1.0
    await settle(ledger, "aaa", 0.25)  # another conversation, which started under the same id
    assert (await ledger.load_account(TENANT)).spent_usd == 1.25


async def test_restored_conversation_is_charged_for_new_costs(ledger: Ledger) -> None:
    await settle(ledger, "aaa", 0.5)
    await ledger.delete_account("aaa")
    for _ in range(2):
        await ledger.restore_account(chain(), total_usd=0.5)
    assert await ledger.list_conversation_ids(TENANT) == ["aaa"]
    await settle(ledger, "aaa", 0.75)
    assert [(await ledger.load_account(name)).spent_usd for name in chain()] == [0.75] * 3
    await ledger.restore_account([], total_usd=1.0)


async def test_account_with_a_limit_or_running_call_is_kept(ledger: Ledger) -> None:
    await ledger.set_limit("conversation:aaa", 1.0)
    assert await reserve(ledger, "bbb", 0.1) is None
    for cid in ("aaa", "bbb"):
        await ledger.delete_account(cid)
    assert (await ledger.load_account("conversation:aaa")).limit_usd == 1.0
    assert (await ledger.load_account("conversation:bbb")).reserved_usd == 0.1


async def test_account_of_another_type_blocks_no_deletion(store: Store, ledger: Ledger) -> None:
    await store.connection.call("SET", store.all_shards[0].budget("conversation:aaa"), "x")
    await ledger.delete_account("aaa")
    assert await store.connection.call("EXISTS", store.all_shards[0].budget("conversation:aaa")) == 0


async def test_the_worst_case_is_reserved(ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 1.0)
    assert await reserve(ledger, "aaa", 0.6) is None
    assert await reserve(ledger, "bbb", 0.6) == BudgetExhausted(TENANT)
    tenant = await ledger.load_account(TENANT)
    assert (tenant.left_usd, tenant.waiting) == (pytest.approx(0.4), 1)
    await settle(ledger, "aaa", 0.1)
    assert await reserve(ledger, "bbb", 0.6) is None
    assert (await ledger.load_account(TENANT)).waiting == 0


async def test_the_last_call_may_pass_the_limit_alone(ledger: Ledger) -> None:
    await ledger.set_limit(EXPERIMENT, 1.0)
    await spend(ledger, "aaa", 0.9, 0.9)
    assert await reserve(ledger, "aaa", 0.9, 0.9) is None
    assert await reserve(ledger, "bbb", 0.01) == BudgetExhausted(EXPERIMENT)
    await settle(ledger, "aaa", 1.8)
    assert await reserve(ledger, "aaa", 0.9, 1.8) == BudgetExhausted(EXPERIMENT)
    assert (await ledger.load_account(EXPERIMENT)).left_usd == 0.0


async def test_a_repeated_charge_adds_nothing(ledger: Ledger) -> None:
    for _ in range(3):
        assert await reserve(ledger, "aaa", 0.5) is None
    assert (await ledger.load_account(TENANT)).reserved_usd == 0.5
    for total in (0.25, 0.25, 0.25, 0.125):  # the last by a worker that has seen less of the log
        await settle(ledger, "aaa", total)
    assert await amounts(ledger) == (0.25, 0.0, 0.0)


async def test_room_wakes_as_many_as_fit_top_up_the_rest(store: Store, ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 1.0)
    ids = ["bbb", "ccc", "ddd"]
    await begin_unnotified(store, *ids)
    assert await reserve(ledger, "aaa", 0.9) is None
    for cid in ids:
        assert await reserve(ledger, cid, 0.3) == BudgetExhausted(TENANT)
    await settle(ledger, "aaa", 0.4)
    assert await notified(store) == ["bbb", "ccc"]
    await ledger.top_up(TENANT, 2.0)
    assert await notified(store) == ids
    assert (await ledger.load_account(TENANT)).limit_usd == 3.0


async def test_a_conversation_that_waits_no_longer_is_not_woken(store: Store, ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 0.0)
    await begin_unnotified(store, "aaa")
    assert await reserve(ledger, "aaa", 0.1) == BudgetExhausted(TENANT)
    await ledger.withdraw("aaa", chain("aaa"))
    await ledger.top_up(TENANT, 1.0)
    assert await newly_notified(store) == []


async def test_the_call_of_a_dead_worker_is_lost_and_counts(store: Store, ledger: Ledger) -> None:
    await ledger.set_limit(TENANT, 1.0)
    assert await reserve(ledger, "aaa", 0.6) is None
    await bury(store, "w1")
    assert await amounts(ledger) == (0.0, 0.0, 0.6)
    assert (await ledger.load_account(TENANT)).lost_calls == 1
    assert await reserve(ledger, "aaa", 0.3, worker="w2", token=2) is None
    assert await reserve(ledger, "bbb", 0.3, worker="w2") == BudgetExhausted(TENANT)
    await settle(ledger, "aaa", 0.2, worker="w2", token=2)
    assert await amounts(ledger) == (0.2, 0.0, 0.6)


@pytest.mark.parametrize("is_swept", [True, False])
async def test_reply_appended_before_its_workers_death_was_not_lost(
    store: Store, ledger: Ledger, is_swept: bool
) -> None:
    assert await reserve(ledger, "aaa", 0.6) is None
    if is_swept:
        await bury(store, "w1")
    await settle(ledger, "aaa", 0.25, worker="w2", token=2)  # events that the next owner has read
    assert await amounts(ledger) == (0.25, 0.0, 0.0)
    assert (await ledger.load_account(TENANT)).lost_calls == 0


async def test_former_owner_does_not_change_the_next_reservation(ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.6) is None
    assert await reserve(ledger, "aaa", 0.5, worker="w2", token=2) is None
    for is_lost in (True, False):
        await settle(ledger, "aaa", 0.0, is_lost=is_lost)
    assert await amounts(ledger) == (0.0, 0.5, 0.6)
    assert (await ledger.load_account(TENANT)).lost_calls == 1
    with pytest.raises(OwnershipLost):
        await reserve(ledger, "aaa", 0.5)
    assert await amounts(ledger) == (0.0, 0.5, 0.6)


async def test_batch_cost_is_reserved_until_its_reply_is_logged(store: Store, ledger: Ledger) -> None:
    assert await ledger.reserve(owner("aaa"), chain("aaa"), worst_usd=0.5, total_usd=0.25, is_batched=True) is None
    again = owner("aaa", worker="w2", token=2)
    # It is on its way, so a later estimate changes nothing.
    assert await ledger.reserve(again, chain("aaa"), worst_usd=0.75, total_usd=0.25, is_batched=True) is None
    assert (await ledger.load_account(TENANT)).reserved_usd == 0.5
    await bury(store, "w1")
    assert (await ledger.load_account(TENANT)).reserved_usd == 0.5
    await reserve(ledger, "aaa", 0.125, total=0.5, worker="w2", token=2)
    assert await amounts(ledger) == (0.5, 0.125, 0.0)


async def test_a_call_that_was_cut_off_is_lost(ledger: Ledger) -> None:
    assert await reserve(ledger, "aaa", 0.5) is None
    await settle(ledger, "aaa", 0.0, is_lost=True)
    await spend(ledger, "aaa", 0.5, 0.25)
    assert await amounts(ledger) == (0.25, 0.0, 0.5)
    assert (await ledger.load_account(TENANT)).lost_calls == 1


async def test_a_delegate_spends_its_parents_budget(ledger: Ledger) -> None:
    await spend(ledger, "aaa", 0.1, 0.125)
    await ledger.set_limit("conversation:aaa", 0.5)
    delegate = chain("child", parent_id="aaa")
    assert await ledger.reserve(owner("child"), delegate, worst_usd=0.3, total_usd=0.0) is None
    await ledger.settle(owner("child"), delegate, total_usd=0.25)
    assert (await ledger.load_account("conversation:aaa")).spent_usd == 0.375
    assert (await ledger.load_account(TENANT)).spent_usd == 0.375
    await settle(ledger, "aaa", 0.25)
    assert (await ledger.load_account(TENANT)).spent_usd == 0.5
    answer = await ledger.reserve(owner("child"), delegate, worst_usd=0.01, total_usd=0.25)
    assert answer == BudgetExhausted("conversation:aaa")
    assert await ledger.list_conversation_ids(TENANT) == ["aaa", "child"]


async def test_a_limit_is_taken_away(ledger: Ledger) -> None:
    assert (await ledger.set_limit(EXPERIMENT, 5.0)).limit_usd == 5.0
    assert (await ledger.set_limit(EXPERIMENT, None)).limit_usd is None


@pytest.mark.parametrize("name", ["acme", "tenant:", "tenant:a b", "experiment:x", "tenant:a:b", ""])
def test_unreadable_names_are_no_accounts(name: str) -> None:
    with pytest.raises(UsageError, match="is not an account"):
        parse_account(name)


@pytest.mark.parametrize("amount", [-1.0, float("nan"), 2_000_000.0])
async def test_amounts_that_cannot_be_a_budget_are_refused(memory_store: Store, amount: float) -> None:
    with pytest.raises(UsageError, match="not a valid budget"):
        await Ledger(memory_store).set_limit(TENANT, amount)


def test_sums_are_exact() -> None:
    assert sum(to_nano(0.1) for _ in range(10)) == to_nano(1.0)


steps = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(["call", "reply", "lose", "crash"]), st.integers(1, 40)),
    max_size=60,
)


@given(steps=steps, limit=st.integers(0, 100))
def test_any_order_of_calls_exceeds_the_limit_by_one(steps: list[tuple[str, str, int]], limit: int) -> None:
    async def play() -> None:
        store = await open_store(MemoryConnection())
        ledger = Ledger(store)
        await enter(store, "w1")
        await ledger.set_limit(TENANT, limit / 100)
        totals = dict.fromkeys("abcdef", 0)
        tokens = dict.fromkeys("abcdef", 1)
        worst: dict[str, int] = {}
        largest = 0
        for cid, what, cents in steps:
            who = {"token": tokens[cid]}
            if what == "call" and cid not in worst:
                if await reserve(ledger, cid, cents / 100, totals[cid] / 100, **who) is None:
                    worst[cid] = cents
                    largest = max(largest, cents)
            elif cid in worst and what in ("reply", "lose"):
                reserved = worst.pop(cid)
                totals[cid] += min(cents, reserved) if what == "reply" else 0
                await settle(ledger, cid, totals[cid] / 100, is_lost=what == "lose", **who)
            elif what == "crash":
                worst.pop(cid, None)
                tokens[cid] += 1
                await settle(ledger, cid, totals[cid] / 100, token=tokens[cid])
        tenant = await ledger.load_account(TENANT)
        assert to_nano(tenant.spent_usd) == sum(to_nano(total / 100) for total in totals.values())
        assert to_nano(tenant.reserved_usd) == sum(to_nano(cents / 100) for cents in worst.values())
        committed = tenant.spent_usd + tenant.lost_usd + tenant.reserved_usd
        assert committed <= limit / 100 + largest / 100 + 1e-9
        await store.aclose()

    asyncio.run(play())


async def stays(store: Store, key: str) -> bool:
    """Return whether a key is there and does not expire."""
    if isinstance(store.connection, MemoryConnection):  # in which nothing expires
        is_deleted = await store.connection.call("HEXISTS", key, "deleted")
        return bool(await store.connection.call("EXISTS", key)) and not is_deleted
    return bool(await store.connection.call("PTTL", key) == -1)


async def accounts_left(store: Store) -> list[bytes]:
    """Return the remaining store keys of the accounts of two conversations, and of their calls."""
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


async def test_each_tenants_budgets_are_in_a_shard_of_their_own() -> None:
    store = await open_store(MemoryConnection(), shards=64)
    await enter(store, "w1")
    ledger = Ledger(store)
    tenants = [f"t{number}" for number in range(20)]
    for number, tenant in enumerate(tenants):
        cid = f"cid-{number}"
        created = ConversationCreated(conversation_id=cid, tenancy=Tenancy(tenant=tenant, experiment="swe"))
        await EventLog(store).create(created, [], key="begin")
        above = list_accounts(cid, tenant=tenant, experiment="swe")
        assert await ledger.reserve(owner(cid), above, worst_usd=1.0, total_usd=0.0) is None
        delegate = list_accounts(f"part-{number}", tenant=tenant, experiment="swe", parent_id=cid)
        assert await ledger.reserve(owner(f"part-{number}"), delegate, worst_usd=2.0, total_usd=0.0) is None
        assert (await ledger.load_account(f"tenant:{tenant}")).reserved_usd == 3.0
        assert (await ledger.load_account(f"conversation:{cid}")).reserved_usd == 3.0
        assert await ledger.find_shard(f"conversation:{cid}") == await ledger.find_shard(f"tenant:{tenant}")
    assert len({await ledger.find_shard(f"tenant:{tenant}") for tenant in tenants}) > 10
    assert [found.name for found in await ledger.load_accounts()] == sorted(
        f"{kind}:{tenant}{rest}" for tenant in tenants for kind, rest in (("tenant", ""), ("experiment", "/swe"))
    )
    await ledger.set_limit("conversation:cid-3", 2.5)
    assert await ledger.list_conversation_ids("tenant:t3") == ["cid-3", "part-3"]
    await store.aclose()


async def test_budget_of_a_conversation_needs_its_tenant_in_many_shards() -> None:
    store = await open_store(MemoryConnection(), shards=4)
    with pytest.raises(UsageError, match="neither the conversation nobody nor a budget of it"):
        await Ledger(store).set_limit("conversation:nobody", 1.0)
    await Ledger(store).delete_account("nobody")
    await store.aclose()


class Silent(MemoryConnection):
    """A store whose first shard does not answer a sweep until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.asked = 0

    async def call(self, *command: Argument) -> Any:
        if command[:2] == ("FCALL", "deck_budget_sweep") and command[3] == ShardKeys(0).root:
            self.asked += 1
            await self.answers.wait()
        return await super().call(*command)


async def test_silent_shard_delays_its_own_sweep_alone() -> None:
    connection = Silent()
    store = await open_store(connection, shards=4)
    await enter(store, "w1")
    tenant = next(name for name in map(str, range(99)) if store.find_home(f"tenant:{name}") == store.all_shards[2])
    above = list_accounts("aaa", tenant=tenant)
    assert await Ledger(store).reserve(owner("aaa"), above, worst_usd=1.0, total_usd=0.0) is None
    await bury_worker(store, "w1")
    ledger = Ledger(store)
    for shard in store.all_shards:
        await connection.call("DEL", f"{shard.root}:ledger:swept")
    async with asyncio.timeout(30):
        for _ in range(2 * len(store.all_shards)):
            await ledger.sweep()
    assert await amounts(ledger, above[-1]) == (0.0, 0.0, 1.0)
    assert connection.asked == 1  # its sweep is still under way
    connection.answers.set()
    for _ in store.all_shards:
        await ledger.sweep()
    assert connection.asked == 2
    await ledger.aclose()
    await store.aclose()


async def test_a_dead_workers_reservation_is_found_in_every_shard() -> None:
    store = await open_store(MemoryConnection(), shards=8)
    for worker in ("w1", "w2"):
        await enter(store, worker)
    above = list_accounts("aaa", tenant="acme")
    assert await Ledger(store).reserve(owner("aaa"), above, worst_usd=1.0, total_usd=0.0) is None
    await bury_worker(store, "w1")
    other = Ledger(store)  # it has reserved nothing
    for shard in store.all_shards:
        await store.connection.call("DEL", f"{shard.root}:ledger:swept")  # as if half a second had passed
    for _ in store.all_shards:
        await other.sweep()
    assert await amounts(other) == (0.0, 0.0, 1.0)
    await store.aclose()
