"""The client against a real store, with the test in the controller's part; and permitted deletions."""

from __future__ import annotations

import asyncio

import pytest

from broker.contract.actions import ChangeAgentStateAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, DelegateEnded, Event, LLMSpec, Parent, WorkspaceSpec
from broker.contract.observations import AgentStateChangedObservation
from broker.runtime.errors import CorruptEntry, StoreUnavailable, UnknownConversation, UsageError
from deckhands import Client
from deckhands.client.tasks.tasks import check_task, derive_conversation_id, derive_title
from tests.stores import emptied
from tests.unit.deckhands.sample_log import command, output, reply, state


@pytest.fixture
async def client(valkey_server):
    async with await Client.connect(await emptied(valkey_server.url)) as found:
        yield found


@pytest.fixture
async def cid(client):
    """A conversation that was submitted."""
    return await client.submit("Fix it.")


async def settle(client: Client, cid: str, name: str) -> None:
    """Read the messages and announce a state, as a controller would."""
    await client.log.append(cid, [state("running"), state(name)], fields={"state": name})


async def test_a_task_begins_a_conversation(client):
    agent = AgentSpec(llm=LLMSpec(model="acme/large"), enable_workspace_skills=True)
    cid = await client.submit("Fix it.\nPlease.", agent=agent, workspace=WorkspaceSpec(path="/srv/p"))
    created, message = await client.events(cid)
    assert (created.conversation_id, created.title, created.agent, created.headless) == (cid, "Fix it.", agent, True)
    assert (message.content, message.source) == ("Fix it.\nPlease.", "user")
    assert [row.conversation_id for row in await client.recent()] == [cid]


async def test_the_same_key_is_the_same_conversation(client):
    first = await client.submit("Fix it.", idempotency_key="ticket 17")
    assert first == derive_conversation_id("ticket 17")
    assert await client.submit("Something else.", idempotency_key="ticket 17") == first
    assert await client.submit("Fix it.", idempotency_key="ticket 18") != first
    assert len(await client.events(first)) == 2


async def test_an_id_that_is_taken_is_refused(client):
    await client.submit("Fix it.", conversation_id="mine")
    with pytest.raises(UsageError, match="'mine'"):
        await client.submit("Fix it.", conversation_id="mine")


@pytest.mark.parametrize(
    ("task", "message"), [(" \n", "The task is empty"), ("x" * 100_001, "has 100,001 characters; the limit is 100,000")]
)
async def test_a_task_that_cannot_be_used(client, task, message):
    with pytest.raises(UsageError, match=message):
        await client.submit(task)
    check_task("x" * 100_000)


async def test_a_message_is_appended_once_under_its_key(client, cid):
    for _ in range(2):
        await client.send_message(cid, "Faster.", idempotency_key="m1")
    assert [event.content for event in await client.events(cid, after=2)] == ["Faster."]
    with pytest.raises(UsageError, match="The message is empty"):
        await client.send_message(cid, "")


async def test_an_unknown_conversation_is_named(client):
    for verb in ("pause", "resume", "cancel", "summary", "events", "row"):
        with pytest.raises(UnknownConversation, match=r"'nope'.*deckhands ls"):
            await getattr(client, verb)("nope")


async def test_pausing_and_resuming_ask_the_agent(client, cid):
    await client.pause(cid)
    await client.resume(cid)
    asked = await client.events(cid, after=2)
    assert [(type(event), event.agent_state, event.source) for event in asked] == [
        (ChangeAgentStateAction, "paused", "user"),
        (ChangeAgentStateAction, "running", "user"),
    ]


async def test_ended_conversation_can_be_paused_after_a_message_only(client, cid):
    await settle(client, cid, "finished")
    with pytest.raises(UsageError, match="is finished; it cannot be paused"):
        await client.pause(cid)
    await client.send_message(cid, "And now?")
    await client.pause(cid)
    assert (await client.events(cid, after=5))[0].agent_state == "paused"


async def test_pausing_and_confirming_do_not_read_the_whole_log(client, cid):
    question = state("awaiting_user_confirmation").model_copy(update={"action_id": 40})
    talk = [MessageAction(content="x", source="agent")] * 40
    await client.log.append(cid, [*talk, question, *talk], fields={"state": "awaiting_user_confirmation"})
    await client.store.connection.call("XDEL", client.store.known_keys(cid).events, "2-0")
    with pytest.raises(CorruptEntry):
        await client.events(cid)
    with pytest.raises(UsageError, match="asks about action 40"):
        await client.confirm(cid, action_id=41)
    await client.confirm(cid, action_id=40)
    await client.pause(cid)
    asked = await client.events(cid, after=83)
    assert [(event.agent_state, event.action_id) for event in asked] == [("user_confirmed", 40), ("paused", None)]


