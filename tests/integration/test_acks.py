"""When an event counts as written: the demands of a store and of a conversation, on a primary with one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.log.append_call import Appended, Duplicate
from broker.log.event_log import EventLog
from broker.runtime.errors import OutcomeUnknown, StoreError, UsageError
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.operations.diagnosis.diagnostics import examine_store
from tests.broker_parts import act, enter, message, queue, take
from tests.polling import until
from tests.sentinels import Server, find_port
from tests.stores import server_program

CONVERSATIONS = 100


@pytest.fixture(params=["valkey", "redis"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    """A primary and a replica that has not been started."""
    program = server_program(request.param)
    primary, replica = (Server(program, tmp_path / name, find_port()) for name in ("primary", "replica"))
    primary.start()

    async def answers() -> bool:
        return await primary.replicas() == 0

    await until(answers, what="server")
    try:
        yield primary, replica
    finally:
        for server in (primary, replica):
            if server.process is not None:
                server.kill()


@pytest.fixture
async def store(pair: tuple[Server, Server]) -> AsyncIterator[Store]:
    opened = await open_store(pair[0].url, patience_seconds=5.0)
    yield opened
    await opened.aclose()


async def replicate(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    replica.start(primary=primary.port)

    async def has_replica() -> bool:
        if await primary.replicas() != 1:
            return False
        try:
            return b"master_link_status:up" in await replica.call("INFO", "replication")
        except StoreError:  # it loads what it was sent, and confirms nothing so far
            return False

    await until(has_replica, limit=60, what="replica")


async def count_waits(server: Server) -> int:
    stats = (await server.call("INFO", "commandstats")).decode()
    found = [line for line in stats.splitlines() if line.startswith("cmdstat_wait:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


async def test_only_the_conversation_that_demands_a_replica_waits_for_one(
    pair: tuple[Server, Server], store: Store
) -> None:
    client, log, hasty = Client(store), EventLog(store), await open_store(pair[0].url, patience_seconds=0.0)
    with pytest.raises(OutcomeUnknown, match=r"has no replica that could confirm a write\. Start a replica"):
        await EventLog(hasty).create(ConversationCreated(conversation_id="hasty", acks="replica"), [message()], key="k")
    await hasty.aclose()
    with pytest.raises(UsageError, match="`acks` is replica, but the store has no replica") as refused:
        await client.submit("do it", acks="replica", idempotency_key="k")
    assert "Start a replica" in refused.value.remedy
    before = await count_waits(pair[0])
    assert before >= 1  # a confirmation asks again while it has time
    other = await client.submit("do it", acks="local")
    await client.send_message(other, "and this")
    assert await count_waits(pair[0]) == before
    await replicate(pair)
    conversation_id = await client.submit("do it", acks="replica", idempotency_key="k")
    assert (await log.read(conversation_id))[0].acks == "replica"  # type: ignore[attr-defined]
    assert await count_waits(pair[0]) > before  # the repeated call has to be confirmed as well
    await client.send_message(conversation_id, "and this")
    assert await pair[1].call("XLEN", store.known_keys(conversation_id).events) == 3
    await client.aclose()


async def test_every_writer_of_the_conversation_meets_its_demand(pair: tuple[Server, Server], store: Store) -> None:
    await replicate(pair)
    log = EventLog(store)
    created = ConversationCreated(conversation_id="conv", acks="replica")
    assert isinstance(await log.create(created, [message()], key="k"), Appended)
    assert isinstance(await log.create(created, [message()], key="k"), Duplicate)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, _ = await act(store, "w1", "conv")
    before = await count_waits(pair[0])
    delivery = await take(queue(store, "t1", node="n1"))
    await queue(store, "t1", node="n1").claim(delivery)
    assert ownership.worker_id == "w1"
    assert await count_waits(pair[0]) > before
    pair[1].kill()
    with pytest.raises(OutcomeUnknown):
        await log.append("conv", [message()])


async def test_appends_at_once_share_confirmations(pair: tuple[Server, Server], store: Store) -> None:
    await replicate(pair)
    log = EventLog(store)
    for number in range(CONVERSATIONS):
        await log.create(ConversationCreated(conversation_id=f"conv-{number}", acks="replica"), [message()], key="k")
    before = await count_waits(pair[0])
    await asyncio.gather(*(log.append(f"conv-{number}", [message()]) for number in range(CONVERSATIONS)))
    assert await count_waits(pair[0]) - before <= CONVERSATIONS // 10


async def test_both_demands_hold(pair: tuple[Server, Server]) -> None:
    await replicate(pair)
    store = await open_store(pair[0].url, acks="replica", opening_seconds=5.0, patience_seconds=5.0)
    log = EventLog(store)
    before = await count_waits(pair[0])
    created = ConversationCreated(conversation_id="conv", acks="local")
    # A busy machine may confirm later than once is waited for; a key makes the call repeatable.
    await store.retry(lambda: log.create(created, [message()], key="k"))
    assert await count_waits(pair[0]) > before
    await store.aclose()


async def test_a_fork_has_the_demand_of_its_origin(pair: tuple[Server, Server], store: Store) -> None:
    await replicate(pair)
    client = Client(store)
    origin = await client.submit("do it", acks="replica")
    fork = await client.fork(origin, at=2)
    assert await client.log.load_acks(fork) == "replica"
    await client.aclose()


async def test_a_missing_replica_is_a_warning(
    pair: tuple[Server, Server], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, _ = pair
    opened = await open_store(primary.url, acks="replica")
    assert any("the store has no replica: no write is confirmed" in warning for warning in opened.warnings)
    await opened.aclose()
    assert not any("replica" in warning for warning in store.warnings)
    monkeypatch.setenv("DECKHANDS_ACKS", "replica")
    (found,) = [finding for finding in await examine_store(primary.url) if finding.name == "replica"]
    assert not found.is_good
    assert "Start a replica" in found.detail
    await replicate(pair)
    assert not [finding for finding in await examine_store(primary.url) if finding.name == "replica"]


async def test_a_lost_connection_that_confirms_is_an_unknown_outcome(pair: tuple[Server, Server]) -> None:
    primary, _ = pair
    connection = MultiplexedConnection(primary.url, acks="replica")
    writing = asyncio.create_task(connection.call("SET", "deck:test", "1"))

    async def is_waiting() -> bool:
        return b"blocked_clients:1" in await primary.call("INFO", "clients")

    await until(is_waiting, what="confirmation that waits")
    primary.kill()
    with pytest.raises(OutcomeUnknown):
        await writing
    await connection.aclose()
