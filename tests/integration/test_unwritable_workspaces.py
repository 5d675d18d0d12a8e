"""A directory that an agent may read and not change: the first answer says so, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.workspace_hosts import opened
from tool_worker.worker.executor import Executor
from tool_worker.workspace.named_directories import NamedDirectories

CID = "conversation"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize(
    ("owner", "mode", "is_writable"),
    [(0, 0o755, True), (4711, 0o755, False), (4711, 0o777, True), (4711, 0o775, False), (0, 0o555, False)],
)
async def test_the_first_command_says_that_nothing_can_be_written(
    memory_store: Store, tmp_path: Path, *, sandbox: str, owner: int, mode: int, is_writable: bool
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, owner, owner)
    mine.chmod(mode)
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    is_writable = is_writable or sandbox == "none"  # root may write anywhere
    async with opened(tmp_path / "node", sandbox=sandbox, named=NamedDirectories([mine])) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")

        async def run(command: str) -> CmdOutputObservation:
            await log.append(CID, [CmdRunAction(command=command)])
            action = (await log.read(CID))[-1]
            entry = await log.load_entry(CID, action.id)
            await executor.execute(
                ActionDelivery(CID, action.id, entry, WorkspaceSpec(path=str(mine)), ""), ActionClaimed(1)
            )
            answer = (await log.read(CID))[-1]
            assert isinstance(answer, CmdOutputObservation)
            return answer

        first = await run("touch made && echo made")
        assert (first.content.split("\n")[0] == "made") is is_writable
        told = f"[The programs of this workspace cannot write to {mine}: it belongs to user {owner}, and they run as"
        assert (told in first.content) is not is_writable
        assert (f"`chown -R 0 {mine}`" in first.content) is (not is_writable and owner != 0)
        assert (f"`chmod -R u+rwX {mine}`" in first.content) is (not is_writable and owner == 0)
        assert told not in (await run("echo again")).content
