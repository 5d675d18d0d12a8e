"""A log may name any conversation as its delegate; only one that says so itself goes with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import Parent
from broker.log.event_log import EventLog
from deckhands.client.archive.archive import Archive
from deckhands.client.archive_operations import remove_files
from deckhands.client.client import Client
from deckhands.client.deleting import delete
from tests.archive_parts import begin_ended, delegate_ended, retired
from tests.stores import RealServer, emptied


@pytest.fixture
async def client(valkey_server: RealServer) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        yield client


async def begin_both(client: Client) -> None:
    await begin_ended(client, "victim")
    await begin_ended(client, "own", parent=Parent(conversation_id="imported", delegate_id=2))
    await begin_ended(client, "imported", delegate_ended("victim"), delegate_ended("own"))


async def test_what_is_deleted_takes_no_other_conversation_with_it(client: Client) -> None:
    await begin_both(client)
    await delete(EventLog(client.store), "imported", limit_seconds=0.0)
    assert [row.conversation_id for row in await client.recent()] == ["victim"]


async def test_what_leaves_the_store_takes_no_other_conversation_with_it(client: Client, tmp_path: Path) -> None:
    await begin_both(client)
    await client.send_message("victim", "Continue.")
    place = tmp_path / "archive"
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert [row.conversation_id for row in await client.recent()] == ["victim"]
    assert {path.stem for path in place.rglob("*.zip")} == {"imported", "own"}


async def test_what_is_forgotten_takes_no_other_file_with_it(client: Client, tmp_path: Path) -> None:
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
    assert {row.conversation_id for row in await client.recent()} == {"origin", "own"}


@pytest.mark.parametrize("name", ["../../victim", "", "a\x00b", "{0}:c:victim", "x" * 100])
async def test_a_name_that_is_none_keeps_nothing_from_its_end(client: Client, tmp_path: Path, name: str) -> None:
    place = tmp_path / "archive"
    for conversation_id in ("one", "other"):
        await begin_ended(client, conversation_id, delegate_ended(name))
    await delete(EventLog(client.store), "one", limit_seconds=0.0)
    assert await retired(client.store, place, tmp_path) == {"archived": 1, "deleted": 0, "kept": 0, "failed": 0}
    assert await remove_files(Archive(str(place)), "other")
    assert not [*place.rglob("*.zip")]
