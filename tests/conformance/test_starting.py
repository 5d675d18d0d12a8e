"""When a conversation may start: parked, due, expired, admitted or refused; and messages that it refuses."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.contract.agent_state import AgentState, is_settled
from broker.contract.events import ConversationCreated, ConversationStarted, Parent
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.specs import Tenancy, WorkspaceSpec
from broker.contract.timing import StartWindow, Timing
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners, StartStatus
from broker.limits.tenants import TenantStatus, TenantTable, load_tenants, parse_memory_bound, publish_tenants
from broker.log.append_call import Appended, Duplicate, PoolRefused, check_admission
from broker.log.conversations import Conversations
from broker.log.deletion import expire
from broker.log.event_log import EventLog
from broker.log.status import EXPIRED_CODE, fold_status
from broker.runtime.errors import AdmissionRefused, ConversationBusy, OwnershipLost
from broker.store.function_library import build_source
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from tests.broker_parts import CID, claim, command, enter, message, notified

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = 3_600.0


async def plan(store: Store, start: StartWindow, **fields: object) -> EventLog:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID, not_before=NOON, expires=NOON, **fields)  # type: ignore[arg-type]
    await log.create(created, [message()], key="begin", start=start)
    return log


async def set_back(store: Store, name: str) -> None:
    """Let a moment of the conversation have come long ago."""
    names = store.known_keys(CID)
    key, field = (names.shard.parked, "due_ms") if name == "parked" else (f"{names.shard.root}:expiring", "expires_ms")
    await store.connection.call("ZADD", key, 1, CID)
    await store.connection.call("HSET", names.meta, field, 1)


async def beat(store: Store, role: str = "controller") -> tuple[str, ...]:
    membership = Membership(store, f"{role}-9", role, ttl_seconds=3600.0)
    await membership.register()
    found = await membership.beat(1)
    return found.expired


async def test_a_conversation_that_begins_later_waits_in_the_store(store: Store) -> None:
    await plan(store, StartWindow(delay_seconds=HOUR))
    assert await notified(store) == []
    row = await Conversations(store).load_row(CID)
    assert (row.wait_reason, row.state) == ("scheduled", "loading")
    assert row.not_before is not None
    left = (row.not_before - row.created).total_seconds()
    assert left == pytest.approx(HOUR)
    await beat(store)
    assert await notified(store) == []
    await set_back(store, "parked")
    await beat(store)
    assert await notified(store) == [CID]


async def test_its_owner_hears_how_long_it_has_to_wait(store: Store) -> None:
    await plan(store, StartWindow(delay_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    owners = Owners(store)
    left = await owners.check_start(ownership)
    assert isinstance(left, float)
    assert HOUR - 60 < left <= HOUR
    await set_back(store, "parked")
    assert await owners.check_start(ownership) is StartStatus.DUE
    await owners.release(ownership, seen_id=2)
    with pytest.raises(OwnershipLost):
        await owners.check_start(ownership)


async def test_a_conversation_without_a_time_is_due(store: Store) -> None:
    await plan(store, StartWindow(limit_seconds=HOUR))
    assert await notified(store) == [CID]
    await enter(store, "w1")
    assert await Owners(store).check_start(await claim(store, "w1")) is StartStatus.DUE


async def test_one_that_has_not_begun_in_time_is_ended_once(store: Store) -> None:
    log = await plan(store, StartWindow(limit_seconds=HOUR))
    assert await beat(store) == ()
    await set_back(store, "expiring")
    assert await beat(store, "tool") == ()  # a tool worker writes into no log
    assert await beat(store) == (CID,)
    assert await store.connection.call("ZSCORE", f"{store.all_shards[0].root}:expiring", CID)  # that worker may die
    for _ in range(2):
        await expire(log, [CID, "unknown"])
    assert await beat(store) == ()
    events = await log.read(CID)
    assert [event.kind for event in events][2:] == ["observation.agent_state_changed"]
    assert fold_status(events).is_terminal
    row = await Conversations(store).load_row(CID)
    assert (row.state, row.fields["error_code"]) == (AgentState.ERROR, EXPIRED_CODE)


async def test_one_that_has_begun_does_not_expire(store: Store) -> None:
    log = await plan(store, StartWindow(limit_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [ConversationStarted()], expected_last_id=2, fields={"planned": "begun"})
    await set_back(store, "expiring")
    await expire(log, [CID])
    assert await log.load_last_id(CID) == 3
    assert await beat(store) == ()


async def test_its_owner_hears_that_it_has_expired(store: Store) -> None:
    await plan(store, StartWindow(limit_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await set_back(store, "expiring")
    assert await Owners(store).check_start(ownership) is StartStatus.EXPIRED


async def test_a_conversation_at_work_refuses_messages_if_it_says_so(store: Store) -> None:
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID, double_texting="reject"), [message()], key="begin")
    with pytest.raises(ConversationBusy) as refused:
        await log.append(CID, [message()], key="a", condition="message:")
    assert (refused.value.code, refused.value.retryable) == ("busy", True)
    assert await log.load_last_id(CID) == 2
    assert isinstance(await log.append(CID, [message()], key="b", condition="message:enqueue"), Appended)
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [], expected_last_id=3, fields={"busy": ""})
    assert isinstance(await log.append(CID, [message()], key="a", condition="message:"), Appended)
    # Of two messages to an agent at rest, the second comes to one at work, though no worker has seen the first.
    with pytest.raises(ConversationBusy):
        await log.append(CID, [message()], key="c", condition="message:")
    assert isinstance(await log.append(CID, [message()], key="a", condition="message:"), Duplicate)


async def test_one_message_may_ask_to_be_refused(store: Store) -> None:
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID), [message()], key="begin")
    assert isinstance(await log.append(CID, [message()], condition="message:"), Appended)
    with pytest.raises(ConversationBusy):
        await log.append(CID, [message()], condition="message:reject")


async def test_a_conversation_that_waits_to_begin_is_not_at_work(store: Store) -> None:
    log = await plan(store, StartWindow(delay_seconds=HOUR), double_texting="reject")
    for _ in range(2):
        assert isinstance(await log.append(CID, [message()], condition="message:"), Appended)


def test_times_become_durations() -> None:
    assert Timing().to_start_window(NOON) is None
    assert Timing(delay_seconds=0.0).to_start_window(NOON) is None
    assert Timing(delay_seconds=5.0, expires=60.0).to_start_window(NOON) == StartWindow(5.0, 60.0)
    assert Timing(not_before=NOON).to_start_window(NOON) is None
    assert Timing(expires=NOON).to_start_window(NOON) == StartWindow(None, 0.0)
    later = NOON.replace(hour=13)
    assert Timing(not_before=later, delay_seconds=5.0).to_start_window(NOON) == StartWindow(HOUR, None)
    assert Timing(delay_seconds=5.0, expires=60.0).after(10.0) == Timing(delay_seconds=0.0, expires=50.0)


TWO = "tenants = {acme = {max_open = 2}}"


async def begin(store: Store, conversation_id: str, *, tenant: str = "acme", parent: Parent | None = None) -> object:
    created = ConversationCreated(conversation_id=conversation_id, tenancy=Tenancy(tenant=tenant), parent=parent)
    return await EventLog(store).create(created, [message()], key="begin")


async def refused(store: Store, conversation_id: str, *, tenant: str = "acme") -> AdmissionRefused:
    with pytest.raises(AdmissionRefused) as raised:
        await begin(store, conversation_id, tenant=tenant)
    assert await store.connection.call("EXISTS", store.known_keys(conversation_id).meta) == 0
    assert await store.connection.call("EXISTS", store.known_keys(conversation_id).events) == 0
    with pytest.raises(AdmissionRefused):
        await check_admission(store, conversation_id, tenant)
    return raised.value


async def begin_two(store: Store) -> None:
    """Start as many conversations as the tenant may have open."""
    await publish_tenants(store, TenantTable.load_setting(TWO), None)
    await begin(store, "one")
    await begin(store, "two")


async def settle(store: Store, conversation_id: str, state: AgentState) -> None:
    """Claim a conversation and let it come to a state, as its owner."""
    found = await Owners(store).claim(conversation_id, "w1")
    claimed = (
        found if isinstance(found, ClaimedConversation) else await Owners(store).resume_claim(conversation_id, "w1")
    )
    assert claimed is not None
    event = AgentStateChangedObservation(agent_state=state)
    last = await EventLog(store).load_last_id(conversation_id)
    outcome = await EventLog(store).append_as_owner(
        claimed.ownership, [event], expected_last_id=last, fields={"state": state.value}
    )
    assert isinstance(outcome, Appended)


async def test_a_tenant_has_no_more_open_than_it_may(store: Store) -> None:
    await begin_two(store)
    error = await refused(store, "three")
    assert (error.code, error.reason, error.retryable) == ("admission_refused", "open", True)
    assert error.retry_after_seconds == 5.0
    assert "2 conversations of the tenant 'acme'" in str(error)
    assert isinstance(await begin(store, "three", tenant="globex"), Appended)


async def test_started_conversation_is_never_refused(store: Store) -> None:
    await begin_two(store)
    assert isinstance(await begin(store, "two"), Duplicate)
    await check_admission(store, "two", "acme")
    assert isinstance(await EventLog(store).append("two", [command()]), Appended)
    delegate = Parent(conversation_id="two", delegate_id=3, level=1)
    assert isinstance(await begin(store, "two-3", parent=delegate), Appended)


async def test_one_that_has_settled_makes_room(store: Store) -> None:
    await enter(store, "w1")
    await begin_two(store)
    await settle(store, "one", AgentState.FINISHED)
    await begin(store, "three")
    await settle(store, "one", AgentState.RUNNING)  # a message continues it in any state
    await settle(store, "two", AgentState.AWAITING_USER_INPUT)
    await refused(store, "four")


async def test_one_that_was_closed_or_lost_makes_room(store: Store) -> None:
    await begin_two(store)
    await store.call_function("deck_close", (store.known_keys("one").root, store.known_keys("one").shard.root), "one")
    await begin(store, "three")
    await store.connection.call("DEL", store.known_keys("two").meta)  # as a store that was restored from an older file
    await begin(store, "four")
    await refused(store, "five")
    await store.connection.call(
        "HSET", store.known_keys("four").meta, "state", "finished"
    )  # restored without its index
    await begin(store, "five")


async def test_a_damaged_conversation_does_not_count(store: Store) -> None:
    await begin_two(store)
    await store.connection.call("SET", store.known_keys("two").meta, "damaged")
    await begin(store, "three")


async def test_made_up_tenants_share_one_bound(store: Store) -> None:
    await publish_tenants(store, TenantTable.load_setting('tenants = {"*" = {max_open = 3}, acme = 1}'), None)
    for n in range(3):
        await begin(store, f"liar-{n}", tenant=f"liar-{n}")
    error = await refused(store, "another", tenant="another")
    assert "all tenants without a rule" in str(error)
    await refused(store, "nobody", tenant="")
    await begin(store, "one")


async def test_tenant_starts_no_more_per_minute_than_allowed(store: Store) -> None:
    await publish_tenants(store, TenantTable.load_setting("tenants = {acme = {submissions_per_minute = 3}}"), None)
    for n in range(3):
        await begin(store, f"acme-{n}")
    error = await refused(store, "acme-4")
    assert error.reason == "pace"
    assert 0 < error.retry_after_seconds <= 20.0
    await store.connection.call("DEL", f"{store.all_shards[0].root}:paces")  # as if the minute were over
    await begin(store, "acme-4")


POOLS = 'tenants = {acme = {pools = ["bash", "gpu"]}, "*" = {pools = ["bash"]}, free = 1}'


@pytest.mark.parametrize(
    ("tenant", "pool", "is_allowed"),
    [
        *(("acme", "gpu", True), ("acme", "bash", True), ("acme", "browser", False), ("acme", "bash,gpu", False)),
        *(("acme", "", False), ("acme", "gp", False), ("other", "gpu", False), ("other", "bash", True)),
        *(("", "gpu", False), ("free", "gpu", True), ("free", "anything", True)),
    ],
)
async def test_tenant_uses_only_its_pools(store: Store, tenant: str, pool: str, is_allowed: bool) -> None:
    await publish_tenants(store, TenantTable.load_setting(POOLS), None)
    workspace = WorkspaceSpec(pool=pool)
    created = ConversationCreated(conversation_id="one", workspace=workspace, tenancy=Tenancy(tenant=tenant))
    if is_allowed:
        await EventLog(store).create(created)
        return
    with pytest.raises(PoolRefused, match="may not use the pool") as error:
        await EventLog(store).create(created)
    assert "bash" in (error.value.remedy or "")
    assert await store.connection.call("EXISTS", store.known_keys("one").meta) == 0
    delegate = created.model_copy(update={"parent": Parent(conversation_id="p", delegate_id=2)})
    with pytest.raises(PoolRefused):
        await EventLog(store).create(delegate)


async def test_rules_in_force_are_listed_with_open_conversations(store: Store) -> None:
    assert await load_tenants(store) == []
    await publish_tenants(store, TenantTable.load_setting(POOLS), 0.8)
    await begin(store, "one", tenant="free")
    assert await load_tenants(store) == [
        TenantStatus("*", 1.0, None, None, ("bash",), 0),
        TenantStatus("acme", 1.0, None, None, ("bash", "gpu"), 0),
        TenantStatus("free", 1.0, None, None, (), 1),
    ]
    await store.connection.call("HSET", store.all_shards[0].tenants, "acme", "much", "free", "1")
    assert [one.name for one in await load_tenants(store)] == ["*"]


async def test_nothing_begins_in_a_store_that_fills_up(store: Store) -> None:
    await publish_tenants(store, TenantTable(), parse_memory_bound("1k"))
    error = await refused(store, "one")
    assert (error.reason, error.retry_after_seconds) == ("memory", 15.0)
    assert "1,024" in str(error)
    await publish_tenants(store, TenantTable(), parse_memory_bound("none"))
    await begin(store, "one")
    await publish_tenants(store, TenantTable(), parse_memory_bound("1k"))
    assert isinstance(await EventLog(store).append("one", [message()]), Appended)
    await publish_tenants(store, TenantTable(), parse_memory_bound("1000g"))
    await begin(store, "two")


async def test_four_fifths_of_a_limited_server_are_for_starts(valkey_store: Store) -> None:
    call = valkey_store.connection.call
    used = int((await call("INFO", "memory")).decode().partition("used_memory:")[2].partition("\r")[0])
    try:
        await call("CONFIG", "SET", "maxmemory", int(used * 1.1))
        assert (await refused(valkey_store, "one")).reason == "memory"
        await call("CONFIG", "SET", "maxmemory", used * 2)
        await begin(valkey_store, "one")
    finally:
        await call("CONFIG", "SET", "maxmemory", 0)


async def test_a_bound_counts_all_shards() -> None:
    store = await open_store(MemoryConnection(), shards=4)
    await publish_tenants(store, TenantTable.load_setting("tenants = {acme = {max_open = 10}}"), None)
    for n in range(10):
        await begin(store, f"acme-{n}")
    await refused(store, "acme-10")
    await store.aclose()


def test_the_functions_know_which_states_are_settled() -> None:
    text = build_source().partition("local SETTLED = {")[2].partition("}")[0]
    assert {part.split()[0] for part in text.split(",")} == {str(state) for state in AgentState if is_settled(state)}
