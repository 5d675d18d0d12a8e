"""Conversations that an evaluation waits for: in the store, in the archive, or nowhere any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.evaluation.attempts.watch import Lost, Seen, Watch
from tests.archive_parts import begin_ended, retired


@pytest.fixture
def client(valkey_store: Store, tmp_path: Path) -> Client:
    return Client(valkey_store, str(tmp_path / "archive"))


@pytest.fixture
async def watch(client: Client) -> AsyncIterator[Watch]:
    watch = Watch(client)
    running = asyncio.create_task(watch.run())
    yield watch
    running.cancel()


async def test_a_conversation_that_has_gone_to_the_archive_has_settled(
    client: Client, watch: Watch, tmp_path: Path
) -> None:
    seen = Seen()
    await begin_ended(client, "here")
    here = await asyncio.wait_for(watch.settled("here", seen), 30)
    assert (here.summary.state, seen.state, seen.last_id) == ("finished", "finished", len(here.events))
    assert await retired(client.store, tmp_path / "archive", tmp_path)
    gone = await asyncio.wait_for(watch.settled("here", Seen()), 30)
    assert gone.summary == here.summary


async def test_a_conversation_that_is_nowhere_is_lost(watch: Watch) -> None:
    with pytest.raises(Lost, match="nowhere"):
        await asyncio.wait_for(watch.settled("nowhere", Seen()), 30)
