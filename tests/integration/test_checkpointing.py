"""Workspaces on a node that does not have them: restored or said to be lost, and never silently an empty directory."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, Event, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionReclaimed, ControlDelivery
from broker.coordination.transfers import TransferFailed, Transfers
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.store.store import Store
from deckhands.client.forking import build_fork
from deckhands.client.transfers.files import WorkspaceFiles
from tests.integration.workspace_hosts import opened
from tests.polling import until
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.worker.executor import Executor
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles
from tool_worker.workspace.checkpoints.checkpointing import LOST, Checkpointing
from tool_worker.workspace.checkpoints.removal import CheckpointRemoval
from tool_worker.workspace.named_directories import NamedDirectories

CID = "conversation"
OWN = "The files of this workspace were restored from the last checkpoint, which was saved after event "


class Node:
    """A node with a tool worker on it."""

    def __init__(self, log: EventLog, executor: Executor, checkpointing: Checkpointing) -> None:
        self.log, self.executor, self.checkpointing = log, executor, checkpointing

    async def run(
        self, command: str, *, spec: WorkspaceSpec | None = None, conversation_id: str = CID, moves: int = 0
    ) -> Event:
        await self.log.append(conversation_id, [CmdRunAction(command=command)])
        action = (await self.log.read(conversation_id))[-1]
        entry = await self.log.load_entry(conversation_id, action.id)
        delivery = ActionDelivery(conversation_id, action.id, entry, spec or WorkspaceSpec(), "")
        await self.executor.execute(delivery, ActionClaimed(1, moves))
        return (await self.log.read(conversation_id))[-1]


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


@asynccontextmanager
async def node(log: EventLog, root: Path, place: Path | None, *, every: int = 2) -> AsyncIterator[Node]:
    checkpoints = Checkpoints(f"file://{place}", SystemClock()) if place is not None else None
    checkpointing = Checkpointing(log, root, checkpoints, every=every)
    async with opened(root, sandbox="bwrap", named=NamedDirectories([root.parent / "project"])) as workspaces:
        yield Node(log, Executor(log, workspaces, worker_id="tool-1", checkpointing=checkpointing), checkpointing)


def content(event: Event) -> str:
    assert isinstance(event, CmdOutputObservation)
    return event.content


async def test_another_node_goes_on_from_the_last_checkpoint(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place") as one:
        assert content(await one.run("echo first > file")) == ""
        await one.run("echo second >> file")
        await one.run("echo third >> file")
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        told = await two.run("cat file; touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.content.startswith(OWN), told.error_id) == (True, "workspace_lost")
        assert content(await two.run("cat file; ls")) == "first\nsecond\nfile"


async def test_returning_lost_node_does_not_continue_with_older_files(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file; touch ~/old /tmp/old")
        async with node(log, tmp_path / "two", tmp_path / "place", every=1) as two:
            assert ((await two.run("true", moves=1)).content).startswith(OWN)
            await two.run("echo second >> file", moves=1)
        told = await one.run("cat file", moves=2)
        assert (told.content or "").startswith(OWN)
        assert content(await one.run("cat file; find ~ /tmp -maxdepth 1 -name old", moves=2)) == "first\nsecond"


async def test_while_the_place_cannot_be_reached_nothing_is_given_up(log: EventLog, tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=1) as one:
        await one.run("echo first > file")
    manifests = place / "checkpoints"
    away = manifests.rename(tmp_path / "away")
    manifests.symlink_to(manifests)  # following it fails with ELOOP
    async with node(log, tmp_path / "two", place, every=1) as two:
        told = await two.run("touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.error_id, "The action was not run" in told.content) == ("checkpoints_unavailable", True)
        manifests.unlink()
        away.rename(manifests)
        assert ((await two.run("true")).content or "").startswith(OWN)
        assert content(await two.run("cat file; ls")) == "first\nfile"


async def test_a_fork_by_the_client_finds_its_source(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file")
        events = await log.read(CID)
        await log.create_from(build_fork(events, "fork"), events[1:], key="fork")
        told = await one.run("ls", conversation_id="fork")
        assert "conversation that this one was forked from, as they were after event " in told.content
        assert content(await one.run("cat file", conversation_id="fork")) == "first"


async def test_fork_gets_the_files_of_its_event_with_notice(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        for number in range(1, 4):
            await one.run(f"echo {number} > file")
        events = await log.read(CID)
        assert len(events) == 7
        for at, saved, file in ((5, 5, "2"), (6, 5, "2"), (7, 7, "3")):
            await log.create_from(build_fork(events[:at], f"fork-{at}"), events[1:at], key=f"fork-{at}")
            told = await one.run("ls", conversation_id=f"fork-{at}")
            assert f"as they were after event {saved}; the fork is at event {at}. Later changes" in told.content
            assert content(await one.run("cat file", conversation_id=f"fork-{at}")) == file
        await log.create_from(build_fork(events[:2], "fork-2"), events[1:2], key="fork-2")
        told = await one.run("ls", conversation_id="fork-2")
        assert "after event 3. That is later than the fork at event 2: they contain changes" in told.content
        assert content(await one.run("cat file", conversation_id="fork-2")) == "1"


async def test_only_some_checkpoints_are_kept(log: EventLog, tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/place", SystemClock())
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    for event in range(1, 31):
        (workspace / "file").write_text(str(event))
        checkpoints.save(CID, workspace, SavedFiles(), event=event)
    for at, event in ((30, 30), (25, 25), (5, 1), (1, 1)):
        assert checkpoints.copy(CID, f"fork-{at}", at=at)
        assert checkpoints.restore(f"fork-{at}", tmp_path / f"fork-{at}").event == event
        assert (tmp_path / f"fork-{at}" / "file").read_text() == str(event)
    assert len(list((tmp_path / "place" / "history" / CID).iterdir())) == 10
    assert CheckpointRemoval(f"file://{tmp_path}/place", SystemClock()).drop_unused() == 20
    checkpoints.forget(CID)
    assert not checkpoints.has(CID)
    assert list((tmp_path / "place" / "history" / CID).iterdir()) == []


async def test_what_nobody_saved_is_said_to_be_lost(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", None) as one:
        await one.run("echo first > file")
    async with node(log, tmp_path / "two", None) as two:
        told = await two.run("touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.content, told.error_id) == (LOST, "workspace_lost")
        assert content(await two.run("ls")) == ""
    async with node(log, tmp_path / "one", None) as one:
        assert content(await one.run("cat file")) == "first"


async def test_closing_saves_what_changed(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=100) as one:
        await one.run("echo only > file")
        await one.executor.execute_control(ControlDelivery(CID, 0, "close", ""))
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        await two.run("true")
        assert content(await two.run("cat file")) == "only"


async def test_closing_saves_what_another_worker_of_the_node_has_changed(log: EventLog, tmp_path: Path) -> None:
    place, close = tmp_path / "place", ControlDelivery(CID, 0, "close", "")
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo first > file")
        await one.executor.execute_control(close)
        async with node(log, tmp_path / "one", place, every=100) as other:
            await other.run("echo second >> file")
            await one.executor.execute_control(close)
            await other.run("echo third >> file")
        async with node(log, tmp_path / "one", place, every=100) as next_one:
            await next_one.executor.execute_control(close)
    async with node(log, tmp_path / "two", place) as two:
        await two.run("true")
        assert content(await two.run("cat file | xargs")) == "first second third"


async def test_workers_of_one_node_save_a_workspace_in_turn(log: EventLog, tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo first > file")
        with (tmp_path / "one" / CID / "saving.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # as another worker does that saves it
            saving = asyncio.create_task(one.checkpointing.save(CID))
            await one.run("echo second >> file")
            assert not saving.done()
        await saving
    Checkpoints(f"file://{place}", SystemClock()).restore(CID, tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_text() == "first\nsecond\n"


async def test_closing_a_returned_lost_node_saves_no_older_files(
    log: EventLog, memory_store: Store, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo older > file")
        await one.checkpointing.save(CID)
        await one.run("echo lost >> file")
        await memory_store.connection.call("HINCRBY", memory_store.keys(CID).meta, "moves", 1)
        async with node(log, tmp_path / "two", place, every=1) as two:
            await two.run("true", moves=1)
            await two.run("echo newer > file", moves=1)
            await one.executor.execute_control(ControlDelivery(CID, 0, "close", ""))
    Checkpoints(f"file://{place}", SystemClock()).restore(CID, tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_text() == "newer\n"


async def test_whoever_takes_over_after_a_crash_says_the_same(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file")
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        await log.append(CID, [CmdRunAction(command="touch effect")])
        action = (await log.read(CID))[-1]
        assert (await two.checkpointing.recover(CID, action.id) or "").startswith(OWN)  # and then it dies
        delivery = ActionDelivery(CID, action.id, await log.load_entry(CID, action.id), WorkspaceSpec(), "")
        await two.executor.execute(delivery, ActionReclaimed(2, "tool-1"))
        assert ((await log.read(CID))[-1].content or "").startswith(OWN)
        assert content(await two.run("ls")) == "file"


async def test_a_fork_begins_with_the_files_of_its_source(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file")
        last = await log.load_last_id(CID)
        await log.fork(CID, ConversationCreated(conversation_id="fork", forked_from=CID), at=last)
        told = await one.run("ls", conversation_id="fork")
        assert "of the conversation that this one was forked from. It does not say when it was saved" in told.content
        assert content(await one.run("cat file; echo more >> file", conversation_id="fork")) == "first"
        assert content(await one.run("cat file")) == "first"


async def test_a_directory_of_the_user_is_not_copied(log: EventLog, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo mine > file", spec=WorkspaceSpec(path=str(project)))
        await one.executor.execute_control(ControlDelivery(CID, 0, "close", ""))
    assert (project / "file").read_text() == "mine\n"
    assert not (tmp_path / "place").exists()


async def test_a_place_that_does_not_work_fails_no_action(
    log: EventLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").write_text("not a directory")
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        assert content(await one.run("echo fine")) == "fine"
        assert content(await one.run("echo still")) == "still"
    assert f"cannot save the workspace of {CID}" in caplog.text


async def test_a_workspace_is_saved_when_somebody_asks_for_it(valkey_store: Store, tmp_path: Path) -> None:
    log = EventLog(valkey_store)
    await log.create(ConversationCreated(conversation_id=CID))
    names, call = valkey_store.keys(CID), valkey_store.connection.call
    await call("HSET", names.meta, "node", "one")

    async def asked(checkpointing: Checkpointing, root: Path) -> tuple[int, int]:
        async def nothing() -> Sandbox:
            raise AssertionError("no sandbox is needed")

        asking = asyncio.create_task(WorkspaceFiles(valkey_store).checkpoint(CID))
        stream = names.shard.actions("node:one")
        await until(lambda: call("XLEN", stream))
        [(entry, fields)] = await call("XRANGE", stream, "-", "+")
        transfer_service = TransferService(
            Transfers(valkey_store), root, checkpointing, nothing, Bindings(root, NamedDirectories())
        )
        await transfer_service.transfer(CID, fields[-1].decode())
        await call("XDEL", stream, entry)
        return await asking

    async with node(log, tmp_path / "one", tmp_path / "place", every=100) as one:
        await one.run("echo first > file; mkdir folder")
        assert not one.checkpointing._checkpoints.has(CID)  # type: ignore[union-attr]
        assert await asked(one.checkpointing, tmp_path / "one") == (2, 6)
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        await two.run("true")
        assert content(await two.run("cat file")) == "first"
    async with node(log, tmp_path / "three", None) as three:
        await three.run("true")
        with pytest.raises(TransferFailed, match="saves no checkpoints") as raised:
            await asked(three.checkpointing, tmp_path / "three")
        assert "DECKHANDS_CHECKPOINTS" in (raised.value.remedy or "")
