"""The executor, with a real store: whatever is wrong with an action, it gets an observation."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

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
from broker.runtime import BrokerSettings, UsageError
from broker.secrets.masking import MASK
from broker.secrets.references import SecretReference, SecretUnavailable
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

CID = "conversation"
Claim = ActionClaimed | ActionReclaimed
FIRST = ActionClaimed(1)
EFFECT = "echo effect >> effects"


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    """The log of a conversation that has just been created."""
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


async def delivery_of(log: EventLog, action_id: int) -> ActionDelivery:
    return ActionDelivery(CID, action_id, await log.load_entry(CID, action_id), WorkspaceSpec(), "")


async def execute(workspaces: Workspaces, log: EventLog, claim: Claim = FIRST, *, action_id: int = 2) -> Observation:
    """Run an action, and return the last events of the log."""
    await Executor(log, workspaces, worker_id="tool-1").execute(await delivery_of(log, action_id), claim)
    return await last(log)


async def observed(workspaces: Workspaces, log: EventLog, action: Action) -> Observation:
    """Append an action, carry it out, and return its observation."""
    await log.append(CID, [action])
    action_id = await log.load_last_id(CID)
    observation = await execute(workspaces, log, action_id=action_id)
    assert observation.cause == action_id
    return observation


async def last(log: EventLog) -> Observation:
    found = (await log.read(CID))[-1]
    assert isinstance(found, Observation)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of the workspace."""
    path = tmp_path / "node" / CID / "workspace"
    path.mkdir(parents=True)
    return path


def check_error(observation: Observation, error_id: str, *, action_id: int = 2) -> ErrorObservation:
    assert isinstance(observation, ErrorObservation)
    assert (observation.cause, observation.error_id) == (action_id, error_id)
    return observation


@pytest.mark.parametrize(
    "action", [CmdRunAction(command="echo hidden"), FileReadAction(path="a.txt")], ids=["run", "read"]
)
async def test_result_that_cannot_be_masked_is_not_logged(workspaces, log, folder, action) -> None:
    (folder / "a.txt").write_text("c4n4ry-hidden\n")
    await log.append(CID, [action])
    await Secrets(log.store, lambda: bytes(32)).put(CID, "TOKEN", "c4n4ry-hidden")
    locked = EventLog(log.store, Secrets(log.store, no_key))
    await Executor(locked, workspaces, worker_id="tool-1").execute(await delivery_of(log, 2), FIRST)
    answer = check_error(await last(log), "secrets_locked")
    assert "no key for them" in answer.content
    assert "c4n4ry" not in answer.content


class OneSource:
    """A source of secrets that fails while it has no value."""

    value = ""

    async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
        if not self.value:
            raise SecretUnavailable("the source vault answered with status 503.")
        return self.value


async def test_secret_that_cannot_be_looked_up_is_answered(workspaces, log, folder) -> None:
    source = OneSource()
    log = EventLog(log.store, Secrets(log.store, lambda: bytes(32), sources=source))
    await log.secrets.put(CID, "TOKEN", SecretReference(source="vault", path="api"))
    await log.append(CID, [CmdRunAction(command='echo "$TOKEN" | wc -c >> effects; echo "$TOKEN"')] * 2)
    refused = check_error(await execute(workspaces, log), "secret_unavailable")
    assert "The secret TOKEN cannot be looked up, so nothing was run: the source vault" in refused.content
    assert not (folder / "effects").exists()
    source.value = "found-value-1"
    ran = await execute(workspaces, log, action_id=3)
    assert isinstance(ran, CmdOutputObservation)
    assert ran.content == MASK
    assert (folder / "effects").read_text() == "14\n"


async def test_result_is_collected_while_its_secret_cannot_be_looked_up(workspaces, log, folder) -> None:
    source = OneSource()
    source.value = "found-value-1"
    log = EventLog(log.store, Secrets(log.store, lambda: bytes(32), sources=source))
    await log.secrets.put(CID, "TOKEN", SecretReference(source="vault", path="api"))
    await log.append(CID, [CmdRunAction(command='echo "$TOKEN" >> effects; echo "$TOKEN"')])
    (action,) = [event for event in await log.read(CID) if isinstance(event, CmdRunAction)]
    arguments = {"command": action.command, "env": {"TOKEN": source.value}, "is_input": False}
    workspace = await workspaces.open(CID)  # of a worker that dies before it appends the result
    await workspace.run(2, "bash", arguments, fingerprint=compute_fingerprint(action))
    await log.secrets.find_named(CID, "$TOKEN")
    source.value = ""
    observation = await execute(workspaces, log, ActionReclaimed(2, "tool-0"))
    assert isinstance(observation, CmdOutputObservation), observation
    assert observation.content == MASK
    assert (folder / "effects").read_text() == "found-value-1\n"


