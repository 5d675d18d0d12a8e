"""A tool worker with its own user: it answers the action that it claimed, with its capability, and reads no log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import MessageAction
from broker.contract.codec import checksum_of, find_kinds, to_entry
from broker.contract.events import Action, ConversationCreated, Event, EventSource, PartyStopped
from broker.contract.fencing import Ownership
from broker.contract.file_events import FileReadObservation
from broker.contract.kinds import FAILURES, ToolCallMetadata
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputObservation,
    ErrorObservation,
    OutcomeUnknownObservation,
)
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionQueue, ActionReclaimed, NothingToDo
from broker.coordination.crash_attribution import Mark
from broker.coordination.ownership import ClaimedConversation, DispatchOutcome, Owners
from broker.coordination.wakeups import WorkerMailbox, settle_results
from broker.log.append_call import Closed
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion, NotDeleted
from broker.log.event_log import EventLog
from broker.log.lost_tails import record_gap, record_reported_gap
from broker.log.specification import ANSWERS
from broker.runtime.clock import SystemClock
from broker.runtime.errors import DeckhandsError, EventsLost
from broker.secrets.masking import MASK
from broker.secrets.references import SecretReference
from broker.secrets.secrets import Secrets
from broker.store.store import Store, open_store
from deckhands.client.forking import build_fork
from tests.broker_parts import CID, bury, claim, command, enter, message, output
from tests.security.test_role_rights import serving_with
from tests.served_stores import Server, allowed_of, refusals
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.launch.shell_state import ShellState

ACTION = 2
OTHER = "other-conversation"
FLOOD = 2_500


class World:
    """A conversation with dispatched actions, its owner, and a tool worker, each as the user of its role."""

    def __init__(self, server: Server, controller: Store, tool: Store) -> None:
        self.server, self.controller, self.tool = server, controller, tool
        self.log, self.tool_log = EventLog(controller), EventLog(tool)
        names = controller.all_shards[0]
        self.mailbox = WorkerMailbox(controller, names, "w1")
        self.queue = ActionQueue(tool, names, worker_id="t1", node="n1", pools=("bash",))

    async def dispatch(self, count: int = 1) -> None:
        ownership = await claim(self.controller, "w1")
        actions = [command(f"echo {number}") for number in range(count)]
        await self.log.append_as_owner(ownership, actions, expected_last_id=1, dispatch=range(count))

    async def take(self) -> list[ActionDelivery]:
        found = [one for one in await self.queue.read(limit=8) if isinstance(one, ActionDelivery)]
        for delivery in found:
            assert isinstance(await self.queue.claim(delivery), ActionClaimed)
        return found

    async def answer(self, delivery: ActionDelivery, text: str = "a.txt", log: EventLog | None = None) -> Any:
        return await (log or self.tool_log).append_observation(
            CID,
            output(delivery.action_id, text),
            worker_id="t1",
            place=delivery.location,
            checksum=checksum_of(delivery.entry),
        )

    async def observations(self) -> list[Event]:
        await self.mailbox.read()
        return [event for event in await self.log.read(CID) if event.cause is not None]


@asynccontextmanager
async def world_on(server: Server) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        controller, tool = await open_store(server.controller), await open_store(server.tool)
        operator = await open_store(server.operator)
        for store in (controller, tool, operator):
            stack.push_async_callback(store.aclose)
        await EventLog(operator).create(ConversationCreated(conversation_id=CID), key="begin")
        await EventLog(operator).create(ConversationCreated(conversation_id=OTHER), [message("a secret")], key="begin")
        await enter(controller, "w1")
        await enter(tool, "t1", node="n1")
        world = World(server, controller, tool)
        stack.push_async_callback(world.mailbox.aclose)
        stack.push_async_callback(world.queue.aclose)
        yield world


@pytest.fixture(params=["valkey", "redis"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with serving_with(request.param, tmp_path) as server, world_on(server) as found:
        yield found


async def claim_whole(store: Store, worker_id: str) -> ClaimedConversation:
    found = await Owners(store).claim(CID, worker_id)
    assert isinstance(found, ClaimedConversation)
    return found


async def test_claimed_action_is_answered_with_its_capability(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    await world.answer(delivery)
    # What is read first is settled; the event comes with the next notification.
    carried = await world.mailbox.read() or await world.mailbox.read()
    assert carried[CID] is not None
    assert carried[CID].event_id == ACTION + 1
    (found,) = await world.observations()
    assert (found.cause, found.content) == (ACTION, "a.txt")  # type: ignore[attr-defined]
    call = world.controller.call
    names = world.controller.known_keys(CID)
    assert await call("EXISTS", f"{names.root}:results", f"{names.root}:grants") == 0
    assert await refusals(world.server) == []


async def test_looked_up_secret_is_hidden_and_stays_hidden(world: World) -> None:
    class Source:
        async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
            return "looked-up-value"

    hidden = Secrets(world.controller, lambda: bytes(32))
    await hidden.put(CID, "TOKEN", SecretReference(source="vault"))
    tool = Secrets(world.tool, lambda: bytes(32), sources=Source())
    assert await tool.find_named(CID, "$TOKEN") == {"TOKEN": "looked-up-value"}
    await hidden.look_up(CID)
    assert (await hidden.load_masker(CID)).mask_text("looked-up-value") == MASK
    assert await refusals(world.server) == []
    names = world.tool.known_keys(CID)
    value, *_ = await world.tool.call("SMEMBERS", names.masked)
    for removal in (("SREM", names.masked, value), ("SPOP", names.masked), ("DEL", names.masked)):
        with pytest.raises(DeckhandsError):
            await world.tool.call(*removal)


async def test_more_actions_than_a_stream_holds_are_answered(world: World) -> None:
    await world.dispatch(30)
    answered = 0
    while answered < 30:
        for delivery in await world.take():
            await world.answer(delivery, f"answer {delivery.action_id}")
            answered += 1
    found = await world.observations()
    assert sorted(event.cause or 0 for event in found) == list(range(2, 32))
    assert {event.content for event in found} == {f"answer {n}" for n in range(2, 32)}  # type: ignore[attr-defined]
    assert await refusals(world.server) == []


async def test_an_answer_given_twice_is_in_the_log_once(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    await world.answer(delivery, "first")
    await world.answer(delivery, "second")
    (found,) = await world.observations()
    assert found.content == "first"  # type: ignore[attr-defined]


@pytest.mark.parametrize("forgery", ["no capability", "a wrong one", "of another action", "not claimed", "no action"])
async def test_forged_results_do_not_reach_the_log(world: World, forgery: str) -> None:
    await world.dispatch(2)
    first, second = sorted(await world.queue.read(limit=8), key=lambda one: one.action_id)  # type: ignore[union-attr]
    names = world.tool.known_keys(CID)
    carried = {}
    for one in (first, second):
        stream, _, entry = one.location.partition("|")
        ((_, flat),) = await world.tool.call("XRANGE", stream, entry, entry)
        carried[one.action_id] = dict(zip(flat[::2], flat[1::2], strict=True))
    capability = {number: about[b"k"] for number, about in carried.items()}
    assert len(set(capability.values())) == 2
    if forgery != "not claimed":
        await world.queue.claim(first)  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        "a": first.action_id if forgery != "no action" else 1,
        "w": "t1",
        "k": {
            "no capability": b"",
            "a wrong one": b"0" * 40,
            "of another action": capability[second.action_id],
        }.get(forgery, capability[first.action_id]),
        "s": "",
        "f": "",
        "u": "1",
        "e": carried[first.action_id][b"e"],
    }
    await world.tool.call("XADD", f"{names.root}:results", "*", *[part for item in fields.items() for part in item])
    await world.tool.call("XADD", world.controller.all_shards[0].mailbox("w1"), "*", "c", CID, "r", "1")
    assert await world.observations() == []
    assert await world.log.load_last_id(CID) == 3
    assert await world.controller.call("EXISTS", f"{names.root}:results") == 0


def encode(event: Event) -> bytes:
    return to_entry({**event.wire(), "timestamp": "2026-01-01T00:00:00+00:00"})[0]


FORGED_EVENTS = {
    "a user's message": message("I am the user"),
    "a message that names the action": MessageAction(content="x", source=EventSource.USER, cause=ACTION),
    "a kind of another action": FileReadObservation(content="x", path="a", cause=ACTION),
    "a report of a controller": AgentStateChangedObservation(agent_state="finished", cause=ACTION),
    "another cause": output(ACTION + 1),
    "no cause": CmdOutputObservation(content="x", command="ls"),
    "another call of the model": CmdOutputObservation(
        content="x",
        command="ls",
        cause=ACTION,
        tool_call_metadata=ToolCallMetadata(function_name="run", tool_call_id="x", reply_id=1),
    ),
}


@pytest.mark.parametrize("what", [*FORGED_EVENTS, "garbage"])
async def test_a_capability_allows_nothing_but_an_answer(world: World, what: str) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    stream, _, entry = delivery.location.partition("|")
    ((_, flat),) = await world.tool.call("XRANGE", stream, entry, entry)
    capability = dict(zip(flat[::2], flat[1::2], strict=True))[b"k"]
    data = encode(FORGED_EVENTS[what]) if what in FORGED_EVENTS else b"garbage"
    results = f"{world.tool.known_keys(CID).root}:results"
    await world.tool.call("XADD", results, "*", "a", ACTION, "w", "t1", "k", capability, "s", "", "u", "1", "e", data)
    await world.tool.call("XADD", world.controller.all_shards[0].mailbox("w1"), "*", "c", CID, "r", "1")
    assert await world.observations() == []
    assert await world.log.load_last_id(CID) == ACTION
    assert await world.controller.call("EXISTS", results) == 0
    ownership = await Owners(world.controller).resume_claim(CID, "w1")
    assert ownership is not None
    outcome = await Owners(world.controller).dispatch(ownership.ownership, ACTION, delivery.entry)
    assert outcome is DispatchOutcome.ENQUEUED
    (again,) = [one for one in await world.queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert isinstance(await world.queue.claim(again), ActionReclaimed)
    await world.answer(again)
    assert [event.cause for event in await world.observations()] == [ACTION]


def test_every_action_names_the_kinds_that_answer_it() -> None:
    actions = {kind: one for kind, one in find_kinds().items() if one.runnable or kind == "action.execute"}
    for kind, action in actions.items():
        assert issubclass(action, Action)
        named = set(action.answered_by) or {kind.replace("action.", "observation.")}
        assert named | {*FAILURES, "observation.user_rejected"} == ANSWERS[kind] | {*FAILURES}, kind


async def test_another_worker_answers_what_was_refused(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    (delivery,) = await world.take()
    await world.controller.call("DEL", f"{world.controller.known_keys(CID).root}:grants")
    await world.answer(delivery, "refused")
    assert await world.observations() == []
    owners, other = Owners(world.controller), await enter(world.tool, "t2", node="n1")
    assert await owners.dispatch(ownership, ACTION, delivery.entry) is DispatchOutcome.ENQUEUED
    queue = ActionQueue(world.tool, other.shards[0], worker_id="t2", node="n1", pools=("bash",))
    (again,) = [one for one in await queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert isinstance(await queue.claim(again), ActionReclaimed)
    answer = output(ACTION, "accepted")
    checksum = checksum_of(again.entry)
    await world.tool_log.append_observation(CID, answer, worker_id="t2", place=again.location, checksum=checksum)
    (found,) = await world.observations()
    assert found.content == "accepted"  # type: ignore[attr-defined]
    await queue.aclose()


async def test_answer_that_disagrees_with_its_noted_action_is_dispatched_again(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    await world.answer(delivery)
    await world.controller.call("HSET", world.controller.known_keys(CID).once, f"k:{ACTION}", "00000000")
    assert await world.observations() == []
    once = world.controller.known_keys(CID).once
    assert await world.controller.call("HMGET", once, f"w:{ACTION}", f"q:{ACTION}") == [b"-", None]


async def test_forged_results_without_capability_delay_no_other(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    results = f"{world.tool.known_keys(CID).root}:results"
    for number in range(FLOOD):
        await world.tool.call("XADD", results, "*", "a", ACTION, "w", "t1", "k", str(number), "e", "x")
    await world.answer(delivery)
    assert [event.cause for event in await world.observations()] == [ACTION]
    assert await world.controller.call("EXISTS", results) == 0


async def test_deletion_waits_for_results_that_may_be_accepted(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    await world.answer(delivery)
    names = world.controller.known_keys(CID)
    await world.controller.call("HDEL", names.meta, "owner")
    operator = await open_store(world.server.operator)
    with pytest.raises(NotDeleted):
        await Deletion(operator).close_for_deletion(CID, last_id=ACTION)
    await operator.aclose()
    await world.controller.call("HSET", names.meta, "owner", "w1")
    assert [event.cause for event in await world.observations()] == [ACTION]


@pytest.mark.parametrize("mark", ["", "not hex", "0" * 65])
async def test_forged_loss_is_not_recorded(world: World, mark: str) -> None:
    await world.dispatch()
    first = checksum_of(await world.log.load_entry(CID, 1))
    meta = world.tool.known_keys(CID).meta
    await world.tool.call("HSET", meta, "reported_gap", f"1:{mark or first}")
    await world.tool.call("XADD", world.controller.all_shards[0].mailbox("w1"), "*", "c", CID, "r", "1")
    await world.mailbox.read()
    (gap,) = world.mailbox.take_gaps().items()
    await record_reported_gap(world.log, *gap)
    assert await world.log.load_last_id(CID) == ACTION
    assert not await world.controller.call("HEXISTS", meta, "reported_gap")


async def test_tool_worker_runs_what_an_earlier_version_dispatched(world: World) -> None:
    await world.dispatch()
    await world.controller.call("HDEL", world.controller.known_keys(CID).once, f"k:{ACTION}")
    (delivery,) = await world.take()
    await world.tool_log.check_action(CID, ACTION, checksum_of(delivery.entry))
    await world.answer(delivery)
    assert [event.cause for event in await world.observations()] == [ACTION]


async def test_tool_worker_reaches_no_log(world: World) -> None:
    await world.dispatch()
    beyond = []
    for cid in (CID, OTHER):
        root = world.tool.known_keys(cid).root
        beyond += [f"XRANGE {root}:events - +", f"XREAD STREAMS {root}:events 0", f"XLEN {root}:events"]
        beyond += [f"XADD {root}:events * e x", f"XTRIM {root}:events MAXLEN 0", f"DEL {root}:events"]
        beyond += [f"HSET {root}:grants 2 x", f"DEL {root}:grants", f"XRANGE {root}:results - +"]
        beyond += [f"DEL {root}:results", f"XTRIM {root}:results MAXLEN 0"]
    root, shard = world.tool.known_keys(CID).root, world.tool.all_shards[0].root
    beyond += [f"FCALL deck_settle 2 {root} {shard} {CID}"]
    assert await allowed_of(beyond, world.server.tool) == []
    with pytest.raises(DeckhandsError):
        await world.tool_log.append(OTHER, [message("forged")], key="forged")
    with pytest.raises(DeckhandsError):
        await world.tool_log.read(OTHER)
    # A tool worker that makes itself an owner still cannot append.
    await world.tool.call("HSET", world.tool.known_keys(OTHER).meta, "owner", "t1", "token", "1")
    with pytest.raises(DeckhandsError):
        await world.tool_log.append_as_owner(Ownership(OTHER, "t1", "1"), [message("forged")], expected_last_id=2)
    assert len(await world.log.read(OTHER)) == 2


async def test_result_is_settled_by_the_next_owner(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    call = world.controller.call
    await call("HDEL", world.controller.known_keys(CID).meta, "owner")
    await world.answer(delivery)
    await enter(world.controller, "w2")
    claimed = await claim(world.controller, "w2")
    assert claimed.worker_id == "w2"
    mailbox = WorkerMailbox(world.controller, world.controller.all_shards[0], "w2")
    await mailbox.read()
    await mailbox.aclose()
    assert [event.cause for event in await world.log.read(CID) if event.cause] == [ACTION]


async def test_repeated_action_of_an_earlier_version_gets_a_capability(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    grants = f"{world.controller.known_keys(CID).root}:grants"
    await world.controller.call("DEL", grants)  # as if its controller had had no right to write one
    (delivery,) = [one for one in await world.queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert await world.queue.claim(delivery) == NothingToDo("forged")
    outcome = await Owners(world.controller).dispatch(ownership, ACTION, delivery.entry)
    assert outcome is DispatchOutcome.ENQUEUED
    (again,) = await world.take()
    await world.answer(again, "accepted")
    (found,) = await world.observations()
    assert found.content == "accepted"  # type: ignore[attr-defined]


def end_of(action_id: int, seconds: float = 0.5) -> PartyStopped:
    return PartyStopped(party="tool", action_id=action_id, seconds=seconds)


async def capability_of(world: World, delivery: ActionDelivery) -> str:
    """Return the capability in the entry of an action, which every tool worker can read."""
    stream, _, entry = delivery.location.partition("|")
    ((_, flat),) = await world.tool.call("XRANGE", stream, entry, entry)
    return str(dict(zip(flat[::2], flat[1::2], strict=True))[b"k"].decode())


async def find_ends(world: World) -> list[int | None]:
    await world.mailbox.read()
    await settle_results(world.controller, CID)
    return [event.action_id for event in await world.log.read(CID) if isinstance(event, PartyStopped)]


async def test_end_of_a_stopped_action_is_recorded_once(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    (delivery,) = await world.take()
    unrun = ErrorObservation(content="stopped", cause=ACTION)
    assert await find_ends(world) == []
    await world.log.append_as_owner(ownership, [unrun], expected_last_id=2, answers={0: ACTION})
    await world.answer(delivery, "too late")
    for _ in range(2):
        await world.tool_log.append_stop(CID, end_of(ACTION), capability=delivery.capability)
    assert await find_ends(world) == [ACTION]
    await world.tool_log.append_stop(CID, end_of(ACTION), capability=delivery.capability)
    assert await find_ends(world) == [ACTION]
    root = world.controller.known_keys(CID).root
    assert await world.controller.call("EXISTS", f"{root}:results", f"{root}:grants") == 0


@pytest.mark.parametrize("seconds", [-1e300, 1e300, float("nan"), 0.5])
async def test_controller_writes_the_end_of_a_stopped_action_once(world: World, seconds: float) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    (delivery,) = await world.take()
    unrun = ErrorObservation(content="stopped", cause=ACTION)
    await world.log.append_as_owner(ownership, [unrun], expected_last_id=2, answers={0: ACTION})
    names, capability = world.tool.known_keys(CID), await capability_of(world, delivery)
    forged = to_entry({**end_of(ACTION, seconds).wire(), "timestamp": "1999-01-01T00:00:00+00:00", "blobs": {}})[0]
    for _ in range(3):
        await world.tool.call("HSET", names.once, f"w:{ACTION}", "t1", f"o:{ACTION}", "1:1:x")
        await world.tool.call("HDEL", names.once, f"p:party_stopped:{ACTION}")
        fields = ("a", ACTION, "s", "stop", "k", capability, "e", forged)
        await world.tool.call("XADD", f"{names.root}:results", "*", *fields)
        await world.tool.call("HDEL", names.once, f"p:party_stopped:{ACTION}")
        await find_ends(world)
    (end,) = [event for event in await world.log.read(CID) if isinstance(event, PartyStopped)]
    assert (end.action_id, end.seconds, end.blobs) == (ACTION, 0.5 if seconds == 0.5 else None, None)
    assert end.timestamp is not None
    assert end.timestamp.year > 1999


async def test_answered_action_takes_no_second_result(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    (delivery,) = await world.take()
    unrun = ErrorObservation(content="stopped", cause=ACTION)
    await world.log.append_as_owner(ownership, [unrun], expected_last_id=2, answers={0: ACTION})
    once = world.tool.known_keys(CID).once
    checksum = checksum_of(delivery.entry)
    await world.tool.call("HDEL", once, f"o:{ACTION}")
    await world.tool.call("HSET", once, f"w:{ACTION}", "t1", f"k:{ACTION}", checksum)
    await world.answer(delivery, "a second one")
    assert [type(event) for event in await world.observations()] == [ErrorObservation]


FORGED_ENDS = {
    "another action": end_of(ACTION + 1),
    "a message": message("I am the user"),
    "the model's call": PartyStopped(party="model", action_id=ACTION),
    "a user's": end_of(ACTION).model_copy(update={"source": EventSource.USER}),
}


@pytest.mark.parametrize("forgery", ["answered", "running", "no action", "no capability", *FORGED_ENDS])
async def test_forged_ends_of_actions_do_not_reach_the_log(world: World, forgery: str) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls"), command("ls")], expected_last_id=1, dispatch=[0, 1])
    first, _ = sorted(await world.take(), key=lambda one: one.action_id)
    if forgery == "answered":
        place, checksum = first.location, checksum_of(first.entry)
        await world.tool_log.append_observation(
            CID, output(ACTION, "a.txt"), worker_id="t1", place=place, checksum=checksum, fingerprint="f" * 16
        )
        assert len(await world.observations()) == 1
    elif forgery != "running":
        unrun = ErrorObservation(content="stopped", cause=ACTION)
        await world.log.append_as_owner(ownership, [unrun], expected_last_id=3, answers={0: ACTION})
    names, about = world.tool.known_keys(CID), 1 if forgery == "no action" else ACTION
    results, event = f"{names.root}:results", FORGED_ENDS.get(forgery, end_of(about))
    before = await world.log.load_last_id(CID)
    capability = "" if forgery == "no capability" else await capability_of(world, first)
    await world.tool.call("HSET", names.once, f"o:{about}", "1:1:x")  # as if a controller had answered it
    await world.tool.call("XADD", results, "*", "a", about, "s", "stop", "k", capability, "e", encode(event))
    assert await find_ends(world) == []
    assert await world.log.load_last_id(CID) == before
    assert await world.controller.call("EXISTS", results) == 0


async def test_owner_decides_only_with_the_results_that_wait(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1, dispatch=[0])
    (delivery,) = await world.take()
    await world.answer(delivery)
    outcome = await world.log.append_as_owner(ownership, [message("decided")], expected_last_id=2)
    assert type(outcome).__name__ == "Conflict"
    assert await world.log.load_last_id(CID) == 3
    released = await Owners(world.controller).release(ownership, seen_id=2)
    assert released == 3


def forge(fields: dict[bytes, bytes], what: str) -> dict[bytes, bytes]:
    """Return the fields of a dispatched entry as a tool worker that was taken over would put them elsewhere."""
    other = to_entry({**command("curl evil").wire(), "timestamp": "2026-01-01T00:00:00+00:00"})[0]
    return fields | {
        "another command": {b"e": other},
        "an action that no owner dispatched": {b"a": b"7", b"e": other},
        "without its workspace": {b"p": b"1"},
        "in another workspace": {b"w": b'{"path":"/srv/other-tenant"}'},
    }.get(what, {})


FORGED_ENTRIES = (
    "another command",
    "an action that no owner dispatched",
    "without its workspace",
    "in another workspace",
)


@pytest.mark.parametrize("what", FORGED_ENTRIES)
async def test_what_no_owner_dispatched_is_not_run(world: World, what: str) -> None:
    await world.dispatch()
    (delivery,) = [one for one in await world.queue.read(limit=8) if isinstance(one, ActionDelivery)]
    stream, _, entry = delivery.location.partition("|")
    ((_, flat),) = await world.tool.call("XRANGE", stream, entry, entry)
    forged = forge(dict(zip(flat[::2], flat[1::2], strict=True)), what)
    once = world.tool.known_keys(CID).once
    action, checksum = int(forged[b"a"]), checksum_of(forged[b"e"])
    added = await world.tool.call("XADD", stream, "*", *[part for item in forged.items() for part in item])
    await world.tool.call("HSET", once, f"k:{action}", checksum, f"q:{action}", f"{stream}|{added.decode()}")
    (copy,) = [one for one in await world.queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert await world.queue.claim(copy) == NothingToDo("forged")
    assert await world.controller.call("XPENDING", stream, "tools", added, added, 1) == []
    ownership = await Owners(world.controller).resume_claim(CID, "w1")
    assert ownership is not None
    await world.controller.call("HDEL", once, f"k:{ACTION}")  # the owner notes it again with the dispatch
    await Owners(world.controller).dispatch(ownership.ownership, ACTION, delivery.entry)
    is_enqueued = what != "an action that no owner dispatched"  # then its own entry still carries the dispatched one
    (right,) = await world.queue.read(limit=8) if is_enqueued else [delivery]
    assert isinstance(right, ActionDelivery)
    assert isinstance(await world.queue.claim(right), ActionClaimed)
    await world.answer(right)
    assert [event.cause for event in await world.observations()] == [ACTION]


async def test_action_of_a_pool_runs_in_no_other_pool(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    await world.log.append_as_owner(ownership, [command("ls")], expected_last_id=1)
    entry = await world.log.load_entry(CID, ACTION)
    await Owners(world.controller).dispatch(ownership, ACTION, entry, pool="browser")
    shard = world.tool.all_shards[0]
    ((_, flat),) = await world.tool.call("XRANGE", shard.actions("pool:browser"), "-", "+")
    await world.tool.call("XADD", shard.actions("pool:bash"), "*", *flat)
    (moved,) = [one for one in await world.queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert await world.queue.claim(moved) == NothingToDo("forged")
    queue = ActionQueue(world.tool, shard, worker_id="t1", node="n1", pools=("browser",))
    await enter(world.tool, "t1", node="n1", pools=("browser",))
    (right,) = [one for one in await queue.read(limit=8) if isinstance(one, ActionDelivery)]
    assert isinstance(await queue.claim(right), ActionClaimed)
    await queue.aclose()


async def test_tool_worker_stops_no_creations(world: World) -> None:
    shard = world.tool.all_shards[0]
    assert await allowed_of([f"HSET {shard.layout} shards 9", f"DEL {shard.layout}"], world.server.tool) == []
    await world.tool.call("HSET", shard.clock, "shards", "9")
    await world.log.create(ConversationCreated(conversation_id="new"))
    assert await world.log.load_last_id("new") == 1


async def test_closed_conversation_takes_no_result(world: World) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    names = world.controller.known_keys(CID)
    await world.controller.call("HSET", names.meta, "closed", "1")
    assert await world.answer(delivery) == Closed()
    await world.controller.call("HDEL", names.meta, "closed")
    await world.answer(delivery)
    await world.controller.call("HSET", names.meta, "closed", "1")
    assert await world.observations() == []


async def test_worker_learns_of_its_actions_without_reading_the_log(world: World) -> None:
    await world.dispatch(2)
    first, second = sorted(await world.take(), key=lambda one: one.action_id)
    await world.tool_log.check_action(CID, first.action_id, checksum_of(first.entry))
    with pytest.raises(EventsLost):
        await world.tool_log.check_action(CID, first.action_id, checksum_of(second.entry))
    await world.answer(first)
    await world.mailbox.read()
    await world.tool_log.check_action(CID, first.action_id, checksum_of(first.entry))
    assert await world.tool_log.load_tenant(CID) == await world.tool_log.load_origin(CID) == ""
    assert await world.tool_log.is_workspace_used(CID)
    assert (await world.tool_log.load_workspace(CID)).pool == "bash"
    assert await refusals(world.server) == []


@pytest.mark.parametrize("is_true", [True, False])
async def test_loss_that_a_tool_worker_reports_is_checked(world: World, is_true: bool) -> None:
    await world.dispatch()
    (delivery,) = await world.take()
    checksum = "00000000" if is_true else checksum_of(delivery.entry)
    await record_gap(world.tool_log, EventsLost(CID, 2, ACTION, checksum), noticed_by="a workspace host")
    await world.mailbox.read()
    (gap,) = world.mailbox.take_gaps().items()
    await record_reported_gap(world.log, *gap)
    kinds = [event.kind for event in await world.log.read(CID)]
    assert ("observation.events_lost" in kinds) is is_true
    assert await refusals(world.server) == []


async def test_forged_crash_marks_make_no_dead_letter(world: World) -> None:
    ownership = await claim(world.controller, "w1")
    names = world.tool.known_keys(CID)
    await world.tool.call("HSET", names.meta, "crashes", 99, "mark", 1, "late", 99)
    for forgery in (("HSET", names.grants, "crashes", 99), ("ZADD", names.shard.dead, 1, CID)):
        with pytest.raises(DeckhandsError):
            await world.tool.call(*forgery)
    assert await bury(world.controller, "w1") == 1
    found = await claim_whole(world.controller, "undertaker")
    assert (found.crashes, await Conversations(world.controller).list_dead_letters()) == (1, [])
    assert found.ownership.token > ownership.token


async def test_forged_crash_marks_hide_no_suspect(world: World) -> None:
    names, owners = world.tool.known_keys(CID), Owners(world.controller)
    for number in range(1, 4):
        await enter(world.controller, f"suspect-{number}")
        ownership = await claim(world.controller, f"suspect-{number}")
        assert await owners.mark(ownership, Mark.ACTING)
        await world.tool.call("HDEL", names.meta, "crashes", "mark", "late")
        for removal in (
            ("HDEL", names.grants, "crashes"),
            ("HDEL", names.grants, "mark"),
            ("ZREM", names.shard.dead, CID),
        ):
            with pytest.raises(DeckhandsError):
                await world.tool.call(*removal)
        await bury(world.controller, f"suspect-{number}")
    assert await Conversations(world.controller).list_dead_letters() == [CID]


async def test_tool_worker_leaves_a_dead_owner_to_those_who_count(world: World) -> None:
    await claim(world.controller, "w1")
    tool = await enter(world.tool, "t2", node="n1")
    assert await bury(world.controller, "w1", by=tool) == 0
    assert await bury(world.controller, "t1", by=tool) == 1  # which owns no conversation
    with pytest.raises(DeckhandsError, match="hands back no conversations"):
        await world.tool.call_function("deck_leave", (world.tool.all_shards[0].root,), "w1")
    assert await bury(world.controller, "w1") == 1
    assert (await claim_whole(world.controller, "undertaker")).crashes == 1
    assert await refusals(world.server) == []


@pytest.mark.parametrize("count", ["x", "1e400", "-7", "1.5", "", "9" * 30, "50"])
async def test_forged_count_of_an_action_ends_nothing_but_that_action(world: World, count: str) -> None:
    await world.dispatch()
    (_delivery,) = await world.take()
    once = world.tool.known_keys(CID).once
    for field in ("n", "f", "m"):
        await world.tool.call("HSET", once, f"{field}:{ACTION}", count)
    await bury(world.controller, "t1")
    await enter(world.tool, "t2", node="n1")
    queue = ActionQueue(world.tool, world.controller.all_shards[0], worker_id="t2", node="n1", pools=("bash",))
    (again,) = [one for one in await queue.read(limit=8) if isinstance(one, ActionDelivery)]
    found = await queue.claim(again)
    assert isinstance(found, ActionReclaimed)
    assert 1 <= found.attempt <= 1_001
    assert await queue.mark(again, Mark.ACQUITTED)
    # After too many deaths, a worker answers without running the action; the conversation continues.
    unknown = OutcomeUnknownObservation(content="It was abandoned.", cause=ACTION)
    checksum = checksum_of(again.entry)
    await world.tool_log.append_observation(CID, unknown, worker_id="t2", place=again.location, checksum=checksum)
    assert [event.kind for event in await world.observations()] == ["observation.outcome_unknown"]
    assert await Conversations(world.controller).list_dead_letters() == []
    await queue.aclose()


def test_page_names_what_a_tool_worker_cannot_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rights.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| tool worker |")]
    assert "read or write a log" in row.split("|")[3]


async def test_fork_is_told_if_its_log_may_not_be_read(world: World, tmp_path: Path) -> None:
    """Only the log shows that no action ran since the checkpoint; the files need no log."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("one")
    checkpoints = Checkpoints(f"file://{tmp_path}/place", SystemClock())
    shell = ShellState("", "/workspace", "/workspace", 0)
    checkpoints.save(CID, tmp_path / "source", SavedFiles(), event=1, get_shell=lambda: shell)
    events = await world.log.read(CID)
    for log, name, is_told in ((world.log, "by-operator", False), (world.tool_log, "by-tool-worker", True)):
        await world.log.create_from(build_fork(events[:1], name), [], key=name)
        notice = await Checkpointing(log, tmp_path / "node", checkpoints, every=1).recover(name, 2, may_mount=False)
        assert (notice is not None and "as they were after event 1" in notice) == is_told
        assert (tmp_path / "node" / name / "workspace" / "file").read_text() == "one"
