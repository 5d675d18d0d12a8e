"""A conversation that begins again under the id of a deleted one gets a new workspace and a new journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.workspace_hosts import Terminal, opened
from tool_worker.launch.host_folder import HostFolder
from tool_worker.worker.creations import CREATION, Creations

CID = "again"


async def created(store: Store) -> None:
    await EventLog(store).create(ConversationCreated(conversation_id=CID))


async def created_again(store: Store) -> None:
    await Deletion(store).delete(CID, last_id=1)
    await created(store)
    # Two creations differ by their time, and this test may be faster than a millisecond.
    await store.connection.call("HINCRBY", store.keys(CID).meta, "created_ms", 1)


@pytest.mark.parametrize("is_known", [True, False])
async def test_what_a_deleted_conversation_left_is_not_taken_over(
    memory_store: Store, tmp_path: Path, is_known: bool
) -> None:
    await created(memory_store)
    async with opened(tmp_path) as workspaces:
        creations = Creations(EventLog(memory_store), tmp_path, workspaces)
        await creations.check(CID)
        await Terminal(await workspaces.open(CID))("echo old > file")
        await creations.check(CID)
        assert not (await Terminal(await workspaces.open(CID))("echo new")).content  # its journal answers for action 1
        if not is_known:  # by an earlier version
            (tmp_path / CID / CREATION).unlink()
            HostFolder(tmp_path, CID).mark_deleted(1.0)
        await created_again(memory_store)
        for _ in range(2):
            await creations.check(CID)
            run = Terminal(await workspaces.open(CID))
            assert (await run("cat file || echo empty")).content.endswith("empty")
        await workspaces.close(CID)
    assert len(list(tmp_path.glob(".removed-*/workspace/file"))) == 1


async def test_a_workspace_of_an_earlier_version_is_kept(memory_store: Store, tmp_path: Path) -> None:
    await created(memory_store)
    async with opened(tmp_path) as workspaces:
        await Terminal(await workspaces.open(CID))("echo old > file")
        await Creations(EventLog(memory_store), tmp_path, workspaces).check(CID)
        assert (HostFolder(tmp_path, CID).workspace / "file").exists()
        await workspaces.close(CID)