@pytest.mark.parametrize(
    ("action", "claim", "is_repeated"),
    [
        (CmdRunAction(command=EFFECT), ActionReclaimed(2, "tool-0"), False),
        (CmdRunAction(command=EFFECT), FIRST, True),
        (FileReadAction(path="a.txt"), ActionReclaimed(2, "tool-0"), True),
    ],
    ids=["may have run", "never assigned", "only reads"],
)
async def test_after_a_reboot_only_harmless_actions_are_repeated(workspaces, log, folder, action, claim, is_repeated):
    (folder / "a.txt").write_text("text\n")
    journal = HostFolder(folder.parents[1], CID)
    journal.create()
    journal.journal.write_text("boot 11111111-2222-3333-4444-555555555555\n")
    await log.append(CID, [action])
    observation = await execute(workspaces, log, claim)
    assert isinstance(observation, OutcomeUnknownObservation) is not is_repeated
    if not is_repeated:
        assert observation.content == (
            "The machine was restarted after this action was assigned, and the record of what ran may be incomplete. "
            "The action may have taken effect, wholly or in part. Check before you repeat it."
        )
    has_effect = is_repeated and isinstance(action, CmdRunAction)
    assert (folder / "effects").exists() is has_effect


async def test_result_too_large_for_the_log_is_an_error(workspaces, log) -> None:
    def count_atoms() -> Observation:
        """Count the atoms of the universe."""
        return CmdOutputObservation(content="many", command="count", metadata=CmdOutputMetadata(exit_code=10**80))

    metadata = ToolCallMetadata(function_name="count_atoms", tool_call_id="c1", reply_id=1, total_calls_in_response=1)
    await log.append(CID, [ToolCallAction(name="count_atoms", tool_call_metadata=metadata)])
    offered = OfferedTools([custom_tool(count_atoms)])
    executor = Executor(log, workspaces, worker_id="tool-1", offered=offered)
    await executor.execute(await delivery_of(log, 2), FIRST)
    assert check_error(await last(log), "event_unfit").tool_call_metadata == metadata


@pytest.mark.parametrize("status", [ConfirmationStatus.AWAITING_CONFIRMATION, ConfirmationStatus.REJECTED])
async def test_an_action_that_nobody_has_confirmed_is_not_run(workspaces, log, tmp_path, status) -> None:
    await log.append(CID, [CmdRunAction(command=EFFECT, confirmation_state=status)])
    check_error(await execute(workspaces, log), "not_confirmed")
    assert not (tmp_path / "node" / CID).exists()


async def test_command_answered_before_start_does_not_run(workspaces, log, folder) -> None:
    await log.append(CID, [CmdRunAction(command="sleep 1000; touch effects")])
    delivery = await delivery_of(log, 2)
    await log.append_observation(CID, ErrorObservation(content="stopped", cause=2), worker_id="controller")
    async with asyncio.timeout(60):
        await Executor(log, workspaces, worker_id="tool-1").execute(delivery, FIRST)
    assert [event.kind for event in await log.read(CID)][1:] == [
        "action.run",
        "observation.error",
        "conversation.party_stopped",
    ]
    assert not (folder / "effects").exists()


@pytest.mark.parametrize(("order", "action_id"), [("cancel", 2), ("close", 0)])
async def test_command_stopped_while_its_workspace_opens_does_not_run(
    workspaces, log, tmp_path, order, action_id
) -> None:
    await log.append(CID, [CmdRunAction(command=EFFECT)])
    executor = Executor(log, workspaces, worker_id="tool-1")
    running = asyncio.create_task(executor.execute(await delivery_of(log, 2), FIRST))
    async with asyncio.timeout(60):
        while not (tmp_path / "node" / CID).exists():
            await asyncio.sleep(0)  # its shell is there some milliseconds later
    await executor.execute_control(ControlDelivery(CID, action_id, order, ""))
    await running
    check_error(await last(log), "cancelled")
    assert not (tmp_path / "node" / CID / "workspace" / "effects").exists()


async def test_order_about_another_action_stops_no_starting_action(workspaces, log, tmp_path) -> None:
    slow = f"sleep {ANSWER_CHECK_SECONDS + 0.3}; {EFFECT}"  # it is looked after, too
    await log.append(CID, [CmdRunAction(command=slow)])
    executor = Executor(log, workspaces, worker_id="tool-1")
    running = asyncio.create_task(executor.execute(await delivery_of(log, 2), FIRST))
    await until((tmp_path / "node" / CID).exists)
    for order in (("another-one", 2, "cancel"), ("another-one", 0, "close"), (CID, 3, "cancel")):
        await executor.execute_control(ControlDelivery(*order, ""))
    await running
    assert isinstance(await last(log), CmdOutputObservation)
    assert (tmp_path / "node" / CID / "workspace" / "effects").exists()


