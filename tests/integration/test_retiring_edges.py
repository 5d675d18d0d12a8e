"""Archived conversations: long answers stay whole, and the end of one touches no other, however damaged or forged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.contract.actions import AgentFinishAction, MessageAction
from broker.contract.events import EventSource, Parent
from broker.contract.specs import Tenancy
from broker.log.event_log import EventLog
from broker.store.store import Store
from deckhands.client.archive.archive import Archive
from deckhands.client.archive.storage import ArchiveStorage
from deckhands.client.archive_operations import remove_files
from deckhands.client.client import Client
from deckhands.client.deleting import delete
from deckhands.server.conversations import result_of
from deckhands.server.gateway import Gateway
from deckhands.server.streams import EventStream
from tests.archive_parts import begin_ended, delegate_ended, retired
from tests.conversation_hands import WatchedConnection
from tests.server_parts import add_principal
from tests.stores import RealServer, emptied


@pytest.fixture
async def client(valkey_server: RealServer) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        yield client


async def damage(client: Client, what: str) -> None:
    """Damage the first conversation that the job comes to."""
    names, call = client.store.known_keys("damaged"), client.store.connection.call
    if what in ("events", "once", "caller", "snapshot", "meta"):
        await call("DEL", getattr(names, what))
        await call("SET", getattr(names, what), "a string")
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
        *("last_id=x", "last_id=99999999999999999999", "updated_ms=x", "updated_ms=1e400"),
        *("state=finished", "labels=x"),
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
    await client.store.connection.call("HDEL", client.store.known_keys("one-of-shop").meta, "tenant")
    found = await retired(client.store, tmp_path / "archive", tmp_path, '[[rule]]\ntenant = "shop"\nage = "0s"')
    assert found["archived"] == 1


async def ids(client: Client) -> set[str]:
    return {row.conversation_id for row in await client.recent()}


async def begin_both(client: Client) -> None:
    await begin_ended(client, "victim")
    await begin_ended(client, "own", parent=Parent(conversation_id="imported", delegate_id=2))
    await begin_ended(client, "imported", delegate_ended("victim"), delegate_ended("own"))


async def test_deletion_removes_no_other_conversation(client: Client) -> None:
    await begin_both(client)
    await delete(EventLog(client.store), "imported", limit_seconds=0.0)
    assert await ids(client) == {"victim"}


async def test_retiring_removes_no_other_conversation(client: Client, tmp_path: Path) -> None:
    await begin_both(client)
    await client.send_message("victim", "Continue.")
    place = tmp_path / "archive"
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert await ids(client) == {"victim"}
    assert {path.stem for path in place.rglob("*.zip")} == {"imported", "own"}


async def test_forgetting_removes_no_other_file(client: Client, tmp_path: Path) -> None:
    await begin_both(client)
    place = tmp_path / "archive"
    await retired(client.store, place, tmp_path)
    assert await remove_files(Archive(str(place)), "imported")
    assert {path.stem for path in place.rglob("*.zip")} == {"victim"}


async def test_a_log_that_names_itself_is_deleted_once(client: Client) -> None:
    await begin_ended(client, "one", delegate_ended("other"), parent=Parent(conversation_id="other", delegate_id=2))
    await begin_ended(client, "other", delegate_ended("one"), parent=Parent(conversation_id="one", delegate_id=2))
    await delete(EventLog(client.store), "one", limit_seconds=0.0)
    assert await client.recent() == []


async def test_a_fork_leaves_the_delegates_of_its_origin(client: Client) -> None:
    await begin_ended(client, "origin", delegate_ended("own"))
    await begin_ended(client, "own", parent=Parent(conversation_id="origin", delegate_id=2))
    fork = await client.fork("origin")
    await client.cancel(fork)
    await delete(EventLog(client.store), fork, limit_seconds=0.0)
    assert await ids(client) == {"origin", "own"}


@pytest.mark.parametrize("name", ["../../victim", "", "a\x00b", "{0}:c:victim", "x" * 100])
async def test_a_name_that_is_none_keeps_nothing_from_its_end(client: Client, tmp_path: Path, name: str) -> None:
    place = tmp_path / "archive"
    for conversation_id in ("one", "other"):
        await begin_ended(client, conversation_id, delegate_ended(name))
    await delete(EventLog(client.store), "one", limit_seconds=0.0)
    assert await retired(client.store, place, tmp_path) == {"archived": 1, "deleted": 0, "kept": 0, "failed": 0}
    assert await remove_files(Archive(str(place)), "other")
    assert not [*place.rglob("*.zip")]


ANSWER = " ".join(map(str, range(20_000)))
OUTPUTS = {"text": "x" * 100_000}


async def ends_of(gateway: Gateway, name: str, after: int) -> list[object]:
    """Return the last messages of a stream."""
    stream = EventStream(gateway, await add_principal(gateway.client.store), name, after=after, until_settled=True)
    items = [item async for batch in stream.batches() for item in batch]
    return [item.content["summary"]["message"] for item in items if item.kind == "end"]


async def test_a_long_answer_is_whole_in_every_summary(valkey_store: Store, tmp_path: Path) -> None:
    gateway = Gateway(valkey_store, str(tmp_path / "archive"))
    client = gateway.client
    await begin_ended(client, "said", AgentFinishAction(final_thought=ANSWER, outputs=OUTPUTS))
    await begin_ended(client, "asked", MessageAction(content=ANSWER, source=EventSource.AGENT))
    for name in ("said", "asked"):
        words = next(event for event in await client.events(name) if ANSWER[:100] in str(event))
        assert len(str(words)) < len(ANSWER), "the log has its head and tail"
        last_id = await client.log.load_last_id(name)
        assert await ends_of(gateway, name, 0) == await ends_of(gateway, name, last_id) == [ANSWER]
    outputs = {"said": OUTPUTS, "asked": {}}
    for place in ("store", "archive"):
        for name in ("said", "asked"):
            summary = await client.summary(name)
            assert (summary.message, summary.outputs) == (ANSWER, outputs[name]), place
            assert await client.wait_until_settled(name, timeout_seconds=30) == summary
            assert await client.cancel(name) == summary
            assert (await result_of(client, name)).summary == summary.as_json()
        await retired(valkey_store, tmp_path / "archive", tmp_path)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_unreadable_long_answer_is_shown_as_head_and_tail(
    valkey_store: Store, tmp_path: Path, is_lost: bool
) -> None:
    place = tmp_path / "archive"
    client = Gateway(valkey_store, str(place)).client
    await begin_ended(client, "said", AgentFinishAction(final_thought=ANSWER))
    references = [ref for event in await client.events("said") for ref in (event.blobs or {}).values()]
    blobs = [valkey_store.known_keys("said").blob(ref.sha256) for ref in references]
    await valkey_store.connection.call("DEL", *blobs)
    if is_lost:
        file = Path(ArchiveStorage(str(place)).path("said"))
        file.parent.mkdir(parents=True)
        file.write_bytes(b"damaged")
    else:
        await valkey_store.connection.call_many([("HSET", key, "another", "type") for key in blobs])
    summary = await client.summary("said")
    assert ANSWER[:100] in summary.message
    assert len(summary.message) < len(ANSWER)
