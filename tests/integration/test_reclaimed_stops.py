"""Actions of dead workers whose conversation was stopped before the next worker came to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, Observation, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.test_executor import delivery_of
from tests.integration.workspace_hosts import opened
from tests.polling import until
from tool_worker.host.protocol import RUNNING
from tool_worker.worker.executor import Executor

CID = "conversation"
RECLAIMED = ActionReclaimed(2, "tool-0")


async def begun(store: Store, command: str) -> EventLog:
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID))
    await log.append(CID, [CmdRunAction(command=command)])
    return log


async def stop(log: EventLog) -> None:
    """Answer the action, as a controller does that stops its conversation; the order to stop found no worker."""
    await log.append_observation(CID, ErrorObservation(content="stopped", cause=2), worker_id="controller")


async def answers(log: EventLog) -> list[str]:
    return [event.kind for event in await log.read(CID) if isinstance(event, Observation)]


async def test_what_no_worker_has_begun_is_not_begun(memory_store: Store, tmp_path: Path) -> None:
    log = await begun(memory_store, "touch effect")
    delivery = await delivery_of(log, 2)
    await stop(log)
    async with opened(tmp_path) as workspaces, asyncio.timeout(60):
        await Executor(log, workspaces, worker_id="tool-1").execute(delivery, RECLAIMED)
    assert await answers(log) == [ErrorObservation.model_fields["kind"].default]
    assert not (tmp_path / CID / "workspace" / "effect").exists()


async def test_action_still_running_for_a_dead_worker_is_ended(memory_store: Store, tmp_path: Path) -> None:
    log = await begun(memory_store, "touch begun; sleep 1000; touch effect")
    workspace = tmp_path / CID / "workspace"
    async with opened(tmp_path) as workspaces, asyncio.timeout(20):
        dead = asyncio.create_task(
            Executor(log, workspaces, worker_id="tool-0").execute(await delivery_of(log, 2), ActionClaimed(1))
        )
        await until((workspace / "begun").exists)
        dead.cancel()
        await asyncio.gather(dead, return_exceptions=True)
        await stop(log)
        await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), RECLAIMED)
        host = await workspaces.open(CID, WorkspaceSpec())

        async def has_ended() -> bool:
            return (await host.status(2)).state != RUNNING

        await until(has_ended, what="the end of the command")
    assert await answers(log) == [ErrorObservation.model_fields["kind"].default]
    assert not (workspace / "effect").exists()


async def test_what_was_not_stopped_continues(memory_store: Store, tmp_path: Path) -> None:
    log = await begun(memory_store, "touch effect")
    async with opened(tmp_path) as workspaces, asyncio.timeout(60):
        await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), RECLAIMED)
    assert await answers(log) == [CmdOutputObservation.model_fields["kind"].default]
    assert (tmp_path / CID / "workspace" / "effect").exists()