@pytest.mark.parametrize(("sandbox", "is_said"), [("none", True), ("bwrap", None)])
async def test_commands_without_a_sandbox_are_marked(log, tmp_path, sandbox, is_said) -> None:
    async with opened(tmp_path, sandbox=sandbox) as workspaces:
        for action in (CmdRunAction(command="true"), FileWriteAction(path="a", content="a"), FileReadAction(path="b")):
            assert (await observed(workspaces, log, action)).unsandboxed is is_said
        await observed(workspaces, log, FileWriteAction(path=".openhands/setup.sh", content="exit 1"))
        survey = await observed(workspaces, log, SurveyAction())
        assert isinstance(survey, SurveyObservation)
        assert survey.scripts == (() if is_said else (".openhands/setup.sh",))
        stopped = CmdRunAction(command="true", confirmation_state=ConfirmationStatus.REJECTED)
        assert (await observed(workspaces, log, stopped)).unsandboxed is None


async def test_a_picture_that_is_viewed_is_in_the_observation(log, folder) -> None:
    (folder / "a.gif").write_bytes(b"GIF89a" + bytes(100_000))
    async with opened(folder.parents[1], sandbox="bwrap") as workspaces:
        viewed = await observed(workspaces, log, FileReadAction(path="/workspace/a.gif"))
    seen = await log.blobs.restore_event(CID, viewed)
    assert isinstance(seen, FileReadObservation)
    assert seen.image_urls is not None
    assert seen.image_urls[0].startswith("data:image/gif;base64,R0lGODlhAAAA")
    assert len(seen.image_urls[0]) > 130_000


@pytest.mark.parametrize(
    "further", [[], [CmdRunAction(command="true")]], ids=["last", "journal not longer than the log"]
)
async def test_lost_actions_result_answers_no_action_with_its_number(workspaces, log, folder, further) -> None:
    """The journal knows action 2 as another command than the log does."""
    await log.append(CID, [CmdRunAction(command=EFFECT), *further])
    host = await workspaces.open(CID)
    for number, action in enumerate([CmdRunAction(command="echo old"), *further], 2):
        await host.run(number, "bash", {"command": action.command}, fingerprint=compute_fingerprint(action))
    await execute(workspaces, log)
    gap, answer = (await log.read(CID))[-2:]
    assert isinstance(gap, EventsLostObservation)
    assert "event 2 was a different event before" in gap.content
    assert isinstance(answer, OutcomeUnknownObservation)
    assert (answer.cause, "was not run" in answer.content) == (2, True)
    assert not (folder / "effects").exists()


async def test_result_of_an_action_lost_meanwhile_answers_no_other(workspaces, log) -> None:
    await log.append(CID, [CmdRunAction(command="echo lost")])
    delivery, names = await delivery_of(log, 2), log.store.known_keys(CID)
    for key in (names.events, names.meta, names.once):
        await log.store.connection.call("DEL", key)
    await log.create(ConversationCreated(conversation_id=CID))
    await log.append(CID, [CmdRunAction(command="echo other")])
    await Executor(log, workspaces, worker_id="tool-1").execute(delivery, FIRST)
    kinds = [event.kind for event in await log.read(CID)]
    assert kinds == ["conversation.created", "action.run", "observation.events_lost"]


async def test_action_decided_before_a_named_gap_does_not_start(workspaces, log, folder) -> None:
    """The journal has more than the log: its further entries may have changed the workspace."""
    await log.append(CID, [CmdRunAction(command=EFFECT)])
    host = await workspaces.open(CID)
    await host.run(9, "bash", {"command": "echo lost >> effects"}, fingerprint="0123456789abcdef")
    await workspaces.aclose()
    async with opened(folder.parents[1]) as later:
        await execute(later, log)
        gap, answer = (await log.read(CID))[2:]
        assert isinstance(gap, EventsLostObservation)
        assert (gap.last_id, gap.known_id) == (2, 9)
        assert isinstance(answer, OutcomeUnknownObservation)
        # Decided with the gap in view, the same command is run.
        assert isinstance(await observed(later, log, CmdRunAction(command=EFFECT)), CmdOutputObservation)
    assert (folder / "effects").read_text() == "lost\neffect\n"


