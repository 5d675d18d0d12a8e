"""Checkpoints of encrypted conversations: pieces of a tenant, readable with its key alone, removed without it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.runtime.settings import BrokerSettings
from broker.store.encryption import MasterKeys
from broker.store.store import Store, open_store
from deckhands.operations.jobs.cleanup import remove_checkpoints
from deckhands.operations.jobs.job import JobServices
from tests.stores import RealServer, emptied
from tool_worker.errors import CheckpointCorrupt, CheckpointsUnavailable
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles, StoreCiphers
from tool_worker.workspace.checkpoints.removal import CheckpointRemoval

KEYS = f"one:{base64.b64encode(bytes(range(32))).decode()}"
TEXT = b"plain-marker-4711\n" * 100
NAME = "a-file-with-a-name-of-its-own"


@pytest.fixture
async def keyed(valkey_server: RealServer) -> AsyncIterator[Store]:
    store = await open_store(await emptied(valkey_server.url), masters=MasterKeys(KEYS))
    for name, tenant in (("first", "acme"), ("second", "acme"), ("fork", "shop")):
        await EventLog(store).create(ConversationCreated(conversation_id=name, tenancy=Tenancy(tenant=tenant)), key="k")
    yield store
    await store.aclose()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / NAME).write_bytes(TEXT)
    return folder


def stored_bytes(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


async def test_checkpoints_are_restored_with_the_key_alone(
    keyed: Store, workspace: Path, tmp_path: Path, valkey_server: RealServer
) -> None:
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(keyed.encryption))
    await asyncio.to_thread(checkpoints.save, "first", workspace, SavedFiles(), event=3)
    before = stored_bytes(place)
    await asyncio.to_thread(checkpoints.save, "second", workspace, SavedFiles(), event=3)
    assert {name for name in stored_bytes(place).keys() - before.keys() if name.startswith("objects")} == set()
    for content in stored_bytes(place).values():
        assert NAME.encode() not in content
        assert b"plain-marker" not in content
    restored = tmp_path / "restored" / "workspace"
    found = await asyncio.to_thread(checkpoints.restore, "first", restored)
    assert (found.event, (restored / NAME).read_bytes()) == (3, TEXT)
    plain = Checkpoints(f"file://{place}", SystemClock())
    with pytest.raises(CheckpointsUnavailable, match="DECKHANDS_MASTER_KEYS_FILE"):
        plain.restore("first", tmp_path / "other" / "workspace")
    await keyed.encryption.delete_key("acme")
    another = await open_store(valkey_server.url, masters=MasterKeys(KEYS))
    locked = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(another.encryption))
    with pytest.raises(CheckpointsUnavailable, match="was deleted"):
        await asyncio.to_thread(locked.restore, "second", tmp_path / "other" / "workspace")
    await another.aclose()


async def test_fork_for_another_tenant_outlives_the_key_of_its_source(
    keyed: Store, workspace: Path, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(keyed.encryption))
    await asyncio.to_thread(checkpoints.save, "first", workspace, SavedFiles(), event=3)
    assert await asyncio.to_thread(checkpoints.copy, "first", "fork", at=3)
    await keyed.encryption.delete_key("acme")
    restored = tmp_path / "restored" / "workspace"
    found = await asyncio.to_thread(checkpoints.restore, "fork", restored)
    assert (found.source, (restored / NAME).read_bytes()) == ("first", TEXT)


async def test_unused_pieces_are_removed_without_a_key(keyed: Store, workspace: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(keyed.encryption))
    await asyncio.to_thread(checkpoints.save, "first", workspace, SavedFiles(), event=3)
    (workspace / NAME).write_bytes(TEXT * 2)
    await asyncio.to_thread(checkpoints.save, "fork", workspace, SavedFiles(), event=3)
    removal = CheckpointRemoval(f"file://{place}", SystemClock())
    assert removal.drop_unused() == 0
    removal.forget_all("first")
    assert removal.drop_unused() == 1
    await asyncio.to_thread(checkpoints.restore, "fork", tmp_path / "restored" / "workspace")


async def test_exchanged_pieces_are_refused(keyed: Store, workspace: Path, tmp_path: Path) -> None:
    (workspace / "another").write_bytes(b"another text")
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(keyed.encryption))
    await asyncio.to_thread(checkpoints.save, "first", workspace, SavedFiles(), event=3)
    one, two = sorted(path for path in (place / "objects").rglob("*") if path.is_file())
    one.write_bytes(two.read_bytes())
    with pytest.raises(CheckpointCorrupt):
        await asyncio.to_thread(checkpoints.restore, "first", tmp_path / "restored" / "workspace")


async def test_exchanged_manifests_are_refused(keyed: Store, workspace: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(f"file://{place}", SystemClock(), ciphers=StoreCiphers(keyed.encryption))
    await asyncio.to_thread(checkpoints.save, "first", workspace, SavedFiles(), event=3)
    await asyncio.to_thread(checkpoints.save, "second", workspace, SavedFiles(), event=4)
    manifests = place / "checkpoints"
    (manifests / "second").write_bytes((manifests / "first").read_bytes())
    with pytest.raises(CheckpointCorrupt):
        await asyncio.to_thread(checkpoints.restore, "second", tmp_path / "restored" / "workspace")
    assert await asyncio.to_thread(checkpoints.copy, "first", "second", at=3)
    await asyncio.to_thread(checkpoints.restore, "second", tmp_path / "restored" / "workspace")


async def test_tenant_without_key_keeps_no_checkpoints_of_others(keyed: Store, workspace: Path, tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'checkpoints'}"
    checkpoints = Checkpoints(place, SystemClock())
    for name in ("gone", "second"):
        await asyncio.to_thread(checkpoints.save, name, workspace, SavedFiles(), event=3)
    await keyed.encryption.delete_key("shop")
    settings = BrokerSettings(archive=str(tmp_path / "archive"), checkpoints=place)
    assert await remove_checkpoints(JobServices(keyed, settings)) == {"forgotten": 1, "dropped": 0}
    assert not checkpoints.has("gone")
    assert checkpoints.has("second")
