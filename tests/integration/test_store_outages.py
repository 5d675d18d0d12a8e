"""Stores that lose replies, restart or are killed, each acknowledged event there once; and stores behind TLS."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.celery.app import make_connection_settings
from broker.contract.actions import MessageAction
from broker.coordination.action_streams import ActionDelivery, ActionQueue
from broker.coordination.wakeups import ReadyStream
from broker.log.append_call import Appended, Duplicate
from broker.runtime.errors import StoreMisconfigured, StoreUnavailable, UsageError
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store, open_store
from tests.broker_parts import CID, begin, command, dispatch_one, enter, message, output, queue
from tests.certificates import certificate_in
from tests.stores import LossyWire, RealServer, redis_program, running, server_program

APPENDS = 300
ACTIONS = 60
SWALLOWED = 0.05
SEED = 20_260_101


@pytest.fixture
async def store(lossy_wire: LossyWire) -> AsyncIterator[Store]:
    """A store behind a wire that swallows replies on request."""
    opened = await open_store(lossy_wire.url)
    yield opened
    await opened.aclose()


def swallow(wire: LossyWire, share: float = SWALLOWED) -> None:
    """Let a share of the replies be lost from now on."""
    random_ = random.Random(SEED)
    wire.swallow = lambda _: random_.random() < share


async def test_300_appends_with_5_percent_of_the_replies_swallowed(store: Store, lossy_wire: LossyWire) -> None:
    log = await begin(store)
    swallow(lossy_wire)
    outcomes = [await log.append(CID, [message(str(n))]) for n in range(APPENDS)]
    swallow(lossy_wire, 0)
    # The reply of a greeting is swallowed now and then, too.
    assert 5 <= sum(isinstance(outcome, Duplicate) for outcome in outcomes) <= lossy_wire.swallowed
    ids = [outcome.first_id for outcome in outcomes if isinstance(outcome, Appended | Duplicate)]
    assert ids == list(range(2, APPENDS + 2))
    events = await log.read(CID)
    assert [event.content for event in events if isinstance(event, MessageAction)] == [str(n) for n in range(APPENDS)]


async def test_many_at_once_over_one_connection(store: Store, lossy_wire: LossyWire) -> None:
    log = await begin(store)
    swallow(lossy_wire)
    for batch in range(APPENDS // 10):
        await asyncio.gather(*(log.append(CID, [message(f"{batch}.{n}")]) for n in range(10)))
    swallow(lossy_wire, 0)
    assert lossy_wire.swallowed >= 1
    events = [event for event in await log.read(CID) if isinstance(event, MessageAction)]
    assert sorted(event.content for event in events) == sorted(
        f"{batch}.{n}" for batch in range(APPENDS // 10) for n in range(10)
    )


async def test_an_owner_and_a_tool_worker_behind_the_same_wire(store: Store, lossy_wire: LossyWire) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    reader, action_id = queue(store, "t1", node="n1"), 2
    swallow(lossy_wire)
    for _ in range(ACTIONS):
        delivery = await _next(reader, action_id)
        await reader.claim(delivery)
        await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
        (found,) = (await log.read_new(ownership, after=action_id)).events
        assert found.cause == action_id
        decided = await log.append_as_owner(ownership, [command()], expected_last_id=found.id, dispatch=[0])
        assert isinstance(decided, Appended | Duplicate)
        action_id = decided.last_id
    swallow(lossy_wire, 0)
    assert lossy_wire.swallowed >= 5
    assert [event.id for event in await log.read(CID)] == list(range(1, 2 * ACTIONS + 3))
    await reader.aclose()


async def _next(reader: ActionQueue, action_id: int) -> ActionDelivery:
    """Read until the action comes; after a lost reply, entries that are settled may come again."""
    async with asyncio.timeout(60):
        while True:
            for delivery in await reader.read(limit=10):
                if delivery.action_id == action_id:
                    return delivery


@pytest.fixture(params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server of this test alone, which writes every command to disk before it answers."""
    program = server_program(request.param)
    yield from running(program, "--appendfsync", "always")


@pytest.fixture
async def patient_store(own_server: RealServer) -> AsyncIterator[Store]:
    opened = await open_store(own_server.url, patience_seconds=20)
    yield opened
    await opened.aclose()


