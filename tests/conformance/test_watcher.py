"""The end of a conversation: each line of the table and of the promises of `deckhands/client/watcher.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.actions import ChangeAgentStateAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import EventSource, OperatorActed
from broker.contract.observations import EventsLostObservation
from broker.log.conversations import ConversationProgress
from broker.log.ended_stream import EndedStream
from broker.runtime.errors import CorruptEntry, EventsLost, StoreError, StoreUnavailable, UnknownConversation
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from deckhands.client.client import Client
from deckhands.client.errors import NotSettled
from deckhands.client.reading.summary import Summary, Tally
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.watcher import End, Until, follow
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.archive_parts import begin_ended, retired
from tests.broker_parts import begin, message
from tests.conformance.test_log import lose
from tests.polling import unhurried, until
from tests.server_parts import add_key
from tests.stores import LossyWire
from tests.unit.deckhands.sample_log import state

LIMIT_SECONDS = 30.0
AnyClient = Client | RemoteClient
OVER = {AgentState.FINISHED, AgentState.REJECTED, AgentState.ERROR, AgentState.STOPPED}
ASKS = {AgentState.AWAITING_USER_INPUT, AgentState.AWAITING_USER_CONFIRMATION}


@pytest.fixture
async def client(store: Store) -> AsyncIterator[Client]:
    client = Client(store)
    yield client
    await client.watcher.aclose()


@pytest.fixture(params=["store", "http"])
async def reader(request: pytest.FixtureRequest, client: Client) -> AsyncIterator[AnyClient]:
    """A client of each kind in turn, which waits."""
    if request.param == "store":
        yield client
        return
    if isinstance(client.store.connection, MemoryConnection):
        pytest.skip("a server needs more commands")
    gateway = Gateway(client.store, options=ServerOptions(port=0))
    async with serve_in_loop(gateway) as port:
        remote = RemoteClient(f"http://127.0.0.1:{port}", await add_key(client.store))
        yield remote
        await remote.aclose()
    await gateway.follower.watcher.aclose()


async def begin_in(client: Client, name: str, its_state: str) -> None:
    await begin(client.store, name)
    await enter_state(client, name, its_state)


async def enter_state(client: Client, name: str, its_state: str) -> None:
    """Announce a state, as a controller worker would."""
    await client.log.append(name, [state(its_state)], fields={"state": its_state})


def start_wait(
    client: AnyClient, name: str, condition: Until = Until.SETTLED
) -> tuple[asyncio.Task[End], ConversationProgress]:
    progress = ConversationProgress()
    return asyncio.create_task(client.watcher.wait(name, until=condition, progress=progress)), progress


async def finish(waiting: asyncio.Future[End]) -> End:
    return await asyncio.wait_for(waiting, unhurried(LIMIT_SECONDS))


async def judge(client: Client, progress: ConversationProgress, last_id: int, reader: AnyClient | None = None) -> None:
    """Wait until a conversation was looked at with its event `last_id`, and its log was read if that was needed."""
    await until(lambda: progress.last_id == last_id, what="look")
    name = f"later-than-{id(progress)}-{last_id}"
    await begin_in(client, name, "finished")
    await finish(start_wait(reader or client, name)[0])


@pytest.mark.parametrize(
    ("condition", "ends"),
    [
        (Until.SETTLED, OVER | ASKS | {AgentState.PAUSED}),
        (Until.RESULT, OVER | ASKS),
        (Until.OVER, OVER),
    ],
)
async def test_each_state_ends_a_wait_or_does_not(
    client: Client, reader: AnyClient, condition: Until, ends: set[AgentState]
) -> None:
    waiting = {}
    for one in AgentState:
        await begin_in(client, one, one)
        waiting[one] = start_wait(reader, one, condition)
    for one in ends:
        end = await finish(waiting[one][0])
        assert (end.conversation_id, end.summary.state, end.events[-1].id) == (one, one, 2)
    for one in set(AgentState) - ends:
        await judge(client, waiting[one][1], 2, reader)
        assert not waiting[one][0].done(), one
        await enter_state(client, one, "finished")
        assert (await finish(waiting[one][0])).summary.state == "finished"


@pytest.mark.parametrize(
    "unread", [message(), ChangeAgentStateAction(agent_state=AgentState.RUNNING, source=EventSource.USER)]
)
async def test_unread_input_is_no_end(
    client: Client, reader: AnyClient, unread: MessageAction | ChangeAgentStateAction
) -> None:
    await begin_in(client, "one", "finished")
    await client.log.append("one", [unread])
    waiting, progress = start_wait(reader, "one", Until.OVER)
    await judge(client, progress, 3, reader)
    assert not waiting.done()
    await client.log.append("one", [state("running"), state("stopped")], fields={"state": "stopped"})
    assert (await finish(waiting)).summary.last_event_id == 5


async def test_one_log_answers_waits_of_different_conditions(client: Client, reader: AnyClient) -> None:
    await begin_in(client, "one", "paused")
    result, progress = start_wait(reader, "one", Until.RESULT)
    await judge(client, progress, 2, reader)
    assert (await finish(start_wait(reader, "one")[0])).summary.state == "paused"
    assert not result.done()
    await enter_state(client, "one", "error")
    assert (await finish(result)).summary.state == "error"


async def test_an_unknown_conversation_ends_its_wait_alone(client: Client, reader: AnyClient) -> None:
    await begin_in(client, "one", "running")
    one, _ = start_wait(reader, "one")
    with pytest.raises(UnknownConversation, match="nowhere"):
        await finish(start_wait(reader, "nowhere")[0])
    await enter_state(client, "one", "finished")
    await finish(one)


async def test_a_conversation_that_is_deleted_ends_its_wait(client: Client, reader: AnyClient) -> None:
    await begin_in(client, "one", "paused")
    waiting, progress = start_wait(reader, "one", Until.RESULT)
    await judge(client, progress, 2, reader)
    await client.delete("one")
    with pytest.raises(UnknownConversation, match="one"):
        await finish(waiting)


async def test_a_damaged_log_ends_its_wait_alone(client: Client, reader: AnyClient) -> None:
    for name in ("damaged", "one"):
        await begin_in(client, name, "running")
    await client.store.connection.call("XDEL", client.store.known_keys("damaged").events, "1-0")
    damaged, one = (start_wait(reader, name)[0] for name in ("damaged", "one"))
    for name in ("damaged", "one"):
        await enter_state(client, name, "finished")
    with pytest.raises(CorruptEntry):
        await finish(damaged)
    assert (await finish(one)).summary.state == "finished"


async def test_an_archived_conversation_has_ended(client: Client, store: Store, tmp_path: Path) -> None:
    if isinstance(store.connection, MemoryConnection):
        pytest.skip("the job that archives needs a server")
    reader = Client(store, str(tmp_path / "archive"))
    await begin_ended(reader, "one")
    summary = await reader.wait_until_settled("one", timeout_seconds=LIMIT_SECONDS)
    assert await retired(store, tmp_path / "archive", tmp_path)
    for condition in Until:
        assert (await finish(start_wait(reader, "one", condition)[0])).summary == summary
    with pytest.raises(UnknownConversation):
        await finish(start_wait(client, "one")[0])
    await reader.watcher.aclose()


async def test_wait_continues_with_a_log_that_lost_its_end(client: Client, store: Store) -> None:
    await begin_in(client, "conversation-1", "running")
    await client.log.append("conversation-1", [message("one"), message("two")])
    waiting, progress = start_wait(client, "conversation-1")
    await judge(client, progress, 4)
    await lose(store, after=2)
    await until(lambda: progress.last_id == 3, what="name for the gap")
    *_, gap = await client.events("conversation-1")
    assert isinstance(gap, EventsLostObservation)
    assert (gap.last_id, gap.known_id) == (2, 4)
    await enter_state(client, "conversation-1", "finished")
    assert (await finish(waiting)).events[-2] == gap


async def test_a_reader_of_events_hears_of_the_loss(client: Client, store: Store) -> None:
    await begin_in(client, "conversation-1", "running")
    events = follow(client, "conversation-1", Tally.of([state("running").model_copy(update={"id": 2})]))
    await client.log.append("conversation-1", [message("known")])
    assert (await anext(events)).id == 3
    await lose(store, after=1)
    again = follow(client, "conversation-1", Tally.of([state("running").model_copy(update={"id": 3})]))
    with pytest.raises(EventsLost, match="Follow the conversation again from its beginning"):
        await anext(again)
    await events.aclose()


async def test_following_ends_where_a_wait_does(client: Client) -> None:
    await begin_in(client, "one", "paused")
    tally = Tally()
    assert [event.id async for event in follow(client, "one", tally)] == [1, 2]
    assert [event.id async for event in follow(client, "one", tally)] == []
    await client.log.append("one", [message(), state("running"), state("finished")], fields={"state": "finished"})
    assert [event.id async for event in follow(client, "one", tally, until=Until.OVER)] == [3, 4, 5]


async def test_a_limit_of_time_ends_the_wait_only(client: Client) -> None:
    await begin_in(client, "one", "running")
    with pytest.raises(NotSettled, match=r"one has not settled within 0\.01 s"):
        await client.watcher.wait("one", timeout_seconds=0.01)
    await enter_state(client, "one", "finished")
    assert (await client.wait_until_settled("one")).state == "finished"


async def test_many_waits_share_one_reader_of_ends(client: Client, store: Store) -> None:
    names = [f"many-{number}" for number in range(40)]
    async with client.watcher.ends() as ends:
        for name in names:
            await begin_in(client, name, "running")
            ends.add(name)
        ends.add("nowhere")
        ends.complete()
        _, progress = start_wait(client, names[0])
        await judge(client, progress, 2)
        await until(lambda: has_two_connections(store), what="a connection for calls and one for the stream")
        for name in names:
            await enter_state(client, name, "finished")
        found = {name: end async for name, end in ends}
        assert ends.waiting == 0
    assert isinstance(found.pop("nowhere"), UnknownConversation)
    assert {name: end.state for name, end in found.items() if isinstance(end, Summary)} == dict.fromkeys(
        names, "finished"
    )


async def has_two_connections(store: Store) -> bool:
    if isinstance(store.connection, MemoryConnection):
        return True
    return len((await store.connection.call("CLIENT", "LIST")).splitlines()) == 2


async def test_stream_names_conversations_that_settle(client: Client, store: Store) -> None:
    await begin_in(client, "before", "finished")
    stream = EndedStream(store)
    await stream.open()
    await begin_in(client, "works", "running")
    await begin_in(client, "ends", "running")
    await store.call("XADD", store.known_keys("ends").shard.ended, "*", "c", b"\xff", "d", "another field")
    await enter_state(client, "ends", "finished")

    named: list[str] = []
    while "ends" not in named:
        named += await stream.read()
    await stream.aclose()

    assert named == ["\ufffd", "another field", "ends"]


async def test_wait_survives_an_overwritten_stream_of_ends(client: Client, store: Store) -> None:
    await begin_in(client, "one", "running")
    await store.call("SET", store.known_keys("one").shard.ended, "no stream")
    waiting, progress = start_wait(client, "one")
    await judge(client, progress, 2)

    await enter_state(client, "one", "finished")

    assert (await waiting).summary.state == "finished"


async def test_an_outage_longer_than_the_patience_ends_every_wait(lossy_wire: LossyWire) -> None:
    async with Client(await open_store(lossy_wire.url, patience_seconds=0.2)) as client:
        await begin_in(client, "one", "running")
        waits = [start_wait(client, "one") for _ in range(2)]
        await judge(client, waits[0][1], 2)
        lossy_wire.swallow = lambda _: True
        for waiting, _ in waits:
            with pytest.raises(StoreError):
                await finish(waiting)
        lossy_wire.swallow = lambda _: False
        waiting, _ = start_wait(client, "one")
        await enter_state(client, "one", "finished")
        assert (await finish(waiting)).summary.state == "finished"


async def test_a_client_that_is_closed_answers_its_waits(client: Client) -> None:
    await begin_in(client, "one", "running")
    waiting, progress = start_wait(client, "one")
    await until(lambda: progress.last_id == 2, what="look")
    await client.watcher.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await finish(waiting)


async def test_a_copy_for_an_operator_shares_the_watcher(client: Client) -> None:
    copy = client.as_operator(OperatorActed(author="anonymous", action="pause"))
    assert copy.watcher is client.watcher  # closing the client ends its task
