"""The executor, with a real store: whatever is wrong with an action, it gets an observation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from broker.contract.actions import CmdRunAction, ToolCallAction
from broker.contract.events import (
    Action,
    ConfirmationStatus,
    ConversationCreated,
    Observation,
    ToolCallMetadata,
    WorkspaceSpec,
)
from broker.contract.file_events import (
    FileEditAction,
    FileReadAction,
    FileReadObservation,
    FileWriteAction,
    FileWriteObservation,
)
from broker.contract.observations import (
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    EventsLostObservation,
    OutcomeUnknownObservation,
    SurveyObservation,
)
from broker.contract.workspace_events import SurveyAction
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionReclaimed, ControlDelivery
from broker.log.event_log import EventLog
from broker.secrets.secrets import Secrets
from broker.store.store import Store
from broker.tools.custom_tools import custom_tool
from tests.broker_parts import no_key
from tests.integration.workspace_hosts import opened
from tests.polling import until
from tool_worker.tools.offered import OfferedTools
from tool_worker.worker.executor import Executor
from tool_worker.worker.steps.action_run import compute_fingerprint
from tool_worker.worker.steps.stop_orders import ANSWER_CHECK_SECONDS
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces


async def test_an_action_that_cannot_be_read_is_answered(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="damaged"))
    executor = Executor(log, Workspaces(tmp_path, sandbox="none"), worker_id="tool-1")
    delivery = ActionDelivery("damaged", 7, b"\x01\x00half an entry", WorkspaceSpec(), "")
    await executor.execute(delivery, ActionClaimed(1))
    answer = (await log.read("damaged"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (7, "corrupt_entry")


async def test_result_that_cannot_be_masked_is_an_explicit_error(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo hidden")])
    await Secrets(memory_store, lambda: bytes(32)).put("conversation", "TOKEN", "c4n4ry-hidden")
    locked = EventLog(memory_store, Secrets(memory_store, no_key))
    async with opened(tmp_path) as workspaces:
        executor = Executor(locked, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionClaimed(1))
    answer = (await log.read("conversation"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (2, "secrets_locked")
    assert "no key for them" in answer.content


async def test_result_without_a_secrets_key_is_not_logged(memory_store: Store, tmp_path: Path) -> None:
    (tmp_path / "conversation" / "workspace").mkdir(parents=True)
    (tmp_path / "conversation" / "workspace" / "a.txt").write_text("c4n4ry-hidden\n")
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [FileReadAction(path="a.txt")])
    await Secrets(memory_store, lambda: bytes(32)).put("conversation", "TOKEN", "c4n4ry-hidden")
    locked = EventLog(memory_store, Secrets(memory_store, no_key))
    async with opened(tmp_path) as workspaces:
        await Executor(locked, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), ActionClaimed(1))
    answer = (await log.read("conversation"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (2, "secrets_locked")
    assert "c4n4ry" not in answer.content


@pytest.mark.parametrize(("claim", "is_known"), [(ActionReclaimed(2, "tool-0"), False), (ActionClaimed(1), True)])
async def test_after_reboot_possibly_run_actions_are_not_repeated(
    memory_store: Store, tmp_path: Path, claim: ActionClaimed | ActionReclaimed, is_known: bool
) -> None:
    journal_of_an_earlier_boot(tmp_path)
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects")])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), claim)
    observation = (await log.read("conversation"))[-1]
    effects = tmp_path / "conversation" / "workspace" / "effects"
    if is_known:
        assert isinstance(observation, CmdOutputObservation)
        assert effects.read_text() == "effect\n"
    else:
        assert isinstance(observation, OutcomeUnknownObservation)
        assert observation.content == (
            "The machine was restarted after this action was assigned, and the record of what ran may be incomplete. "
            "The action may have taken effect, wholly or in part. Check before you repeat it."
        )
        assert not effects.exists()


async def test_after_a_reboot_what_may_be_repeated_is_repeated(memory_store: Store, tmp_path: Path) -> None:
    journal_of_an_earlier_boot(tmp_path)
    (tmp_path / "conversation" / "workspace").mkdir()
    (tmp_path / "conversation" / "workspace" / "a.txt").write_text("text\n")
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [FileReadAction(path="a.txt")])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionReclaimed(2, "tool-0"))
    observation = (await log.read("conversation"))[-1]
    assert observation.kind == "observation.read"


async def test_result_too_large_for_the_log_is_an_error(memory_store: Store, tmp_path: Path) -> None:
    def count_atoms() -> Observation:
        """Count the atoms of the universe."""
        return CmdOutputObservation(content="many", command="count", metadata=CmdOutputMetadata(exit_code=10**80))

    metadata = ToolCallMetadata(function_name="count_atoms", tool_call_id="c1", reply_id=1, total_calls_in_response=1)
    action = ToolCallAction(name="count_atoms", tool_call_metadata=metadata)
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [action])
    offered = OfferedTools([custom_tool(count_atoms)])
    executor = Executor(log, Workspaces(tmp_path, sandbox="none"), worker_id="tool-1", offered=offered)
    await executor.execute(await delivery_of(log, 2), ActionClaimed(1))
    answer = (await log.read("conversation"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id, answer.tool_call_metadata) == (2, "event_unfit", metadata)


@pytest.mark.parametrize("status", [ConfirmationStatus.AWAITING_CONFIRMATION, ConfirmationStatus.REJECTED])
async def test_an_action_that_nobody_has_confirmed_is_not_run(
    memory_store: Store, tmp_path: Path, status: ConfirmationStatus
) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects", confirmation_state=status)])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionClaimed(1))
    observation = (await log.read("conversation"))[-1]
    assert isinstance(observation, ErrorObservation)
    assert (observation.cause, observation.error_id) == (2, "not_confirmed")
    assert not (tmp_path / "conversation").exists()


async def test_command_answered_before_start_does_not_run(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="sleep 1000; touch effect")])
    delivery = await delivery_of(log, 2)
    stopped = ErrorObservation(content="stopped", cause=2)
    await log.append_observation("conversation", stopped, worker_id="controller")
    async with opened(tmp_path) as workspaces, asyncio.timeout(60):
        await Executor(log, workspaces, worker_id="tool-1").execute(delivery, ActionClaimed(1))
    assert [event.kind for event in await log.read("conversation")][1:] == ["action.run", "observation.error"]
    assert not (tmp_path / "conversation" / "workspace" / "effect").exists()


@pytest.mark.parametrize(("order", "action_id"), [("cancel", 2), ("close", 0)])
async def test_command_stopped_while_its_workspace_opens_does_not_run(
    memory_store: Store, tmp_path: Path, order: Literal["cancel", "close"], action_id: int
) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="touch effect")])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        running = asyncio.create_task(executor.execute(await delivery_of(log, 2), ActionClaimed(1)))
        async with asyncio.timeout(60):
            while not (tmp_path / "conversation").exists():
                await asyncio.sleep(0)  # its shell is there some milliseconds later
        await executor.execute_control(ControlDelivery("conversation", action_id, order, ""))
        await running
    observation = (await log.read("conversation"))[-1]
    assert isinstance(observation, ErrorObservation)
    assert (observation.cause, observation.error_id) == (2, "cancelled")
    assert not (tmp_path / "conversation" / "workspace" / "effect").exists()


async def test_order_about_another_action_stops_no_starting_action(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    slow = f"sleep {ANSWER_CHECK_SECONDS + 0.3}; touch effect"  # it is looked after, too
    await log.append("conversation", [CmdRunAction(command=slow)])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        running = asyncio.create_task(executor.execute(await delivery_of(log, 2), ActionClaimed(1)))
        await until((tmp_path / "conversation").exists)
        await executor.execute_control(ControlDelivery("another-one", 2, "cancel", ""))
        await executor.execute_control(ControlDelivery("another-one", 0, "close", ""))
        await executor.execute_control(ControlDelivery("conversation", 3, "cancel", ""))
        await running
    assert isinstance((await log.read("conversation"))[-1], CmdOutputObservation)
    assert (tmp_path / "conversation" / "workspace" / "effect").exists()


@pytest.mark.parametrize(("sandbox", "is_said"), [("none", True), ("bwrap", None)])
async def test_what_ran_without_a_sandbox_says_so(
    memory_store: Store, tmp_path: Path, sandbox: str, is_said: bool | None
) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    async with opened(tmp_path, sandbox=sandbox) as workspaces:
        events = Events(log, Executor(log, workspaces, worker_id="tool-1"))
        for action in (CmdRunAction(command="true"), FileWriteAction(path="a", content="a"), FileReadAction(path="b")):
            assert (await events.observed(action)).unsandboxed is is_said
        await events.observed(FileWriteAction(path=".openhands/setup.sh", content="exit 1"))
        survey = await events.observed(SurveyAction())
        assert isinstance(survey, SurveyObservation)
        assert survey.scripts == (() if is_said else (".openhands/setup.sh",))
        stopped = CmdRunAction(command="true", confirmation_state=ConfirmationStatus.REJECTED)
        assert (await events.observed(stopped)).unsandboxed is None


def journal_of_an_earlier_boot(root: Path) -> None:
    folder = HostFolder(root, "conversation")
    folder.create()
    folder.journal.write_text("boot 11111111-2222-3333-4444-555555555555\n")


async def delivery_of(log: EventLog, action_id: int) -> ActionDelivery:
    return ActionDelivery(
        "conversation", action_id, await log.load_entry("conversation", action_id), WorkspaceSpec(), ""
    )


async def test_a_picture_that_is_viewed_is_in_the_observation(memory_store: Store, tmp_path: Path) -> None:
    (tmp_path / "conversation" / "workspace").mkdir(parents=True)
    (tmp_path / "conversation" / "workspace" / "a.gif").write_bytes(b"GIF89a" + bytes(100_000))
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [FileReadAction(path="/workspace/a.gif")])
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionClaimed(1))
    seen = await log.blobs.restore_event("conversation", (await log.read("conversation"))[-1])
    assert isinstance(seen, FileReadObservation)
    assert seen.image_urls is not None
    assert seen.image_urls[0].startswith("data:image/gif;base64,R0lGODlhAAAA")
    assert len(seen.image_urls[0]) > 130_000


async def test_lost_actions_result_answers_no_action_with_its_number(memory_store: Store, tmp_path: Path) -> None:
    """The journal knows action 2 as another command than the log does."""
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects; echo new")])
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open("conversation")
        lost = CmdRunAction(command="echo old")
        await host.run(2, "bash", {"command": lost.command}, fingerprint=compute_fingerprint(lost))
        await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), ActionClaimed(1))
    gap, answer = (await log.read("conversation"))[2:]
    assert isinstance(gap, EventsLostObservation)
    assert "event 2 was a different event before" in gap.content
    assert isinstance(answer, OutcomeUnknownObservation)
    assert answer.cause == 2
    assert "was not run" in answer.content
    assert not (tmp_path / "conversation" / "workspace" / "effects").exists()


async def test_reused_number_is_noticed_despite_a_shorter_journal(memory_store: Store, tmp_path: Path) -> None:
    log, known = EventLog(memory_store), CmdRunAction(command="true")
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects"), known])
    async with opened(tmp_path) as workspaces:
        host, lost = await workspaces.open("conversation"), CmdRunAction(command="echo old")
        for number, action in ((2, lost), (3, known)):
            await host.run(number, "bash", {"command": action.command}, fingerprint=compute_fingerprint(action))
        await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), ActionClaimed(1))
    gap, answer = (await log.read("conversation"))[3:]
    assert isinstance(gap, EventsLostObservation)
    assert "event 2 was a different event before" in gap.content
    assert isinstance(answer, OutcomeUnknownObservation)
    assert not (tmp_path / "conversation" / "workspace" / "effects").exists()


async def test_result_of_an_action_lost_meanwhile_answers_no_other(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo lost")])
    delivery = await delivery_of(log, 2)
    await memory_store.connection.call("DEL", memory_store.keys("conversation").events)
    await memory_store.connection.call("DEL", memory_store.keys("conversation").meta)
    await memory_store.connection.call("DEL", memory_store.keys("conversation").once)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo other")])
    async with opened(tmp_path) as workspaces:
        await Executor(log, workspaces, worker_id="tool-1").execute(delivery, ActionClaimed(1))
    kinds = [event.kind for event in await log.read("conversation")]
    assert kinds == ["conversation.created", "action.run", "observation.events_lost"]


async def test_action_decided_before_a_named_gap_does_not_start(memory_store: Store, tmp_path: Path) -> None:
    """The journal goes further than the log: what it holds beyond may be in the workspace."""
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects")])
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open("conversation")
        await host.run(9, "bash", {"command": "echo lost >> effects"}, fingerprint="0123456789abcdef")
        executor = Executor(log, workspaces, worker_id="tool-1")
        await workspaces.aclose()
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionClaimed(1))
        gap, answer = (await log.read("conversation"))[2:]
        assert isinstance(gap, EventsLostObservation)
        assert (gap.last_id, gap.known_id) == (2, 9)
        assert isinstance(answer, OutcomeUnknownObservation)
        # Decided with the gap in view, the same command is run.
        await log.append("conversation", [CmdRunAction(command="echo effect >> effects")])
        await executor.execute(await delivery_of(log, 5), ActionClaimed(1))
        assert isinstance((await log.read("conversation"))[-1], CmdOutputObservation)
    effects = tmp_path / "conversation" / "workspace" / "effects"
    assert effects.read_text() == "lost\neffect\n"


async def test_the_same_command_under_the_same_number_is_collected(memory_store: Store, tmp_path: Path) -> None:
    """It was decided again after the store had lost it; to run it again would double what it did."""
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    action = CmdRunAction(command="echo effect >> effects; cat effects", thought="once more")
    await log.append("conversation", [action])
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open("conversation")
        before = action.model_copy(update={"thought": "first"})
        await host.run(2, "bash", {"command": before.command}, fingerprint=compute_fingerprint(before))
        await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), ActionClaimed(1))
    answer = (await log.read("conversation"))[-1]
    assert isinstance(answer, CmdOutputObservation)
    assert answer.content.strip() == "effect"


class Events:
    """A conversation whose actions are appended and carried out one by one."""

    def __init__(self, log: EventLog, executor: Executor) -> None:
        self._log = log
        self._executor = executor

    async def observed(self, action: Action) -> Observation:
        """Return the outcome of an action."""
        await self._log.append("conversation", [action])
        action_id = await self._log.load_last_id("conversation")
        await self._executor.execute(await delivery_of(self._log, action_id), ActionClaimed(1))
        observation = (await self._log.read("conversation"))[-1]
        assert isinstance(observation, Observation)
        assert observation.cause == action_id
        return observation


async def test_file_events_read_and_write_only_in_the_workspace(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        events = Events(log, Executor(log, workspaces, worker_id="tool-1"))
        await events.observed(CmdRunAction(command="mkdir src && cd src"))
        written = await events.observed(FileWriteAction(path="a/b.py", content="one\ntwo"))
        assert isinstance(written, FileWriteObservation)
        assert (written.path, written.content) == ("/workspace/src/a/b.py", "")
        await events.observed(FileWriteAction(path="/workspace/src/a/b.py", content="between", start=1, end=1))
        seen = await events.observed(FileReadAction(path="a/b.py", start=1, end=3))
        assert isinstance(seen, FileReadObservation)
        assert (seen.path, seen.content) == ("/workspace/src/a/b.py", "between\ntwo\n")
        viewed = await events.observed(FileReadAction(path="/workspace/src/a/b.py", view_range=(2, 2)))
        assert "     2\tbetween" in viewed.content
        undone = await events.observed(FileEditAction(path="/workspace/src/a/b.py", command="undo_edit"))
        assert undone.content.startswith("Last edit to /workspace/src/a/b.py undone successfully.")
        for path in ("/etc/a.txt", "../../outside", "/workspace/up/a.txt"):
            await events.observed(CmdRunAction(command="ln -sfn /usr /workspace/up"))
            refused = await events.observed(FileWriteAction(path=path, content="x"))
            assert isinstance(refused, ErrorObservation)
            assert "Read-only file system" in refused.content
        missing = await events.observed(FileReadAction(path="gone"))
        assert isinstance(missing, ErrorObservation)
        assert missing.content.endswith("Your current working directory is /workspace/src.")
    assert (tmp_path / "conversation" / "workspace" / "src" / "a" / "b.py").read_text() == "one\ntwo\n"


async def test_next_worker_does_not_write_written_files_again(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [FileWriteAction(path="a.txt", content="one", start=0, end=0)])
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open("conversation")
        fields = {"path": "a.txt", "content": "one", "start": 0, "end": 0}
        await host.run(2, "write", fields)  # as a worker did that died before it appended
        executor = Executor(log, workspaces, worker_id="tool-2")
        await executor.execute(await delivery_of(log, 2), ActionReclaimed(2, "tool-1"))
    assert (await log.read("conversation"))[-1].kind == "observation.write"
    assert (tmp_path / "conversation" / "workspace" / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize(("attempt", "is_run"), [(3, True), (4, False)])
async def test_action_is_given_up_after_three_worker_deaths(
    memory_store: Store, tmp_path: Path, attempt: int, is_run: bool
) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    await log.append("conversation", [CmdRunAction(command="echo effect >> effects")])
    async with opened(tmp_path) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")
        await executor.execute(await delivery_of(log, 2), ActionReclaimed(attempt, "tool-0"))
    observation = (await log.read("conversation"))[-1]
    assert isinstance(observation, CmdOutputObservation if is_run else OutcomeUnknownObservation)
    assert (tmp_path / "conversation" / "workspace" / "effects").exists() is is_run


async def test_file_beside_the_workspaces_is_not_a_workspace(tmp_path: Path) -> None:
    async with opened(tmp_path) as workspaces:
        await workspaces.open("conversation")
        (tmp_path / "stray").write_text("")
        assert [state.conversation_id for state in workspaces.list()] == ["conversation"]