async def test_a_restart_is_waited_for(own_server: RealServer, patient_store: Store) -> None:
    log = await begin(patient_store, CID, message("before"))
    own_server.stop()
    waiting = asyncio.create_task(log.append(CID, [message("after")]))
    await asyncio.sleep(0)
    own_server.start()
    assert await asyncio.wait_for(waiting, 60) == Appended(3, 3)
    await patient_store.check_generation()
    assert [event.id for event in await log.read(CID)] == [1, 2, 3]


async def test_a_killed_server_keeps_what_it_has_acknowledged(own_server: RealServer, patient_store: Store) -> None:
    log = await begin(patient_store)
    acknowledged = 1
    for _ in range(3):
        under_way = [
            asyncio.create_task(log.append(CID, [message(str(n))], key=f"{acknowledged}.{n}")) for n in range(40)
        ]
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        own_server.kill()
        own_server.start()
        outcomes = await asyncio.wait_for(asyncio.gather(*under_way), 60)
        assert all(isinstance(outcome, Appended | Duplicate) for outcome in outcomes)
        assert sorted(outcome.first_id for outcome in outcomes) == list(range(acknowledged + 1, acknowledged + 41))
        acknowledged += 40
    assert [event.id for event in await log.read(CID)] == list(range(1, 122))


async def test_a_blocked_reader_hears_of_news_after_the_restart(own_server: RealServer, patient_store: Store) -> None:
    await enter(patient_store, "w1")
    stream = ReadyStream(patient_store, patient_store.all_shards[0], "w1")
    reading = asyncio.create_task(stream.read(limit=1))
    await asyncio.sleep(0)
    own_server.kill()
    own_server.start()
    await begin(patient_store)
    found = await asyncio.wait_for(reading, 60)
    while not found:
        found = await asyncio.wait_for(stream.read(limit=1), 60)
    assert [cid for cid, _ in found] == [CID]
    await stream.aclose()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate that has signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate_in(folder)
    return folder


@pytest.fixture(scope="module")
def url(files: Path) -> Iterator[str]:
    """A server that wants a certificate of its clients, as Redis does by default."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    certificate, key = files / "cert.pem", files / "key.pem"
    options = ["--tls-port", str(port), "--tls-ca-cert-file", certificate, "--tls-cert-file", certificate]
    for _ in running(redis_program(), *map(str, options), "--tls-key-file", str(key)):
        yield f"rediss://127.0.0.1:{port}/0"


async def answer(url: str) -> object:
    connection = MultiplexedConnection(url)
    try:
        return await connection.call("PING")
    finally:
        await connection.aclose()


async def test_a_client_shows_the_certificate_that_the_url_names(url: str, files: Path) -> None:
    trusted = f"{url}?ssl_ca_certs={files}/cert.pem"
    shown = f"{trusted}&ssl_certfile={files}/cert.pem&ssl_keyfile={files}/key.pem"
    assert await answer(shown) == b"PONG"
    host = shown.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailable, match="ostname mismatch"):
        await answer(host)
    assert await answer(f"{host}&ssl_check_hostname=false") == b"PONG"
    with pytest.raises(StoreUnavailable):
        await answer(trusted)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("name", ["nowhere.pem", "key.pem"])
def test_a_certificate_that_cannot_be_used_is_named(files: Path, option: str, name: str) -> None:
    with pytest.raises(StoreMisconfigured, match=f"{option}={files}/{name}"):
        MultiplexedConnection(f"rediss://h/0?{option}={files}/{name}")


@pytest.mark.parametrize("option", ["ssl_cert_reqs=maybe", "ssl_ca_certs=/nowhere.pem", "ssl_certfile=/nowhere.pem"])
def test_store_and_broker_refuse_the_same_tls_options(option: str) -> None:
    with pytest.raises(StoreMisconfigured, match=f"{option} cannot be used"):
        MultiplexedConnection(f"rediss://h/0?{option}")
    with pytest.raises(UsageError, match=f"{option} cannot be used"):
        make_connection_settings(f"rediss://h/0?{option}")


async def test_no_error_shows_the_password_of_a_key(url: str) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        await answer(f"{url}?ssl_password=secret")
    assert "secret" not in str(refused.value)


async def test_the_store_takes_celerys_name_of_no_verification(url: str, files: Path) -> None:
    shown = f"ssl_certfile={files}/cert.pem&ssl_keyfile={files}/key.pem"
    for check in ("none", "CERT_NONE"):
        assert await answer(f"{url}?{shown}&ssl_cert_reqs={check}") == b"PONG"