async def test_the_same_command_under_the_same_number_is_collected(workspaces, log) -> None:
    """It was decided again after the store had lost it; to run it again would double what it did."""
    action = CmdRunAction(command=f"{EFFECT}; cat effects", thought="once more")
    await log.append(CID, [action])
    host, before = await workspaces.open(CID), action.model_copy(update={"thought": "first"})
    await host.run(2, "bash", {"command": before.command}, fingerprint=compute_fingerprint(before))
    answer = await execute(workspaces, log)
    assert isinstance(answer, CmdOutputObservation)
    assert answer.content.strip() == "effect"


async def test_file_events_read_and_write_only_in_the_workspace(log, tmp_path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        see = partial(observed, workspaces, log)
        await see(CmdRunAction(command="mkdir src && cd src"))
        written = await see(FileWriteAction(path="a/b.py", content="one\ntwo"))
        assert isinstance(written, FileWriteObservation)
        assert (written.path, written.content) == ("/workspace/src/a/b.py", "")
        await see(FileWriteAction(path="/workspace/src/a/b.py", content="between", start=1, end=1))
        seen = await see(FileReadAction(path="a/b.py", start=1, end=3))
        assert isinstance(seen, FileReadObservation)
        assert (seen.path, seen.content) == ("/workspace/src/a/b.py", "between\ntwo\n")
        viewed = await see(FileReadAction(path="/workspace/src/a/b.py", view_range=(2, 2)))
        assert "     2\tbetween" in viewed.content
        undone = await see(FileEditAction(path="/workspace/src/a/b.py", command="undo_edit"))
        assert undone.content.startswith("Last edit to /workspace/src/a/b.py undone successfully.")
        await see(CmdRunAction(command="ln -sfn /usr /workspace/up"))
        for path in ("/etc/a.txt", "../../outside", "/workspace/up/a.txt"):
            refused = await see(FileWriteAction(path=path, content="x"))
            assert isinstance(refused, ErrorObservation)
            assert "Read-only file system" in refused.content
        missing = await see(FileReadAction(path="gone"))
        assert isinstance(missing, ErrorObservation)
        assert missing.content.endswith("Your current working directory is /workspace/src.")
    assert (tmp_path / CID / "workspace" / "src" / "a" / "b.py").read_text() == "one\ntwo\n"


async def test_next_worker_does_not_write_written_files_again(workspaces, log, folder) -> None:
    fields = {"path": "a.txt", "content": "one", "start": 0, "end": 0}
    await log.append(CID, [FileWriteAction(**fields)])
    host = await workspaces.open(CID)
    await host.run(2, "write", fields)  # as a worker did that died before it appended
    assert (await execute(workspaces, log, ActionReclaimed(2, "tool-0"))).kind == "observation.write"
    assert (folder / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize(("attempt", "is_run"), [(3, True), (4, False)])
async def test_action_is_given_up_after_three_worker_deaths(workspaces, log, folder, attempt, is_run) -> None:
    await log.append(CID, [CmdRunAction(command=EFFECT)])
    observation = await execute(workspaces, log, ActionReclaimed(attempt, "tool-0"))
    assert isinstance(observation, CmdOutputObservation if is_run else OutcomeUnknownObservation)
    assert (folder / "effects").exists() is is_run


async def test_file_beside_the_workspaces_is_not_a_workspace(workspaces, tmp_path) -> None:
    await workspaces.open(CID)
    (tmp_path / "node" / "stray").write_text("")
    assert [state.conversation_id for state in workspaces.list()] == [CID]


SHOW_KEY = "echo $DECKHANDS_IDEMPOTENCY_KEY"


async def test_a_command_has_a_key_that_only_its_action_has(workspaces, log) -> None:
    action = CmdRunAction(command=SHOW_KEY)
    first = await observed(workspaces, log, action)
    assert first.content.strip() == f"{CID}-2-{compute_fingerprint(action)}"
    taken = await observed(workspaces, log, CmdRunAction(command="export DECKHANDS_IDEMPOTENCY_KEY=other"))
    assert taken.content == ""
    third = await observed(workspaces, log, action)
    assert third.content.strip() == f"{CID}-6-{compute_fingerprint(action)}"
    in_program = await observed(workspaces, log, CmdRunAction(command=f"bash -c '{SHOW_KEY}'"))
    assert in_program.content.strip().startswith(f"{CID}-8-")


async def test_a_command_of_ours_accepts_the_key_in_its_environment() -> None:
    assert BrokerSettings.from_env({"DECKHANDS_IDEMPOTENCY_KEY": "c-1", "DECKHANDS_URL": ""}).url
    with pytest.raises(UsageError, match="DECKHANDS_IDEMPOTENCY_KEYS is unknown"):
        BrokerSettings.from_env({"DECKHANDS_IDEMPOTENCY_KEYS": "c-1"})