async def test_nothing_can_be_confirmed_where_nothing_is_asked(client, cid):
    for answer in (client.confirm, client.reject):
        with pytest.raises(UsageError, match="asks nothing: it is loading"):
            await answer(cid)


async def test_cancelling_waits_until_the_agent_has_stopped(client, cid):
    await client.log.append(cid, [state("running")])
    cancelling = asyncio.ensure_future(client.cancel(cid, wait_seconds=60))
    async for event in client.tail(cid, after=3):
        assert isinstance(event, ChangeAgentStateAction)
        break
    assert not cancelling.done()
    await settle(client, cid, "stopped")
    assert (await cancelling).state == "stopped"


async def test_tail_ends_when_the_conversation_settles(client, cid):
    tailing = asyncio.ensure_future(collect(client.tail(cid)))
    await settle(client, cid, "finished")
    seen = await tailing
    assert [event.id for event in seen] == [1, 2, 3, 4]
    assert [event.id for event in await collect(client.tail(cid, after=2))] == [3, 4]
    assert await collect(client.tail(cid, after=4)) == []
    await client.send_message(cid, "Once more.")
    await settle(client, cid, "finished")
    assert [event.id for event in await collect(client.tail(cid, after=4))] == [5, 6, 7]


async def test_endless_tail_continues_after_settling(client, cid):
    await settle(client, cid, "finished")
    async for event in client.tail(cid, is_endless=True):
        if event.id == 4:
            await client.send_message(cid, "Once more.")
        if event.id == 5:
            break
    assert event.content == "Once more."


async def collect(events):
    return [event async for event in events]


async def test_cancelling_what_is_over_changes_nothing(client, cid):
    await settle(client, cid, "finished")
    assert (await client.cancel(cid, wait_seconds=60)).state == "finished"
    assert len(await client.events(cid)) == 4


async def test_cancelling_says_when_nobody_listens(client, cid):
    assert (await client.cancel(cid)).state == "loading"  # without a wait, it only asks
    assert [event.kind for event in await client.events(cid, after=2)] == ["action.change_agent_state"]
    with pytest.raises(StoreUnavailable, match=r"has not stopped within 0\.05 s\..*controller worker"):
        await client.cancel(cid, wait_seconds=0.05)


async def test_only_what_is_over_is_closed(client, cid):
    with pytest.raises(UsageError, match="is loading; only one that is over can be closed"):
        await client.close(cid)
    await settle(client, cid, "finished")
    await client.close(cid)
    assert (await client.row(cid)).is_closed
    with pytest.raises(UsageError, match="is closed"):
        await client.send_message(cid, "Hello?")


async def test_an_answer_is_for_the_action_that_was_shown(client, cid):
    await client.log.append(cid, [state("running"), reply(), command("make")])
    asked = AgentStateChangedObservation(agent_state="awaiting_user_confirmation", action_id=5)
    await client.log.append(cid, [asked], fields={"state": "awaiting_user_confirmation"})
    for answer in (client.confirm, client.reject):
        with pytest.raises(UsageError, match="asks about action 5"):
            await answer(cid, action_id=4)
    await client.confirm(cid, action_id=5)
    (answered,) = await client.events(cid, after=6)
    assert (answered.agent_state, answered.action_id, answered.source) == ("user_confirmed", 5, "user")


async def test_another_model_is_switched_to_before_the_message(client, cid):
    await client.send_message(cid, "Faster.", model="acme/small")
    await client.resume(cid, model="acme/large")
    kinds = [event.kind for event in await client.events(cid, after=2)]
    assert kinds == ["model.switched", "action.message", "model.switched", "action.change_agent_state"]


async def test_secrets_are_masked_in_messages_and_edited_answers(client, tmp_path, monkeypatch):
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    cid = await client.submit("Fix it.", secrets={"TOKEN": "correct-horse-battery"})
    await client.send_message(cid, "It is correct-horse-battery.")
    await client.log.append(cid, [state("running"), reply(), command("make")])
    asked = AgentStateChangedObservation(agent_state="awaiting_user_confirmation", action_id=6)
    await client.log.append(cid, [asked], fields={"state": "awaiting_user_confirmation"})
    await client.confirm(cid, edited={"command": "login correct-horse-battery"})
    said, *_, answered = await client.events(cid, after=2)
    assert said.content == "It is <secret_hidden>."
    assert answered.edited == {"command": "login <secret_hidden>"}


