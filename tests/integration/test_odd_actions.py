"""Actions of a tool worker in odd cases: stopped before, traced, or in a read-only directory."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from broker.contract import codec
from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, Observation, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionReclaimed
from broker.log.event_log import EventLog
from broker.runtime.tracing import RecordedSpan, Tracing
from broker.store.store import Store
from tests.integration.test_executor import delivery_of
from tests.integration.workspace_hosts import opened
from tests.polling import until
from tool_worker.host.protocol import RUNNING
from tool_worker.worker.executor import Executor
from tool_worker.workspace.named_directories import NamedDirectories

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


@contextmanager
def calls_of(function: Any) -> Iterator[list[str]]:
    """Return the callers of a function meanwhile."""
    found: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is function.__code__ and frame.f_back is not None:
            found.append(frame.f_back.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)


async def test_an_action_is_decoded_once_with_traces_and_without(memory_store: Store, tmp_path: Path) -> None:
    spans: list[RecordedSpan] = []
    log = EventLog(memory_store)
    async with opened(tmp_path) as workspaces:
        for number, tracing in enumerate((Tracing(), Tracing(spans.append))):
            name = f"conversation-{number}"
            await log.create(ConversationCreated(conversation_id=name))
            await log.append(name, [CmdRunAction(command="echo hi")])
            delivery = ActionDelivery(name, 2, await log.load_entry(name, 2), WorkspaceSpec(), "")
            executor = Executor(log, workspaces, worker_id="tool-1", spans=tracing)
            with calls_of(codec.decode) as decoded:
                await executor.execute(delivery, ActionClaimed(1))
            assert decoded == ["event"], name
    assert [span.name for span in spans] == ["execute_tool action.run", "action"]


async def test_an_action_that_cannot_be_read_is_answered_and_traced(memory_store: Store, tmp_path: Path) -> None:
    spans: list[RecordedSpan] = []
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="damaged"))
    damaged = ActionDelivery("damaged", 7, b"\x01\x00half an entry", WorkspaceSpec(), "")
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1", spans=Tracing(spans.append))
        await executor.execute(damaged, ActionClaimed(1))
    answer = (await log.read("damaged"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert answer.error_id == "corrupt_entry"
    assert [span.name for span in spans] == ["action"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize(
    ("sandbox", "owner", "mode", "is_writable"),
    [
        *(("bwrap", 0, 0o755, True), ("bwrap", 4711, 0o755, False), ("bwrap", 4711, 0o777, True)),
        *(("bwrap", 4711, 0o775, False), ("bwrap", 0, 0o555, False)),
        *(("none", 4711, 0o755, True), ("none", 0, 0o555, True)),  # root may write anywhere
    ],
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
    async with opened(tmp_path / "node", sandbox=sandbox, named=NamedDirectories([mine])) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")

        async def run(command: str) -> CmdOutputObservation:
            await log.append(CID, [CmdRunAction(command=command)])
            action = (await log.read(CID))[-1]
            entry = await log.load_entry(CID, action.id)
            delivery = ActionDelivery(CID, action.id, entry, WorkspaceSpec(path=str(mine)), "")
            await executor.execute(delivery, ActionClaimed(1))
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
