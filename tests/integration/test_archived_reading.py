"""Archived conversations are read as if they were in the store, and come back when somebody asks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import Parent
from broker.contract.workspace_sources import UploadedSource
from broker.coordination.stored_files import StoredFiles
from broker.runtime.errors import UnknownConversation, UsageError
from deckhands.client.client import Client
from deckhands.client.errors import IsArchived, IsBeingDeleted
from tests.archive_parts import begin_ended, delegate_ended, retired
from tests.integration.command_line import deckhands
from tests.stores import RealServer, emptied


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def client(valkey_server: RealServer, place: Path) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as connected:
        yield Client(connected.store, str(place))


async def test_the_client_reads_it_as_if_it_were_there(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    events, summary = await client.events("one-of-us", is_whole=True), await client.summary("one-of-us")
    await retired(client.store, place, tmp_path)
    assert await client.events("one-of-us", is_whole=True) == events
    assert [event async for event in client.tail("one-of-us", after=2, is_whole=True)] == events[2:]
    assert await client.summary("one-of-us") == summary
    assert await client.wait_until_settled("one-of-us", timeout_seconds=30) == summary
    with pytest.raises(IsArchived, match="`deckhands restore one-of-us` brings it back"):
        await client.send_message("one-of-us", "Continue.")
    with pytest.raises(UnknownConversation):
        await client.events("another")


async def test_one_that_is_half_deleted_is_read_from_the_archive(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    events = await client.events("one-of-us", is_whole=True)
    assert client.archive is not None
    await client.archive.save(client.store, await client.events("one-of-us"))
    names = client.store.keys("one-of-us")
    await client.store.call_function("deck_begin_deletion", (names.root, names.shard.root), "one-of-us", events[-1].id)
    await client.store.connection.call("DEL", await blob_of(client, "one-of-us"))
    assert await client.events("one-of-us", is_whole=True) == events
    with pytest.raises(IsBeingDeleted):
        await client.restore("one-of-us")
    assert (await retired(client.store, place, tmp_path))["deleted"] == 1
    assert await client.restore("one-of-us")


async def blob_of(client: Client, name: str) -> bytes:
    (found,) = await client.store.connection.call("KEYS", f"deck:*:c:{name}:blob:*")
    return found


async def test_it_comes_back_and_may_leave_again(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us", labels={"team": "ci"})
    events = await client.events("one-of-us", is_whole=True)
    assert await client.restore("one-of-us") is False
    await retired(client.store, place, tmp_path)
    assert [await client.restore("one-of-us") for _ in range(2)] == [True, False]
    assert await client.events("one-of-us", is_whole=True) == events
    row = await client.row("one-of-us")
    assert (row.state, row.labels, row.is_closed, row.title) == (
        "finished",
        {"team": "ci"},
        False,
        "Title of one-of-us",
    )
    await client.send_message("one-of-us", "One more thing.")
    await client.cancel("one-of-us")
    longer = await client.events("one-of-us")
    assert len(longer) == len(events) + 2
    with pytest.raises(UnknownConversation):
        await client.restore("another")


async def test_a_delegate_is_read_and_comes_back_with_nobody(client, place, tmp_path) -> None:
    await begin_ended(client, "parent", delegate_ended("child"))
    await begin_ended(client, "child", parent=Parent(conversation_id="parent", delegate_id=2))
    await retired(client.store, place, tmp_path)
    assert (await client.summary("child")).state == "finished"
    with pytest.raises(UsageError, match="Restore that one"):
        await client.restore("child")
    assert await client.restore("parent")
    await client.delete("parent")
    assert [await client.is_archived(name) for name in ("parent", "child")] == [False, False]


async def test_fork_of_an_archived_conversation_has_events_and_upload(client, place, tmp_path) -> None:
    name = await StoredFiles(client.store).keep("uploads", b"a tar file")
    source = UploadedSource(name="a.tar", format="tar", parcel=name)
    await begin_ended(client, "uploads", workspace={"source": source.model_dump()})
    events = await client.events("uploads", is_whole=True)
    await retired(client.store, place, tmp_path)
    fork = await client.fork("uploads", at=5)
    assert [event.kind for event in await client.events(fork)] == [event.kind for event in events[:5]]
    assert await StoredFiles(client.store).fetch(fork, name) == b"a tar file"
    with pytest.raises(UsageError):
        await client.fork("uploads", at=500)


async def test_deleting_reaches_the_archive(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    await retired(client.store, place, tmp_path)
    await client.delete("one-of-us")
    assert not [*place.rglob("*.zip")]
    with pytest.raises(UnknownConversation):
        await client.delete("one-of-us")


async def test_the_command_line_reads_it_too(client, place, tmp_path, valkey_server) -> None:
    await begin_ended(client, "one-of-us")
    env = {"DECKHANDS_URL": valkey_server.url, "DECKHANDS_HOME": str(tmp_path), "DECKHANDS_ARCHIVE": str(place)}
    verbs = [
        ("show", "one-of-us"),
        ("show", "one-of-us@4"),
        ("logs", "one-of-us"),
        ("logs", "-f", "one-of-us"),
        ("export", "one-of-us"),
    ]

    async def said() -> list[tuple[int, str]]:
        done = [await asyncio.to_thread(deckhands, *verb, env=env) for verb in verbs]
        return [(one.code, one.out) for one in done]

    before = await said()
    await retired(client.store, place, tmp_path)
    assert await said() == before
    refused = await asyncio.to_thread(deckhands, "message", "one-of-us", "Continue.", env=env)
    assert (refused.code, "is archived" in refused.err, "deckhands restore one-of-us" in refused.err) == (2, True, True)
    forked = await asyncio.to_thread(deckhands, "fork", "one-of-us@5", "--json", env=env)
    assert json.loads(forked.out)["forked_from"] == "one-of-us"
    twice = [await asyncio.to_thread(deckhands, "restore", "one-of-us", "--json", env=env) for _ in range(2)]
    assert [json.loads(one.out)["restored"] for one in twice] == [True, False]
    gone = await asyncio.to_thread(deckhands, "rm", "one-of-us", env=env)
    assert (gone.code, [*place.rglob("*.zip")]) == (0, [])