async def test_a_fork_under_the_same_key_is_the_same_fork(client, cid):
    first = await client.fork(cid, at=2, idempotency_key="again")
    assert await client.fork(cid, at=2, idempotency_key="again") == first == derive_conversation_id("again")
    assert await client.fork(cid, at=2) != first


async def test_repeated_fork_of_a_grown_origin_is_the_same_fork(client, cid):
    first = await client.fork(cid, idempotency_key="whole")
    await client.log.append(cid, [state("running"), reply(), command("make"), output(5)])
    assert await client.fork(cid, idempotency_key="whole") == first
    (created,) = await client.log.read(first, until=1)
    assert created.forked_from == f"{cid}@2"
    other = await client.submit("another task")
    for origin, at in ((other, None), (cid, 3)):
        with pytest.raises(UsageError, match="already"):
            await client.fork(origin, at=at, idempotency_key="whole")


async def test_waiting_until_it_settles(client, cid):
    waiting = asyncio.ensure_future(client.wait_until_settled(cid, timeout_seconds=10))
    await client.log.append(cid, [state("running"), reply(), command("make"), output(5)])
    await settle(client, cid, "finished")
    summary = await waiting
    assert (summary.state, summary.iterations, summary.last_event_id) == ("finished", 1, 8)


async def test_message_right_after_the_end_is_waited_for(client, cid):
    message = MessageAction(content="And that.", source="user")
    await client.log.append(cid, [state("running"), state("finished"), message])
    with pytest.raises(TimeoutError):
        await client.wait_until_settled(cid, timeout_seconds=0.1)


async def test_long_texts_are_whole_when_asked_for(client, cid):
    text = "0123456789" * 10_000
    await client.log.append(cid, [MessageAction(content=text, source="agent")])
    (short,) = await client.events(cid, after=2)
    assert len(short.content) < 20_000
    assert (await client.events(cid, is_whole=True))[2].content == text
    async for event in client.tail(cid, after=2, is_whole=True):
        assert event.content == text
        break


def test_titles_are_one_line():
    assert derive_title("\n  Fix it.  \nNow.") == "Fix it."
    assert derive_title("x" * 80) == "x" * 80
    assert derive_title("x" * 100) == "x" * 79 + "…"


async def begin(client: Client, name: str, its_state: str, *events: Event, parent: Parent | None = None) -> None:
    await client.log.create(ConversationCreated(conversation_id=name, parent=parent), [state("running")])
    await client.log.append(name, [*events, state(its_state)], fields={"state": its_state})


def ended(name: str) -> DelegateEnded:
    return DelegateEnded(delegate_id=2, conversation_id=name, agent_state=AgentState.FINISHED)


async def test_what_rests_is_deleted(client: Client) -> None:
    for its_state in ("finished", "error", "rejected", "stopped", "paused", "awaiting_user_input"):
        await begin(client, its_state, its_state)
        await client.delete(its_state)
        with pytest.raises(UnknownConversation):
            await client.row(its_state)
        with pytest.raises(UnknownConversation):
            await client.delete(its_state)


async def test_what_runs_is_not(client: Client) -> None:
    await begin(client, "one", "running")
    with pytest.raises(UsageError, match="is running; only a settled one") as caught:
        await client.delete("one")
    assert "rm --cancel" in caught.value.remedy
    await begin(client, "two", "finished")
    await client.send_message("two", "Continue.")
    with pytest.raises(UsageError, match="only a settled one"):
        await client.delete("two")


async def test_delegates_go_with_their_parent_and_not_before_it(client: Client) -> None:
    await begin(client, "parent", "running")
    of_parent = Parent(conversation_id="parent", delegate_id=2)
    await begin(client, "child", "finished", ended("grandchild"), parent=of_parent)
    await begin(client, "grandchild", "finished", parent=Parent(conversation_id="child", delegate_id=2))
    with pytest.raises(UsageError, match="is a delegate of parent, which is running"):
        await client.delete("child")
    await client.log.append(
        "parent", [ended("child"), ended("gone-before"), state("finished")], fields={"state": "finished"}
    )
    await client.delete("parent")
    assert await client.recent() == []


async def test_a_damaged_log_is_deleted(client: Client) -> None:
    await begin(client, "one", "finished")
    names = client.store.known_keys("one")
    await client.store.connection.call("XDEL", names.events, "2-0")
    await client.delete("one")
    await begin(client, "two", "running")
    await client.store.connection.call("XDEL", client.store.known_keys("two").events, "2-0")
    with pytest.raises(UsageError, match="only a settled one"):
        await client.delete("two")
