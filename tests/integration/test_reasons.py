"""`why` on a real store: the reader's result for each kind of wait, over the client, the server and the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from broker.contract.actions import AgentDelegateAction
from broker.contract.events import ConversationCreated, Event, ModelCallDeferred, Tenancy
from broker.contract.fencing import Ownership
from broker.contract.specs import WorkspaceSpec
from broker.coordination.ownership import Owners
from broker.limits.governor import Governor
from broker.limits.ledger import Ledger, list_accounts
from broker.limits.quotas import QuotaTable
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.runtime.ids import make_delegate_id
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.client.reasons.link import Cause, Link, Why
from deckhands.client.remote.remote_client import RemoteClient
from tests.broker_parts import CID, act, begin, claim, enter, lapse, queue, take
from tests.integration.command_line import deckhands, environment
from tests.server_parts import Served, served
from tests.stores import RealServer
from tests.unit.deckhands.sample_log import state

RUNNING = state("running")
WORKER = "controller-1"
QUOTAS = '[[quota]]\nmodel = "openai/*"\nconcurrency = 1\n'


@pytest.fixture
async def store(valkey_store: Store) -> Store:
    """A store with a controller worker."""
    await enter(valkey_store, WORKER)
    return valkey_store


async def why(store: Store, conversation_id: str = CID) -> Why:
    return await Client(store).why(conversation_id)


async def causes(store: Store, conversation_id: str = CID) -> list[str]:
    return [link.cause.value for link in (await why(store, conversation_id)).links]


async def last(store: Store, conversation_id: str = CID) -> Link:
    return (await why(store, conversation_id)).links[-1]


async def write(store: Store, ownership: Ownership, *events: Event, wait_reason: str = "") -> int:
    log = EventLog(store)
    fields = {"state": "running", "wait_reason": wait_reason}
    last_id = await log.load_last_id(ownership.conversation_id)
    outcome = await log.append_as_owner(ownership, events, expected_last_id=last_id, fields=fields)
    assert isinstance(outcome, Appended), outcome
    return outcome.last_id


async def let_go(store: Store, ownership: Ownership) -> None:
    last_id = await EventLog(store).load_last_id(ownership.conversation_id)
    assert await Owners(store).release(ownership, seen_id=last_id) is None


async def test_the_queue_the_owner_and_its_death(valkey_store: Store) -> None:
    store = valkey_store
    await begin(store)
    assert await causes(store) == ["state", "no_worker"]
    await enter(store, WORKER)
    await begin(store, "conversation-2")
    link = await last(store, "conversation-2")
    assert (link.cause, link.details["queue"], link.details["position"]) == (Cause.QUEUED, "ready", 2)
    ownership = await claim(store, WORKER)
    link = await last(store)
    assert (link.cause, link.details["worker_id"]) == (Cause.OWNER, WORKER)
    await write(store, ownership, RUNNING)
    await lapse(store, WORKER)
    assert await causes(store) == ["state", "worker_lost"]


async def test_an_action_waits_runs_and_loses_its_worker(store: Store) -> None:
    await begin(store)
    ownership, action_id = await act(store, WORKER)
    await write(store, ownership, RUNNING, wait_reason="tool")
    await let_go(store, ownership)
    link = (await why(store)).links[1]
    assert (link.cause, link.details["queue"], link.details["position"]) == (Cause.ACTION_QUEUED, "pool:bash", 1)
    assert (await last(store)).cause is Cause.NO_WORKER
    await enter(store, "tool-1", node="n1")
    actions = queue(store, "tool-1", node="n1")
    await actions.claim(await take(actions))
    link = await last(store)
    assert link.cause is Cause.ACTION_RUNS
    assert (link.details["worker_id"], link.details["action_id"]) == ("tool-1", action_id)
    await lapse(store, "tool-1")
    assert await causes(store) == ["state", "worker_lost", "node_away", "no_worker"]
    await actions.aclose()


async def test_a_workspace_that_no_running_node_serves(store: Store) -> None:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID, workspace=WorkspaceSpec(path="/srv/none"))
    await log.create(created, [], key="begin")
    ownership, _ = await act(store, WORKER)
    await write(store, ownership, RUNNING, wait_reason="tool")
    membership = await enter(store, "tool-1", node="n1")
    names = store.all_shards[0]
    served = ("role", "tool", "pools", "bash", "node", "n1", "workspace_roots", "/x")
    await store.connection.call("HSET", names.worker_facts("tool-1"), *served)
    link = await last(store)
    assert link.cause is Cause.NO_WORKER
    assert "does not take the directory /srv/none" in link.text
    await membership.leave()


async def test_a_quota_and_a_budget_say_where_one_stands(store: Store) -> None:
    table = QuotaTable.parse(QUOTAS)
    governor, pool = Governor(store, table), table.pools[0]
    await governor.publish()
    owners = {}
    for number in range(3):
        name = f"conversation-{number}"
        await begin(store, name)
        owners[name] = await claim(store, WORKER, name)
        await governor.reserve(pool, name, WORKER, input_tokens=10, output_tokens=10)
    deferred = ModelCallDeferred(code="rate_limit", waits_for="openai/*")
    await write(store, owners["conversation-2"], RUNNING, deferred, wait_reason="rate_limit")
    link = (await why(store, "conversation-2")).links[1]
    assert (link.cause, link.details) == (Cause.QUOTA, {"models": "openai/*", "waiting": 2, "position": 2})

    ledger = Ledger(store)
    await ledger.set_limit("tenant:acme", 1.0)
    for name in ("conversation-0", "conversation-1"):
        accounts = list_accounts(name, tenant="acme")
        await ledger.reserve(owners[name], accounts, worst_usd=0.9, total_usd=0.0)
    deferred = ModelCallDeferred(code="waiting_for_budget", waits_for="tenant:acme")
    await write(store, owners["conversation-1"], RUNNING, deferred, wait_reason="waiting_for_budget")
    link = (await why(store, "conversation-1")).links[1]
    assert (link.cause, link.details["limit_usd"], link.details["reserved_usd"]) == (Cause.BUDGET, 1.0, 0.9)
    assert link.details["position"] == 1


@pytest.mark.parametrize("waits_for", ["nonsense", "tenant:" + "x" * 500, "deck:{0}:keys", "\x00", "*" * 300])
async def test_forged_event_reads_no_other_key(store: Store, waits_for: str) -> None:
    """Every client with the rights of a worker can write it."""
    await begin(store)
    ownership = await claim(store, WORKER)
    for code in ("rate_limit", "waiting_for_budget"):
        event = ModelCallDeferred(code=code, waits_for=waits_for)
        await write(store, ownership, RUNNING, event, wait_reason=code)
        assert len((await why(store)).links) == 2


async def test_garbage_in_the_hashes_is_ignored(store: Store) -> None:
    await begin(store)
    ownership, action_id = await act(store, WORKER)
    await write(store, ownership, RUNNING, wait_reason="tool")
    await let_go(store, ownership)
    keys = store.known_keys(CID)
    for place in ("nonsense", "other:key|1-1", "deck:{0}:act:pool:bash|x", "deck:{0}:index|1-1", "|"):
        await store.connection.call("HSET", keys.once, f"q:{action_id}", place)
        await store.connection.call("HSET", keys.meta, "ready_id", place)
        assert (await why(store)).links[1].cause in (Cause.ACTION_UNSENT, Cause.ACTION_QUEUED)


async def test_delegates_are_followed_and_a_circle_ends(store: Store) -> None:
    await begin(store)
    ownership = await claim(store, WORKER)
    action_id = await write(store, ownership, RUNNING, AgentDelegateAction(agent="helper"), wait_reason="delegate")
    await let_go(store, ownership)
    name = make_delegate_id(CID, action_id)
    assert (await last(store)).links == ()
    await begin(store, name)
    below, _ = await act(store, WORKER, name)
    await write(store, below, RUNNING, wait_reason="tool")
    link = await last(store)
    assert (link.cause, link.details["conversation_id"]) == (Cause.DELEGATE, name)
    assert [each.cause.value for each in link.links] == ["state", "action_queued", "no_worker"]


async def test_a_dead_letter_quotes_the_logs_of_its_workers(
    store: Store, tmp_path: Path, valkey_server: RealServer
) -> None:
    await begin(store)
    await write(store, await claim(store, WORKER), RUNNING)
    await (await enter(store, WORKER)).leave()
    names = store.all_shards[0]
    await store.connection.call("ZADD", names.dead, 1, CID)
    fields = ("c", CID, "from", WORKER, "to", "w9", "at", "1760000000000")
    await store.connection.call("XADD", names.takeovers, "*", *fields)
    logs = tmp_path / "cluster" / "logs"
    logs.mkdir(parents=True)
    (logs / "controller-1.log").write_text(f"noise\nMemoryError in {CID}\n")
    env = environment(tmp_path, DECKHANDS_URL=valkey_server.url)
    done = await asyncio.to_thread(deckhands, "why", CID, env=env)
    assert (done.code, done.err) == (0, "")
    assert "Three workers in a row died while they worked on it (controller-1)" in done.out
    assert f"| controller-1: MemoryError in {CID}" in done.out
    assert f"`deckhands dead requeue {CID}`" in done.out
    found = await asyncio.to_thread(deckhands, "why", CID, "--json", env=env)
    assert found.json[0]["links"][-1]["details"] == {"workers": [WORKER]}


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs) as found:
        yield found


async def begun(server: Served) -> Sequence[str]:
    """Three conversations: one waits for a quota, one for a budget, and one for an action."""
    store = server.client.store
    await enter(store, "controller-secret")
    names = []
    for code, waits_for in (("rate_limit", "openai/*"), ("waiting_for_budget", "tenant:acme"), ("tool", "")):
        name = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
        ownership = await claim(store, "controller-secret", name)
        deferred = [ModelCallDeferred(code=code, waits_for=waits_for)] if waits_for else []
        await write(store, ownership, RUNNING, *deferred, wait_reason=code)
        names.append(name)
    return names


async def test_server_explains_with_its_rights_and_names_workers_to_admins(server: Served) -> None:
    """The fixture makes sure that the store has refused nothing."""
    names = await begun(server)
    tenant, admin = RemoteClient(server.url, await server.token()), RemoteClient(server.url, await server.token("*"))
    try:
        for name in names:
            theirs, ours = await tenant.why(name), await admin.why(name)
            assert theirs.wait_reason == ours.wait_reason != ""
            assert "secret" not in str(theirs.as_json())
        assert [link.cause.value for link in (await tenant.why(names[0])).links] == ["state", "quota"]
    finally:
        await tenant.aclose()
        await admin.aclose()
